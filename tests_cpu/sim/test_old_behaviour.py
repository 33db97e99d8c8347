"""The bug this project exists for (vllm-project/vime#329), under every scheduler: found at once, both groups in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.sim import Scenario, explore, replay
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform

EXPLORERS: dict[str, Callable[[], Explorer]] = {"random": lambda: Uniform(2026), "pct": lambda: Pct(2026, 3), "reduced": Reduced}

LAYOUTS = {"pp2": Scenario(pp=2), "pp2, two engines": Scenario(pp=2, engines=(1, 2)), "tp2 pp2": Scenario(tp=2, pp=2),
           "pp3": Scenario(pp=3), "pp4": Scenario(pp=4)}


def old(scenario: Scenario, **changes: object) -> Scenario:
    return replace(scenario, mutant="old behaviour", **changes)  # type: ignore[arg-type]


def sends_into_nothing(table: str) -> bool:
    """A source sends over one group while the workers listen to another."""
    sending = {row.split()[2] for row in table.splitlines() if row.startswith("rank") and " to receive" in row}
    listening = {row.split()[2] for row in table.splitlines() if row.startswith("engine") and " receive " in row}
    return bool(sending and listening and sending.isdisjoint(listening))


@pytest.mark.parametrize("how", EXPLORERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_hangs_within_a_hundred_schedules_and_the_table_names_both_groups(layout: str, how: str) -> None:
    scenario = old(LAYOUTS[layout], receiver="stock vllm")
    found = explore(scenario, EXPLORERS[how](), schedules=100)
    deadlocks = [f for f in found.failures if f.outcome.kind == "deadlock"]
    assert all("vime-pp_0" in f.outcome.text and "vime-pp_1" in f.outcome.text for f in deadlocks)
    hang = next((f for f in deadlocks if sends_into_nothing(f.outcome.text)), None)
    assert hang is not None, "\n\n".join(f.text() for f in deadlocks) or found.text()
    assert hang.number <= 100 and replay(scenario, hang.schedule).outcome == hang.outcome


@pytest.mark.parametrize("receiver", ["vllm", "stock vllm", "stock vllm 0.27", "vime"])
def test_no_schedule_of_it_ends_well(receiver: str) -> None:
    found = explore(old(Scenario(pp=2), receiver=receiver), Reduced(), schedules=400)
    assert found.complete and "well" not in found.outcomes, found.text()


@pytest.mark.parametrize("receiver", ["vllm", "stock vllm"])
@pytest.mark.parametrize("engines", [(1,), (1, 2)])
def test_one_stage_never_had_it(engines: tuple[int, ...], receiver: str) -> None:
    scenario = old(Scenario(stages=((3, 1),), engines=engines), receiver=receiver)
    found = explore(scenario, Reduced(), schedules=100).check()
    assert found.complete
    assert explore(scenario, Uniform(1), schedules=100).check().outcomes == {"well": 100}
