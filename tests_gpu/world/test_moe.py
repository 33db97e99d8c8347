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
from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.pool import WorldPool
from harness.world.wire import Topology
from tests_gpu.conftest import on_device
from tests_gpu.world.test_forward import check_logits

ThreeUpdates = Callable[..., tuple[SyncJob, list[SyncReport]]]

pytestmark = pytest.mark.own_world

EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.")


def test_b19_b137_two_stages_of_two_tensor_and_two_expert_parallel_ranks(three_updates: ThreeUpdates) -> None:
    """The smallest world of the public report on experts copied over expert parallel borders. Three updates of one engine: the
    output after each is that of a fresh engine with those weights."""
    job, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, "qwen3_moe", num_layers=3)
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3
    assert gathered_in(job) == {0: {"tp", "ep"}, 1: {"tp", "ep"}, 2: {"tp", "ep"}, 3: {"tp", "ep"}}


def test_b19_b133_four_expert_parallel_ranks_on_one_stage(three_updates: ThreeUpdates) -> None:
    """Experts 1|2, 3|4 and 5|6 sit on both sides of a border. One stage, and the gather spans data parallel ranks,
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


def test_b82_b144_b155_latent_attention_and_layers_that_predict_more_tokens(three_updates: ThreeUpdates) -> None:
    """DeepSeek-V3: first layer dense, routed and shared experts, a router bias in float32 inside packed bf16 buckets, and an MTP
    layer whose copy of the embedding on the last stage is not sent again. The engine has no draft model and drops MTP's names."""
    job, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, "deepseek_v3", num_layers=3, num_nextn_predict_layers=1,
                                 args={"vllm_weight_sync_packed": True})
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3
    names = [name for event in job.story("send") for name in event["detail"].split()]
    copies = ["model.embed_tokens.weight", "model.layers.3.embed_tokens.weight"]
    assert [name for name in names if name.endswith("embed_tokens.weight")] == copies
    (biases,) = job.on_receivers("dtypes", ending="e_score_correction_bias")
    assert {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)} <= set(biases)
    assert set(biases.values()) == {"float32"}


EACH_ITS_OWN_BUCKET = {"update_weight_buffer_size": 1}


@pytest.mark.parametrize(("model", "shape", "args"), [
    ("qwen2_moe", {}, {}), ("mixtral", {}, {}), ("glm4_moe", {"num_nextn_predict_layers": 1}, EACH_ITS_OWN_BUCKET),
    ("deepseek_v3", {}, EACH_ITS_OWN_BUCKET), ("deepseek_v3", {"q_lora_rank": None}, {}),
], ids=["qwen2_moe", "mixtral", "glm4_moe-mtp", "deepseek_v3", "deepseek_v3-without-q-rank"])
def test_b92_b93_other_families_and_the_smallest_buckets(three_updates: ThreeUpdates, model: str, shape: dict[str, Any],
                                                         args: dict[str, int]) -> None:
    """With one unit per bucket, vLLM still gets both down projections in one call, and an MTP layer's tensors in many."""
    _, reports = three_updates({"tp": 2, "pp": 2, "ep": 2}, model, num_layers=2, args=args, **shape)
    assert [report.stages for report in reports] == [["vime-pp_0", "vime-pp_1"]] * 3


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3"])
def test_megatron_and_transformers_agree_on_logits(model: str, worlds: WorldPool, own_deadline: Deadline,
                                                   checkpoints: Callable[..., str], own_topology: Topology) -> None:
    """Experts, shared experts and latent attention on the trainer are those of the checkpoint, not a bag of tensors."""
    check_logits(worlds.get(own_topology), own_deadline, checkpoints(model, num_layers=3))


@pytest.fixture
def own_topology(request: pytest.FixtureRequest) -> Topology:
    """The world that the tests above have left warm."""
    return on_device(request.config, Topology(tp=2, pp=2, ep=2, engines=1))
