"""The benchmarks: each says what it does, and what they compute by themselves is right. Figures are in benchmarks/README.md."""

from __future__ import annotations

import importlib
import math
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import scale, transfer, update
from benchmarks.measure import Samples, in_units, interleave
from benchmarks.models import dense, mixture
from staged_sync.cli import dense_topology
from staged_sync.config import read_settings
from staged_sync.exporter import TensorMeta

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = {"receiver"}
"""Started by a benchmark, not by people."""

ALL = sorted({file.stem for file in FOLDER.glob("*.py") if '__name__ == "__main__"' in file.read_text()} - PARTS)


def test_all_of_them_are_known() -> None:
    assert {"transfer", "update", "scale"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_benchmark_says_what_it_does_and_the_readme_knows_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    command = f"python -m benchmarks.{name}"
    assert "--json" in said and command in said and command in (FOLDER / "README.md").read_text()


# --- samples ------------------------------------------------------------------------------------------------------------
def test_ratios_are_taken_within_a_round() -> None:
    quiet_then_busy, rival = Samples((1.0, 10.0, 1.0)), Samples((2.0, 20.0, 2.0))
    assert rival.times(quiet_then_busy) == 2.0
    assert quiet_then_busy.times(rival) == 0.5
    assert (quiet_then_busy.median_s, quiet_then_busy.spread) == (1.0, 9.0)
    with pytest.raises(ValueError, match="longer|shorter"):
        rival.times(Samples((1.0,)))


def test_contestants_take_turns_and_each_begins_once() -> None:
    said: list[str] = []

    def contestant(name: str) -> Any:
        return lambda: said.append(name) or float(len(said))

    samples = interleave({name: contestant(name) for name in "abc"}, rounds=3)
    assert "".join(said) == "abcbcacab"
    assert samples["a"] == Samples((1.0, 6.0, 8.0))


@pytest.mark.parametrize(("value", "unit", "text"), [(0.00123, "s", "1.23 ms"), (2.5, "s", "2.5 s"), (4e-7, "s", "0.4 µs"),
                                                     (0.0, "s", "0 µs"), (1.192e9, "B", "1.19 GB"), (12, "B", "12 B"),
                                                     (4.7e12, "B", "4,700 GB")])
def test_figures_are_read_by_people(value: float, unit: str, text: str) -> None:
    assert in_units(value, unit) == text


# --- models -------------------------------------------------------------------------------------------------------------
def parameters(metas: list[TensorMeta]) -> int:
    return sum(math.prod(meta.shape) for meta in metas)


def test_the_models_are_as_large_as_the_published_ones() -> None:
    assert (len(dense()), parameters(dense())) == (310, 596_049_920)
    assert (len(mixture()), parameters(mixture())) == (36_945, 235_093_634_560)


# --- transfer -----------------------------------------------------------------------------------------------------------
def test_other_bytes_than_were_sent_are_noticed() -> None:
    flat = torch.arange(8, dtype=torch.uint8)
    right = zlib.crc32(bytes(range(8)))

    def source(*crcs: int) -> Any:
        return SimpleNamespace(flat=flat, receivers=[None, None],
                               ask=lambda method, **kwargs: list(crcs) if method == "crc" else [None, None])

    transfer.check(source(right, right), {"fine": lambda: None})
    with pytest.raises(AssertionError, match="'broken' delivered other bytes than were sent"):
        transfer.check(source(right, right + 1), {"broken": lambda: None})


# --- scale --------------------------------------------------------------------------------------------------------------
def test_stages_share_the_model_and_each_tensor_is_once_in_a_bucket() -> None:
    metas = dense(vocab_size=64, num_layers=5)
    stages = scale.by_stage(metas, 2)
    assert [len(stage) for stage in stages] == [1 + 3 * 11, 2 * 11 + 1]
    assert (stages[0][0].name, stages[1][-1].name) == ("model.embed_tokens.weight", "model.norm.weight")
    limit = 8 << 20
    buckets = scale.buckets_of(stages[0], limit)
    assert [meta for bucket in buckets for meta in bucket] == stages[0]
    assert all(sum(meta.nbytes for meta in bucket) <= limit for bucket in buckets)


def test_what_an_exchange_brings_to_every_rank() -> None:
    assert scale.exchange_bytes([0, 0, 0]) == 3 * 8
    assert scale.exchange_bytes([100, 0, 7]) == 3 * 8 + 3 * 100
    assert scale.exchange_bytes([5000, 0, 4096]) == 3 * 8 + 3 * 4096 + 904


@pytest.mark.parametrize(("ranks", "expected"), [(1, (1, 0, 1)), (2, (1, 1, 2)), (8, (1, 7, 4)), (16, (2, 8, 6)),
                                                 (1024, (4, 22, 14))])
def test_how_many_messages_a_barrier_takes(ranks: int, expected: tuple[int, int, int]) -> None:
    meeting = scale.Meeting.of(ranks)
    assert (meeting.levels, meeting.taken_by_lead, meeting.in_a_row) == expected


def test_a_fleet_agrees_on_the_plan() -> None:
    settings, _ = read_settings(SimpleNamespace())
    fleet = scale.Fleet(dense_topology(2, 2, 2), scale.by_stage(dense(vocab_size=64, num_layers=2), 2), range(3), settings)
    assert [len(fleet.connect(rank).announced[1]) for rank in (0, 4, 7)] == [12, 12, 12]


# --- update -------------------------------------------------------------------------------------------------------------
def event(time_s: float, rank: int, name: str, *, group: str = "", detail: str = "") -> dict[str, Any]:
    return {"time_s": time_s, "rank": rank, "event": name, "group": group, "detail": detail}


def test_a_barrier_costs_what_comes_after_the_last_rank() -> None:
    events = [event(1.0, 0, "barrier", detail="paused"), event(4.0, 1, "barrier", detail="paused"),
              event(4.5, 0, "barrier.done", detail="paused"), event(4.25, 1, "barrier.done", detail="paused"),
              event(6.0, 0, "barrier", detail="started"), event(6.0, 1, "barrier", detail="started"),
              event(7.0, 0, "barrier.done", detail="started"), event(6.5, 1, "barrier.done", detail="started")]
    assert update.barrier_costs_s(events) == [0.5, 1.0]


def test_opening_and_closing_are_paired_by_rank_and_group() -> None:
    events = [event(5.0, 1, "open", group="vime-pp_1"), event(5.5, 1, "open.done", group="vime-pp_1"),
              event(1.0, 0, "open", group="vime-pp_0"), event(3.0, 0, "open.done", group="vime-pp_0"),
              event(9.0, 0, "close", group="vime-pp_0")]
    assert update.durations_s(events, "open") == [2.0, 0.5]
