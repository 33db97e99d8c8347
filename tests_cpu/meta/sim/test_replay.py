"""Fail, encode, replay, the same failure; shrink; and the same schedule twice is the same story."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness.sim
from harness.recording.world import RecordingWorld
from harness.sim import Scenario, explore, replay
from harness.sim.explore import Failure, Simulable, run_once, shrink
from harness.sim.schedule import decode, encode
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.replaying import Replaying
from harness.sim.schedulers.uniform import Uniform
from harness.sim.simulation import Simulation, quietly
from staged_sync.trace import Event
from tests_cpu.meta.sim import plays

OLD = Scenario(pp=2, engines=(1, 2), mutant="old behaviour")
DEFERRED = Scenario(pp=2, engines=(1, 1), mutant="no deferral")
OURS = Scenario(tp=2, pp=2, engines=(1, 2), stages=((2, 1), (1, 1)))


@given(st.lists(st.integers(0, 40), max_size=60), st.booleans())
def test_a_schedule_survives_being_written_down_but_for_zeros_at_its_end(choices: list[int], patient: bool) -> None:
    back, was_patient = decode(encode(choices, patient))
    assert was_patient == patient
    assert list(back) + [0] * (len(choices) - len(back)) == (choices or [0])[:max(len(choices), len(back))]


def test_what_schedules_look_like() -> None:
    assert encode([3, *[0] * 12, 1, 0, 0]) == "3-0x12-1"
    assert encode([0, 0]) == encode([]) == "0"
    with pytest.raises(ValueError, match=r"not an encoded schedule: '3-x'.*must look like '3-0x12-1'"):
        decode("3-x")


@pytest.mark.parametrize("make", [lambda: Uniform(3), lambda: Pct(3, 3), Reduced], ids=["random", "pct", "reduced"])
@pytest.mark.parametrize("scenario", [OLD, DEFERRED, plays.EARLY_CLOSE, plays.OPPOSITE], ids=["old", "deferred", "close", "B02"])
def test_every_failure_comes_back_when_its_schedule_is_replayed(scenario: Simulable, make: Callable[[], Explorer]) -> None:
    failures = explore(scenario, make(), schedules=25).failures
    assert failures
    for failure in failures:
        again = replay(scenario, failure.schedule)
        assert again.outcome == failure.outcome


def test_the_printed_call_is_python_and_replays_the_failure() -> None:
    failure = explore(DEFERRED, Uniform(5), schedules=10).failures[0]
    call = re.search(r"replay it with: (.*)", failure.text())
    assert call is not None
    run = eval(call[1], {"harness": __import__("harness"), "Scenario": harness.sim.Scenario})
    assert run.outcome == failure.outcome


@pytest.mark.parametrize("scenario", [DEFERRED, plays.OPPOSITE], ids=["deferred", "B02"])
def test_a_failing_schedule_shrinks_to_few_choices_that_fail_alike(scenario: Simulable) -> None:
    found = explore(scenario, Uniform(11), schedules=60).failures
    failure = next(f for f in found if f.outcome.kind == "deadlock")
    small = shrink(failure, tries=60)
    assert small.outcome.summary == failure.outcome.summary
    assert _departures(small) <= _departures(failure) / 2
    assert replay(scenario, small.schedule).outcome == small.outcome


def _departures(failure: Failure) -> int:
    """Where it is not round robin."""
    return sum(choice != 0 for choice in decode(failure.schedule)[0])


@pytest.mark.parametrize("number", range(8))
def test_each_schedule_of_a_sample_run_twice_gives_the_same_events(number: int) -> None:
    explorer = Uniform(100 + number)
    first = run_once(OURS, explorer)
    second = run_once(OURS, Replaying(first.choices))
    assert len(first.events) > 150
    assert first.choices == second.choices
    assert first.events == second.events


def test_an_update_in_a_used_world_is_the_update_in_a_fresh_one() -> None:
    """Worlds are used again and again for speed. That makes no difference to the schedule, and to the story only that there is
    an old group, closed, to be replaced, and a higher version."""
    explorer = Uniform(9)
    with quietly(), Simulation(OURS) as used:
        for _ in range(5):
            assert explorer.next()
            run = used.run(explorer)
            fresh = run_once(OURS, Replaying(run.choices))
            assert fresh.choices == run.choices
            assert _told(fresh.events) == _told(run.events)


class Watched:
    """A scenario that remembers its worlds, weakly."""

    def __init__(self, scenario: Scenario) -> None:
        self.worlds: list[weakref.ref[RecordingWorld]] = []
        self._scenario = scenario

    def simulate(self) -> Simulation:
        simulation = Simulation(self._scenario)
        self.worlds.append(weakref.ref(simulation.job.world))
        return simulation


def test_no_world_outlives_its_exploration() -> None:
    """They are full of cycles, and the collector does not come often: ten thousand faults would fill the memory."""
    for scenario in (OURS, DEFERRED, Scenario(pp=2, fault="rank1 dies barrier#3")):
        watched = Watched(scenario)
        explore(watched, Uniform(1), schedules=4)
        run_once(watched, Uniform(1))
        assert len(watched.worlds) == (2 if scenario is OURS else 5)
        assert all(world() is None for world in watched.worlds)


def _told(events: Sequence[Event]) -> list[str]:
    return [f"{e.actor}: {re.sub('version [0-9]+', 'version', e.text())}" for e in events if e.event != "replace"]
