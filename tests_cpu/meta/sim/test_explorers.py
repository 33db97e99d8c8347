"""The explorers find what is there, do not cry where nothing is, and say honestly whether they have seen everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.recording.access import RELATION
from harness.sim import Exploration, Scenario, ScheduleFailed, check_all, check_pct, check_random, explore
from harness.sim.play import Play
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.exhaustive import Exhaustive
from harness.sim.schedulers.fair import Fair
from harness.sim.schedulers.late import Late
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.races import Step, races_of
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from tests_cpu.meta.sim import plays

SMALLEST = {"meet": plays.MEET, "lost update": plays.LOST_UPDATE, "lock": plays.LOCK, "queue": plays.QUEUE,
            "early close": plays.EARLY_CLOSE, "cross wait": plays.CROSS_WAIT}
UNREDUCED = {"meet": 56, "lost update": 630, "lock": 216, "queue": 480, "early close": 304, "cross wait": 6}
"""How many interleavings there are: literals, so that a scheduling point that is lost is seen."""


def outcomes(found: Exploration) -> set[str]:
    return set(found.outcomes)


@pytest.mark.parametrize("name", SMALLEST)
def test_the_reduced_search_finds_exactly_the_outcomes_of_the_unreduced_one(name: str) -> None:
    everything = explore(SMALLEST[name], Exhaustive(), schedules=1000)
    reduced = explore(SMALLEST[name], Reduced(), schedules=1000)
    assert everything.complete and reduced.complete
    assert everything.schedules == UNREDUCED[name]
    assert outcomes(reduced) == outcomes(everything)
    assert reduced.schedules <= everything.schedules / 6


@pytest.mark.parametrize("play", [plays.LAST_INIT, plays.OPPOSITE], ids=["last init", "opposite arrivals"])
def test_waking_only_when_a_wait_is_decided_loses_no_outcome(play: Play) -> None:
    eager, patient = (explore(play, Reduced(eager=eager), schedules=2000) for eager in (True, False))
    assert eager.complete and patient.complete
    assert outcomes(eager) == outcomes(patient) and patient.schedules < eager.schedules / 10


@pytest.mark.parametrize("mutant", ["", "no deferral"])
def test_nor_does_it_in_a_whole_update(mutant: str) -> None:
    scenario = Scenario(pp=2, mutant=mutant)
    eager, patient = (explore(scenario, Reduced(eager=eager), schedules=1000) for eager in (True, False))
    assert eager.complete and patient.complete
    assert outcomes(eager) == outcomes(patient)
    assert eager.schedules > 200


@pytest.mark.parametrize("make", [lambda: Uniform(0), lambda: Pct(0, 3), Fair, Reduced, Exhaustive],
                         ids=["random", "pct", "round robin", "reduced", "exhaustive"])
def test_a_planted_deadlock_is_found_and_its_table_names_both_groups(make: Callable[[], Explorer]) -> None:
    found = explore(plays.CROSS_WAIT, make(), schedules=1)
    assert found.failures[0].outcome.text.splitlines() == [
        "nobody can run and no deadline is pending",
        "who    waits in  group  phase  stage  bucket  for     since event",
        "rank0  gather    A                            rank 1",
        "rank1  gather    B                            rank 0",
    ]


def test_no_deadlock_is_cried_where_everybody_comes() -> None:
    for explorer in (Uniform(0), Pct(0, 3), Reduced(), Exhaustive()):
        assert {summary.split(":")[0] for summary in explore(plays.MEET, explorer, schedules=50).outcomes} == {"well"}


def test_a_spin_is_a_step_bound_and_no_deadlock() -> None:
    found = explore(plays.SPIN, Fair(), schedules=1)
    assert found.failures[0].outcome.kind == "step bound"
    assert "polls without waiting" in found.failures[0].outcome.text


@pytest.mark.parametrize("make", [Reduced, Exhaustive])
def test_a_search_that_hit_its_bound_is_never_complete(make: type[Reduced] | type[Exhaustive]) -> None:
    enough = explore(plays.LOCK, make(), schedules=1000)
    assert enough.complete
    assert not explore(plays.LOCK, make(), schedules=enough.schedules - 1).complete
    assert explore(plays.LOCK, make(), schedules=enough.schedules).complete


@pytest.mark.parametrize("make", [Reduced, Exhaustive])
def test_nor_is_one_whose_schedules_were_cut_off(make: type[Reduced] | type[Exhaustive]) -> None:
    spin = Play(plays.SPIN.function, max_steps=5)
    found = explore(spin, make(), schedules=1000)
    assert found.schedules < 1000 and not found.complete


@pytest.mark.parametrize("make", [lambda: Uniform(1), lambda: Pct(1, 2), Fair], ids=["random", "pct", "round robin"])
def test_sampling_is_never_complete(make: Callable[[], Explorer]) -> None:
    assert not explore(plays.MEET, make(), schedules=30).complete


@pytest.mark.parametrize("make", [lambda seed: Uniform(seed), lambda seed: Pct(seed, 3)], ids=["random", "pct"])
def test_the_same_seed_draws_the_same_schedules_and_another_seed_others(make: Callable[[int], Explorer]) -> None:
    def drawn(seed: int) -> list[str]:
        found = explore(plays.LOST_UPDATE, make(seed), schedules=40)
        return [f"{summary} {count}" for summary, count in found.outcomes.items()]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_pct_finds_what_needs_one_rank_to_be_late_for_long() -> None:
    """B02 needs both engines to be asked in opposite order: two preemptions."""
    found = explore(plays.OPPOSITE, Pct(0, 3), schedules=100)
    assert any(summary.startswith("deadlock") for summary in found.outcomes)


def test_a_task_that_is_late_runs_only_where_nobody_else_can() -> None:
    for late in (0, 1):
        found = explore(plays.LOCK, Late(f"rank{late}"), schedules=10)
        assert dict(found.outcomes) == {f"well: {{0: {late == 1}, 1: {late == 0}}}": 1} and not found.complete


def test_the_checks_raise_with_the_table_and_the_replaying_call() -> None:
    for check in (check_random, check_pct):
        with pytest.raises(ScheduleFailed, match=r"(?s)rank0 +gather +A.*replay it with: harness\.sim\.replay\(Play\("):
            check(plays.CROSS_WAIT, schedules=1)
    with pytest.raises(ScheduleFailed, match="deadlock in schedule 1"):
        check_all(plays.CROSS_WAIT)
    assert check_all(plays.MEET).complete


def test_steps_race_only_where_nothing_orders_them() -> None:
    steps = [Step("a", [("x", "write"), ("m", "set")]), Step("b", [("m", "await"), ("y", "write")]),
             Step("c", [("y", "read"), ("x", "read")])]
    # b waited for a, so they do not race; c races with b, and through b with a: once b comes later, a is next.
    assert [(race.first, race.by) for race in races_of(steps, RELATION)] == [(1, "c")]
    apart = [steps[0], Step("b", [("y", "write")]), steps[2]]
    assert [(race.first, race.by) for race in races_of(apart, RELATION)] == [(1, "c"), (0, "c")]


def test_time_that_passed_orders_everything() -> None:
    steps = [Step("a", [("x", "write")], before_clock=True), Step("b", [("x", "write")])]
    assert races_of(steps, RELATION) == []
    assert len(races_of([Step("a", [("x", "write")]), steps[1]], RELATION)) == 1


def test_an_unannounced_source_of_chance_is_noticed() -> None:
    """A search that comes back to a point and finds other tasks there stops, instead of exploring nonsense."""
    turn = [0]

    def fickle(context: object) -> None:
        turn[0] += 1
        for _ in range(turn[0] % 3):
            context.world.kernel.touch("x", "write")  # type: ignore[attr-defined]
            context.world.kernel.give_way()  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="not deterministic"):
        explore(Play(fickle, ranks=2), Exhaustive(), schedules=100)
