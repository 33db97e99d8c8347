"""Mixtures of experts: expert parallel and expert tensor parallel groups, real Megatron models, real engines.

Three updates each, every tensor compared with the checkpoint's, tokens with those of an engine loaded from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.checkpoints import checkpoint_tensors, hf_config
from harness.world.job import SyncJob, SyncReport

ThreeUpdates = Callable[..., tuple[SyncJob, list[SyncReport]]]

pytestmark = pytest.mark.own_world

EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.")


def test_two_stages_of_two_tensor_and_two_expert_parallel_ranks(three_updates: ThreeUpdates) -> None:
    """The smallest world of the public report on experts copied over expert parallel borders (B19)."""
    job, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, "qwen3_moe", num_layers=3)
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3
    assert gathered_in(job) == {0: {"tp", "ep"}, 1: {"tp", "ep"}, 2: {"tp", "ep"}, 3: {"tp", "ep"}}


def test_four_expert_parallel_ranks_on_one_stage(three_updates: ThreeUpdates) -> None:
    """B133, B19: experts 1|2, 3|4 and 5|6 sit on both sides of a border. One stage, and the gather spans data parallel ranks,
    which take no part in the dense pass."""
    job, reports = three_updates({"dp": 4, "ep": 4}, "qwen3_moe", num_layers=2)
    assert [report.stages for report in reports] == [["vime-pp_0"]] * 3
    assert gathered_in(job) == {rank: {"ep"} for rank in range(4)}
    assert experts_sent(job) == {str(expert) for expert in range(8)}
    assert len({tensor.numpy(force=True).tobytes() for tensor in border_tensors()}) == 8, "experts could be mistaken for others"


def test_experts_cut_over_tensor_ranks_of_their_own(three_updates: ThreeUpdates) -> None:
    """Expert tensor parallel 2 under tensor parallel 1, with two expert parallel ranks: both groups span data parallel ranks."""
    job, reports = three_updates({"dp": 4, "ep": 2, "etp": 2}, "qwen3_moe", num_layers=2, args={
        "vllm_weight_sync_packed": True})
    assert gathered_in(job) == {rank: {"etp", "ep"} for rank in range(4)}
    assert reports[-1].version == 3


def gathered_in(job: SyncJob) -> dict[int, set[str]]:
    """Rank -> groups in which it gathered during the last update."""
    return {rank: {event["group"] for event in update["events"] if event["event"] == "gather"}
            for rank, update in enumerate(job.updates[-1])}


def experts_sent(job: SyncJob) -> set[str]:
    return {found[1] for event in job.story("send") for name in event["detail"].split() if (found := EXPERT.match(name))}


def border_tensors() -> list[torch.Tensor]:
    """One matrix of every expert of the first layer."""
    tensors = checkpoint_tensors(hf_config("qwen3_moe", num_layers=2))
    return [tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"].view(torch.int16) for expert in range(8)]


def test_latent_attention_and_layers_that_predict_more_tokens(three_updates: ThreeUpdates) -> None:
    """DeepSeek-V3: first layer dense, routed and shared experts, a router bias in float32 inside packed bf16 buckets, and an MTP
    layer whose copy of the embedding on the last stage is not sent again. The engine has no draft model and drops MTP's names."""
    job, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, "deepseek_v3", num_layers=3, num_nextn_predict_layers=1,
                                 args={"vllm_weight_sync_packed": True})
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3
    names = [name for event in job.story("send") for name in event["detail"].split()]
    copies = ["model.embed_tokens.weight", "model.layers.3.embed_tokens.weight"]
    assert [name for name in names if name.endswith("embed_tokens.weight")] == copies


@pytest.mark.parametrize(("model", "shape"), [
    ("qwen2_moe", {}), ("mixtral", {}), ("glm4_moe", {"num_nextn_predict_layers": 1}), ("deepseek_v3", {"q_lora_rank": None}),
], ids=["qwen2_moe", "mixtral", "glm4_moe-mtp", "deepseek_v3-without-q-rank"])
def test_other_families(three_updates: ThreeUpdates, model: str, shape: dict[str, Any]) -> None:
    _, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, model, num_layers=2, **shape)
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3
