"""The stub exporter needs every shard, the untouchable ones break on touch, and a byte comparison sees one wrong bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.recording.exporter import StubExporter, Touched, UntouchableEngine, UntouchableExporter
from harness.recording.job import RecordingJob
from harness.recording.model import differences, hf_metas, small_table, values
from harness.recording.world import RankContext, RecordingWorld
from staged_sync.errors import GatherError

TABLE = small_table(1, dense=1, expert=1)
METAS = hf_metas(TABLE)


def export(context: RankContext) -> dict[str, torch.Tensor]:
    exporter = StubExporter(context.seam, context.trace, TABLE)
    exported: dict[str, torch.Tensor] = {}
    for part in ("dense", "expert"):
        for unit in exporter.units(part):  # type: ignore[arg-type]
            exported |= dict(exporter.convert(unit, exporter.gather(unit, timeout_s=5)))
    return exported


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 4}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2}])
def test_every_rank_that_joins_gets_the_full_tensors(layout: dict[str, int]) -> None:
    with RecordingWorld(**layout) as world:
        result = world.run(export).check()
    for exported in result.results.values():
        assert differences(exported, METAS, step=1) == []


def test_a_member_that_skips_is_a_hang_and_one_that_swaps_units_spoils_the_gather() -> None:
    def skips(context: RankContext) -> Any:
        return export(context) if context.rank == 0 else None

    with RecordingWorld(tp=2) as world:
        result = world.run(skips)
    assert isinstance(result.errors[0], GatherError) and "rank 1 did not come within 5 s" in str(result.errors[0])


def test_one_wrong_bit_one_wrong_step_and_one_missing_tensor_are_seen() -> None:
    held = {name: values(meta, 1) for name, meta in METAS.items()}
    assert differences(held, METAS, step=1) == []
    assert differences(held, METAS, step=2) == ["hf.s0.dense0: other bytes than step 2", "hf.s0.expert0: other bytes than step 2"]
    held["hf.s0.dense0"].view(torch.uint8).view(-1)[7] ^= 1
    assert differences(held, METAS, step=1) == ["hf.s0.dense0: other bytes than step 1"]
    del held["hf.s0.dense0"]
    assert differences(held, METAS, step=1) == ["hf.s0.dense0: never received"]


@pytest.mark.parametrize("touch", ["units", "gather", "convert", "describe"])
def test_an_untouchable_exporter_answers_for_its_model_and_nothing_else(touch: str) -> None:
    exporter = UntouchableExporter()
    assert exporter.problems() == [] and exporter.contract == "stage_local" and not exporter.optional("x")
    with pytest.raises(Touched, match=f"an inactive rank touched its exporter: {touch}"):
        getattr(exporter, touch)


def test_an_untouchable_engine_breaks_when_it_is_called_or_only_looked_at() -> None:
    engine = UntouchableEngine()
    assert engine == engine
    with pytest.raises(Touched, match="touched a handle: pause_generation"):
        engine.pause_generation.remote()
    with pytest.raises(Touched, match="touched a handle: get_weight_transfer_info"):
        hasattr(engine, "get_weight_transfer_info")


def test_a_source_with_untouchable_engines_fails_so_the_guard_guards() -> None:
    def handles(context: RankContext, engines: list[Any]) -> list[Any]:
        return engines if context.rank == 0 else [UntouchableEngine()]

    with RecordingJob(pp=2, engine_handles=handles) as run:
        text = str((run.connect().errors or run.update().errors)[1])
    assert "Touched: a rank that must not talk to engines touched a handle: " in text
