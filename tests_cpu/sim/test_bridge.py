"""Bridge export under both contracts, in every order that can matter; and a contract that is declared wrongly.

Drawn worlds of bridge export are explored in test_drawn_worlds.py, the defects in tests_cpu/zoo.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from harness.recording.kernel import Deadlock
from harness.sim import Scenario, explore, replay
from harness.sim.exports import Export
from harness.sim.invariants import violations
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.fair import Fair
from harness.sim.schedulers.late import Late
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from harness.sim.simulation import Run, Simulation
from staged_sync.in_step import WRONG_CONTRACT
from tests_cpu.sim.test_faults import fails_badly

COLLECTIVE: tuple[Export, ...] = ("bridge", "prefetching")
ALL: tuple[Export, ...] = (*COLLECTIVE, "stage-local")
ENGINES = {"1 engine of 1": (1,), "2 engines of 1": (1, 1), "1 and 2 workers": (1, 2)}
MORE = {
    "one stage": Scenario(stages=((2, 0),), engines=(1, 2)), "one bucket": Scenario(pp=2, bucket_bytes=1 << 20),
    "three stages, one empty": Scenario(pp=3, stages=((1, 0), (0, 0), (2, 0))), "tp2": Scenario(tp=2, pp=2),
    "the first stage empty": Scenario(pp=2, stages=((0, 0), (2, 0))), "two replicas, cp2": Scenario(dp=2, cp=2, pp=2),
    "packed": Scenario(pp=2, stages=((2, 0), (1, 0)), packed=True, bucket_bytes=1 << 20),
    "connects": Scenario(pp=2, connects=True),
    "streams": Scenario(pp=2, stages=((2, 0), (1, 0)), sends="streams"),
}


@pytest.mark.parametrize("receiver", ["vllm", "stock vllm", "vime"])
@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("export", ALL)
def test_no_order_of_steps_deadlocks_or_breaks_a_rule(export: Export, engines: str, receiver: str) -> None:
    scenario = Scenario(pp=2, stages=((2, 0), (1, 0)), engines=ENGINES[engines], receiver=receiver,  # type: ignore[arg-type]
                        export=export)
    assert explore(scenario, Reduced(), schedules=200).check().complete


@pytest.mark.parametrize("world", MORE)
@pytest.mark.parametrize("export", ALL)
def test_nor_in_other_layouts(export: Export, world: str) -> None:
    assert explore(replace(MORE[world], export=export), Reduced(), schedules=200).check().complete


@pytest.mark.parametrize("make", [lambda: Uniform(11), lambda: Pct(11, 3)], ids=["random", "pct"])
@pytest.mark.parametrize("export", ALL)
def test_random_and_pct_schedules_end_well(export: Export, make: Callable[[], Explorer]) -> None:
    for scenario in (Scenario(pp=2, engines=(1, 2), export=export), Scenario(tp=2, pp=2, export=export)):
        assert explore(scenario, make(), schedules=50).check().outcomes == {"well": 50}


# --- running ahead ----------------------------------------------------------------------------------------------------------

AHEAD = {
    "one item a bucket": Scenario(pp=2, stages=((2, 0), (2, 0))), "tp2": Scenario(tp=2, pp=2, stages=((1, 0), (2, 0))),
    "two items a bucket": Scenario(pp=2, stages=((4, 0), (3, 0)), bucket_bytes=60), "one stage": Scenario(tp=2, stages=((4, 0),)),
    "three stages": Scenario(pp=3, stages=((3, 0), (0, 0), (3, 0)), engines=(1, 2)),
    "packed": Scenario(pp=2, stages=((3, 0), (2, 0)), packed=True),
}


@pytest.mark.parametrize("world", AHEAD)
@pytest.mark.parametrize("export", COLLECTIVE)
def test_nobody_runs_ahead_of_a_source_that_is_late_for_everything_unless_nobody_waits_for_it(export: Export, world: str) -> None:
    """The reduced search says that there is no other order to look at than the one in which the source is late."""
    scenario = replace(AHEAD[world], export=export)
    assert explore(scenario, Reduced(), schedules=2).check().complete
    explore(scenario, Late("rank0"), schedules=1).check()
    found = explore(replace(scenario, mutant="nobody waits for the source"), Late("rank0"), schedules=1)
    assert re.match(r"invariant: rule 11: rank \d takes item \d before the bucket that item \d closed is sent",
                    next(iter(found.outcomes)))


# --- rules, seen through the other contract ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("export", "taken_for", "broken"), [
    ("bridge", "stage-local", {3, 5}),  # no group is opened in an update, and ranks of other stages iterate
    ("stage-local", "bridge", {3, 5, 7}),  # groups are opened, stage 1 exports alone, and all that costs barriers
])
def test_what_is_right_under_one_contract_breaks_rules_under_the_other(export: Export, taken_for: Export,
                                                                       broken: set[int]) -> None:
    run = next(runs(Scenario(pp=2, export=export), Fair()))
    assert run.outcome.kind == "well" and run.facts is not None
    assert violations(run.events, run.facts) == []
    assert {violation.rule for violation in violations(run.events, replace(run.facts, export=taken_for))} == broken


# --- declared wrongly -------------------------------------------------------------------------------------------------------

def runs(scenario: Scenario, explorer: Explorer, limit: int = 100) -> Iterator[Run]:
    """Every schedule in a world of its own."""
    for _ in range(limit):
        if not explorer.next():
            return
        with Simulation(scenario) as simulation:
            yield simulation.run(explorer)


@pytest.mark.parametrize("engines", ENGINES)
def test_a_contract_declared_wrongly_is_told_to_every_rank_in_every_order(engines: str) -> None:
    """The update fails, nothing is left open, no rule of failures is broken: the kind would be another one."""
    explorer = Reduced()
    for run in runs(Scenario(pp=2, engines=ENGINES[engines], export="declared wrongly"), explorer):
        assert run.outcome.kind == "error" and run.facts is not None, run.outcome.text
        assert set(run.facts.raised) == {0, 1}
        assert all(WRONG_CONTRACT in text for text in run.facts.raised.values()), run.facts.raised
    assert not explorer.next() and explorer.complete


@pytest.mark.parametrize("make", [lambda: Uniform(5), lambda: Pct(5, 3)], ids=["random", "pct"])
def test_also_where_more_ranks_than_one_are_missing(make: Callable[[], Explorer]) -> None:
    for run in runs(Scenario(tp=2, pp=2, export="declared wrongly"), make(), limit=10):
        assert run.outcome.kind == "error" and run.facts is not None, run.outcome.text
        assert set(run.facts.raised) == {0, 1, 2, 3}
        assert all(WRONG_CONTRACT in text for text in run.facts.raised.values()), run.facts.raised


def test_without_deadlines_it_is_a_deadlock_between_the_iterator_and_a_barrier() -> None:
    with Simulation(Scenario(pp=2, export="declared wrongly")) as simulation:
        simulation.job.world.kernel.stall_is_deadlock = True
        simulation.job.connect().check()
        with pytest.raises(Deadlock) as deadlock:
            simulation.job.update()
    assert deadlock.value.waits == ("rank0 in bridge hf.s0.dense0 pp[0,1]", "rank1 in barrier control0")


def test_with_one_stage_there_is_nothing_to_declare_wrongly() -> None:
    assert explore(Scenario(tp=2, export="declared wrongly"), Reduced(), schedules=100).check().complete


# --- faults, replay ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "bridge": (Scenario(pp=2, engines=(1, 2), export="bridge"), lambda n: Uniform(n)),
    "stage-local, the first stage empty": (Scenario(pp=2, stages=((0, 0), (2, 0)), export="stage-local"), lambda n: Pct(n, 3)),
    "bridge, tp2": (Scenario(tp=2, pp=2, stages=((1, 0), (2, 0)), export="bridge"), lambda n: Pct(n, 3)),
    "stage-local, tp2": (Scenario(tp=2, pp=2, export="stage-local"), lambda n: Uniform(n)),
    "prefetching": (Scenario(pp=2, stages=((2, 0), (2, 0)), export="prefetching"), lambda n: Uniform(n)),
}


@pytest.mark.parametrize("world", [*list(FAULTS)[:2], *(pytest.param(w, marks=pytest.mark.thorough) for w in list(FAULTS)[2:])])
def test_every_fault_at_every_operation_is_heard_in_time_and_the_next_update_is_exact(world: str) -> None:
    """After a rank has died, or has left the others in the iterator, the trainer's own group is lost: no next update then."""
    scenario, explorer = FAULTS[world]
    assert not fails_badly(scenario, explorer)


def test_a_failing_schedule_is_replayed_from_what_is_printed() -> None:
    scenario = Scenario(pp=2, stages=((2, 0), (2, 0)), export="bridge", mutant="a stage leaves the export early")
    failure = explore(scenario, Uniform(2), schedules=5).failures[0]
    assert "export='bridge'" in failure.replay and eval(repr(scenario)) == scenario
    assert replay(scenario, failure.schedule).outcome == failure.outcome


def test_somebody_elses_implementation_declares_no_contract() -> None:
    with pytest.raises(ValueError, match=r"export must be 'raw' or 'bridge' with an implementation of somebody .*'stage-local'"):
        Scenario(pp=2, export="stage-local", impl="a.b:C").simulate()
