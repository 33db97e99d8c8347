"""Experts: numbering, containers, groups, what is refused, and what a pass costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from harness.cutting import Container
from staged_sync.completeness import coverage_problems
from staged_sync.errors import GatherError
from staged_sync.megatron import gathering
from tests_cpu.megatron.fakes import (
    RecordingSeam,
    Stage,
    World,
    differences,
    export_stage,
    export_world,
    exporter,
    header,
    stage_model,
    world,
    write_config,
)

MOE = hf_config("qwen3_moe", num_layers=2, heads=4, groups=2)
ALL_NAMES = set(checkpoint_tensors(MOE))
EP4 = world(MOE, ep=4, dp=4)


def stream(stages: list[Stage]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
            for stage in stages for name, tensor in stage.tensors}


def test_b135_the_same_stream_whatever_the_layout_and_the_bucket_size(tmp_path: Path) -> None:
    """tp, pp, ep, etp and containers change who holds what, never what is sent."""
    layouts = [world(MOE), world(MOE, ep=2, dp=2), EP4, world(MOE, tp=2, pp=2, ep=2), world(MOE, ep=2, etp=2, dp=4),
               world(MOE, tp=2, etp=2, container="grouped"), world(MOE, tp=4, ep=2, container="te", names="te")]
    hf = checkpoint_tensors(MOE)
    expected = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in hf.items()}
    for at in layouts:
        for size in (1, 1 << 15, 1 << 30):
            stages = export_world(tmp_path, replace(at, args={"update_weight_buffer_size": size}), hf=hf)
            assert stream(stages) == expected


@pytest.mark.parametrize("container", ["sequential", "te", "grouped"])
@pytest.mark.parametrize("etp", [1, 2])
def test_b132_every_container_is_exported_with_and_without_attributes(tmp_path: Path, container: Container, etp: int) -> None:
    at = world(MOE, ep=2, etp=etp, dp=2 * etp, container=container)
    assert differences(export_world(tmp_path, at), checkpoint_tensors(MOE)) == []


def test_experts_are_gathered_in_the_expert_groups_alone_and_together(tmp_path: Path) -> None:
    """One gather per half bucket, not one per tensor: 2 layers of 4 local experts, fc1 24,576 and fc2 12,288 bytes each."""
    at = world(MOE, ep=2, etp=2, dp=4, args={"update_weight_buffer_size": 1 << 20})
    (stage,) = export_world(tmp_path, at)
    # A layer's experts are 8 · 36,864 = 294,912 bytes in full; 524,288 hold one layer and part of the next.
    assert stage.groups == ["etp", "ep"] * 2


def test_ranks_outside_the_source_s_expert_groups_are_not_needed(tmp_path: Path) -> None:
    """Expert data parallel replicas: `export_stage` runs the source's peers alone, and nobody waits for the others."""
    at = world(MOE, ep=2, dp=4)
    assert at.coordinates(2, 0).edp == 1
    assert differences(export_world(tmp_path, at), checkpoint_tensors(MOE)) == []


def test_the_source_describes_the_experts_of_all_ranks(tmp_path: Path) -> None:
    """From metadata alone: it holds experts 0 and 1 of 8, and says what all of them will be."""
    source = exporter(write_config(tmp_path, MOE), stage_model(checkpoint_tensors(MOE), EP4), RecordingSeam(EP4))
    assert {meta.name for meta in source.describe()} == ALL_NAMES
    hf = checkpoint_tensors(MOE)
    assert header(hf) == {meta.name: meta for meta in source.describe()}


# --- what is refused ----------------------------------------------------------------------------------------------------

def problems(folder: Path, at: World, change: Callable[[nn.Module], None] = lambda model: None, *, rank: int = 0) -> list[str]:
    model = stage_model(checkpoint_tensors(at.config), at, rank=rank)
    change(model[0].module.module)
    return exporter(write_config(folder, at.config), model, RecordingSeam(at, rank=rank)).problems()


def test_uneven_experts_are_refused_with_both_numbers(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        del model.decoder.layers.get_submodule("1").mlp.experts.local_experts._modules["1"]

    assert problems(tmp_path, EP4, change, rank=3) == [
        "decoder.layers.1: this rank (expert parallel rank 3 of 4) holds local experts [0]; 8 experts over 4 ranks are 2 on "
        "each. Uneven experts are not supported"]


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    at = replace(EP4, fields={"num_moe_experts": 6})
    assert "num_moe_experts must be a multiple of the expert parallel size (got 6 experts over 4 ranks)" in problems(
        tmp_path, at)[0]


def test_b132_an_expert_shard_that_is_not_the_configured_shape_is_refused(tmp_path: Path) -> None:
    """Without attributes, only the configuration knows that this is a shard of something else."""
    def change(model: nn.Module) -> None:
        linear = model.decoder.layers.get_submodule("0").mlp.experts.linear_fc1
        linear.weight0 = nn.Parameter(linear.weight0[:10].clone())

    assert problems(tmp_path, world(MOE, etp=2, dp=2, container="te"), change) == [
        "decoder.layers.0.mlp.experts.linear_fc1.weight0 is [10, 96] here, whole on this rank (no dimension is 2 times too "
        "short), so [10, 96] in full; the configuration says [128, 96] (2·expert_ffn, hidden)"]


def test_a_grouped_container_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.decoder.layers.get_submodule("0").mlp.experts.num_local_experts = 5

    found = problems(tmp_path, world(MOE, container="grouped"), change)
    assert found[0] == ("chunk 0: decoder.layers.0.mlp.experts.weight1 [96, 1024] does not divide into its container's "
                        "num_local_experts=5")


def test_an_expert_model_without_expert_sizes_says_what_is_unknown(tmp_path: Path) -> None:
    at = replace(world(MOE), fields={"moe_ffn_hidden_size": None, "num_moe_experts": None})
    found = problems(tmp_path, at)
    assert found[0].startswith("num_moe_experts is unknown: ")
    assert any("needs the size of 2·expert_ffn" in line for line in found)


# --- failures between two gathers ---------------------------------------------------------------------------------------

class FailingSeam(RecordingSeam):
    """Breaks the second collective of a unit, before it is entered."""

    def all_gather(self, tensor: torch.Tensor, group: str, *, timeout_s: float) -> list[torch.Tensor]:
        if group == "ep":
            raise MemoryError("no room for the output")
        return super().all_gather(tensor, group, timeout_s=timeout_s)


def test_what_fails_after_the_first_collective_of_a_unit_is_a_gather_error(tmp_path: Path) -> None:
    """The peers have gone on: asking again would join a gather in which nobody is."""
    at = world(MOE, ep=2, etp=2, dp=4)
    export = exporter(write_config(tmp_path, MOE), stage_model(checkpoint_tensors(MOE), at), FailingSeam(at))
    with pytest.raises(GatherError, match=r"local_experts\.0.* failed between two gathers of one unit: no room"):
        export.gather(export.units("expert")[0], timeout_s=7)


def test_what_fails_before_the_first_collective_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = world(MOE, ep=2, dp=2)
    seam = RecordingSeam(at)
    export = exporter(write_config(tmp_path, MOE), stage_model(checkpoint_tensors(MOE), at), seam)

    def no_room(tensors: list[torch.Tensor]) -> torch.Tensor:
        raise MemoryError("no room to prepare")
    monkeypatch.setattr(gathering, "sendable", no_room)
    with pytest.raises(MemoryError, match="no room to prepare"):
        export.gather(export.units("expert")[0], timeout_s=7)
    assert seam.sent == []


# --- dtype --------------------------------------------------------------------------------------------------------------

BIASED = hf_config("glm4_moe", num_layers=2, heads=4, groups=2, first_k_dense_replace=1)


def test_a_router_bias_stays_float32_among_bfloat16_weights(tmp_path: Path) -> None:
    hf = checkpoint_tensors(BIASED)
    stage = export_stage(tmp_path, hf, world(BIASED, ep=2, dp=2), 0, header(hf))
    assert differences([stage], hf) == []
    assert {m.name for m in stage.described if m.dtype == torch.float32} == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    bias = hf["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.bfloat16().float().ne(bias).any(), "these values would survive a cast"


def test_a_router_bias_that_the_checkpoint_does_not_name_is_an_error(tmp_path: Path) -> None:
    """The engine would route without it, and nobody would know."""
    hf = checkpoint_tensors(BIASED)
    named = {name: meta for name, meta in header(hf).items() if not name.endswith("correction_bias")}
    stage = export_stage(tmp_path, hf, world(BIASED), 0, named)
    assert coverage_problems([stage.described], named) == [
        "extra: stage 0 sends model.layers.1.mlp.gate.e_score_correction_bias [8] float32, not in the checkpoint"]


def test_a_router_bias_in_a_family_without_one_is_refused(tmp_path: Path) -> None:
    at = replace(world(MOE), fields={"moe_router_enable_expert_bias": True})
    assert problems(tmp_path, at) == [
        "the model's config has moe_router_enable_expert_bias=True, but this family's weights are laid out for "
        "moe_router_enable_expert_bias=False; exporting them would be silently wrong"]


def test_a_bias_that_a_cast_of_the_module_has_rounded_is_refused(tmp_path: Path) -> None:
    at, hf = world(BIASED), checkpoint_tensors(BIASED)
    model = stage_model(hf, at)
    model[0].bfloat16()
    export = exporter(write_config(tmp_path, BIASED), model, RecordingSeam(at), header(hf))
    assert export.problems() == [
        "decoder.layers.1.mlp.router.expert_bias is torch.bfloat16 in the model and torch.float32 in the checkpoint "
        "(model.layers.1.mlp.gate.e_score_correction_bias): a cast of the whole module has rounded it. Keep this buffer in "
        "torch.float32, as Megatron's router does"]
