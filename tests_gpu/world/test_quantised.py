"""Quantised rollout: the trainer holds bf16, the engines serve FP8 with a scale per block, and the sync quantises on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.fp8 import quantised_copy
from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.pool import WorldPool
from harness.world.wire import Topology
from tests_gpu.conftest import on_device

SHAPE = {"num_layers": 3, "heads": 8, "groups": 4, "head_dim": 32, "hidden_size": 160, "ffn_size": 384}
"""vLLM fuses q, k and v and needs whole blocks in each; the hidden size ends in a partial block."""


@pytest.mark.own_world
@pytest.mark.skipif(not (torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()),
                    reason="vLLM's CPU build has FP8 kernels for processors with AMX only")
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_b150_engines_that_serve_fp8_get_weights_and_scales(
        packed: bool, request: pytest.FixtureRequest, worlds: WorldPool, own_deadline: Deadline, tmp_path: Path,
        checkpoints: Callable[..., str], exact: Callable[[SyncReport], SyncReport]) -> None:
    steps = [checkpoints("qwen3", step, **SHAPE) for step in (0, 1, 2)]
    served = [str(quantised_copy(step, tmp_path / f"fp8-{number}")) for number, step in enumerate(steps)]
    job = SyncJob(worlds.get(on_device(request.config, Topology(tp=2, pp=2, engines=1))), steps[0], own_deadline,
                  served=served[0], scenario=f"engines that serve FP8{', packed' * packed}",
                  args={"update_weight_buffer_size": 1 << 18, "vllm_weight_sync_packed": packed})
    job.connect()
    for step, fp8 in zip(steps, served, strict=True):
        job.load(step, fp8)
        report = exact(job.update())
        assert report.engines[0].tensors_total == 36 + 21, "every linear layer's scales are tensors of their own"
