"""Gather peers that would gather different things are named at connect, on every rank, before a byte moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from harness.recording.exporter import StubExporter
from harness.recording.job import RecordingJob
from harness.recording.model import small_table
from staged_sync.errors import ConfigurationError
from staged_sync.exporter import Part
from staged_sync.peers import gather_problems
from staged_sync.plan import Topology
from tests_cpu.megatron.fakes import PARTS, RecordingSeam, World, exporter, stage_model, world, write_config

MOE = hf_config("qwen3_moe", num_layers=3, heads=4, groups=2)


def problems(folder: Path, at: World, change: Callable[[int, nn.Module], None]) -> list[str]:
    """What is wrong between the ranks of a one-stage world, after `change(rank, model)`."""
    args, hf = write_config(folder, at.config), checkpoint_tensors(at.config)
    gathers = []
    for rank in at.ranks:
        model = stage_model(hf, at, rank=rank)
        change(rank, model[0].module.module)
        export = exporter(args, model, RecordingSeam(at, rank=rank))
        gathers.append({part: export.gathers(part) for part in PARTS})
    return gather_problems(Topology(tuple(at.coordinates(rank, 0) for rank in at.ranks)), gathers)


def test_peers_that_agree_have_no_problem_in_few_lines(tmp_path: Path) -> None:
    at = world(MOE, tp=2, ep=2, etp=2, dp=2)
    assert problems(tmp_path, at, lambda rank, model: None) == []
    export = exporter(write_config(tmp_path, MOE), stage_model(checkpoint_tensors(MOE), at), RecordingSeam(at))
    lines = export.gathers("expert")
    assert lines[:2] == ["decoder.layers.{0-2}.mlp.experts.local_experts.{0-3}.linear_fc1.weight [64, 96] bfloat16",
                         "decoder.layers.{0-2}.mlp.experts.local_experts.{0-3}.linear_fc2.weight [96, 32] bfloat16"]
    assert lines[2].startswith("order and units ")
    assert len(lines) == 3


def test_a_peer_with_another_dtype_is_named_with_what_differs(tmp_path: Path) -> None:
    def change(rank: int, model: nn.Module) -> None:
        if rank in (2, 3):
            model.decoder.layers.get_submodule("1").mlp.experts.float()

    fc1 = "decoder.layers.{{{}}}.mlp.experts.local_experts.{{0-1}}.linear_fc1.weight [128, 96] {}"
    (said,) = problems(tmp_path, world(MOE, ep=4, dp=4), change)
    assert said.startswith("stage 0, expert pass: rank 0 (the source) and ranks 2, 3 would gather different things. ")
    assert f"Only on rank 0: {fc1.format('0-2', 'bfloat16')}" in said
    assert f"only on ranks 2, 3: {fc1.format('0,2', 'bfloat16')}" in said
    assert fc1.format("1", "float32") in said


def test_a_peer_that_has_a_parameter_more_is_named(tmp_path: Path) -> None:
    def change(rank: int, model: nn.Module) -> None:
        if rank == 1:
            del model.output_layer.weight

    (said,) = problems(tmp_path, world(MOE, tp=2), change)
    assert said.startswith("stage 0, dense pass: rank 0 (the source) and rank 1 would gather different things. Only on rank 0: "
                           "output_layer.weight [126, 96] bfloat16, order and units ")


def test_the_same_parameters_in_another_order_are_different(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, world(MOE, ep=2, dp=2), reorder)
    assert "Only on rank 0: order and units " in said


def reorder(rank: int, model: nn.Module) -> None:
    """On rank 1 the experts are registered from the last to the first."""
    if rank == 1:
        experts = model.decoder.layers.get_submodule("0").mlp.experts.local_experts
        for name, module in list(reversed(experts._modules.items())):
            del experts._modules[name]
            experts._modules[name] = module


def test_replicas_outside_the_gather_groups_may_differ(tmp_path: Path) -> None:
    def change(rank: int, model: nn.Module) -> None:
        if rank == 1:
            model.decoder.layers.get_submodule("1").mlp.experts.float()

    assert problems(tmp_path, world(MOE, dp=2), change) == []


class OtherPeer(StubExporter):
    """One rank whose model is not its peers'."""

    def gathers(self, part: Part) -> list[str]:
        return [*super().gathers(part), "a parameter of mine"]


def test_every_rank_raises_the_same_error_at_connect() -> None:
    def make(context: Any, job: RecordingJob) -> StubExporter:
        kind = OtherPeer if context.rank == 3 else StubExporter
        return kind(context.seam, context.trace, job.table, step=lambda: job.step)

    with RecordingJob(table=small_table(2), make_exporter=make, tp=2, pp=2) as job:
        errors = job.connect().errors
    assert set(errors) == {0, 1, 2, 3}
    assert {type(error) for error in errors.values()} == {ConfigurationError}
    (text,) = {str(error) for error in errors.values()}
    assert "stage 1, dense pass: rank 2 (the source) and rank 3 would gather different things" in text
    assert "only on rank 3: a parameter of mine" in text
