"""The kernel finds a planted deadlock, fires deadlines exactly, and runs the same way twice."""

from __future__ import annotations

import functools
import weakref

import pytest
from greenlet import getcurrent, greenlet

from harness.faults import Faults
from harness.recording.job import RecordingJob
from harness.recording.kernel import Deadlock, Kernel, StepBound, Waiting
from harness.recording.world import RankContext, RecordingWorld
from staged_sync.trace import Event


def never() -> bool:
    return False


def cross_wait(context: RankContext) -> None:
    """Rank 0 waits in group A for rank 1, which waits in group B for rank 0: no deadline on either."""
    mine, peer = (("A", 1), ("B", 0))[context.rank]
    context.trace.record("phase", detail=f"before {mine}")
    context.world.kernel.wait(never, Waiting("gather", mine, missing=lambda: f"rank {peer}"))


def test_a_planted_deadlock_is_found_and_both_groups_are_named() -> None:
    with RecordingWorld(tp=2) as world, pytest.raises(Deadlock) as caught:
        world.run(cross_wait)
    assert caught.value.table.splitlines() == [
        "who    waits in  group  phase  stage  bucket  for     since event",
        "rank0  gather    A      idle                  rank 1  0 phase before A",
        "rank1  gather    B      idle                  rank 0  1 phase before B",
    ]


def test_a_world_lives_on_after_a_deadlock_and_forgets_what_its_cleanup_logged() -> None:
    def leaves_a_trace_when_unwound(context: RankContext) -> None:
        with context.trace.waiting("gather", group="tp"):
            context.world.kernel.wait(never, Waiting("gather"))

    with RecordingWorld() as world:
        with pytest.raises(Deadlock):
            world.run(leaves_a_trace_when_unwound)
        assert [e.text() for e in world.events] == ["gather tp"]
        assert world.run(lambda context: context.rank).results == {0: 0}


def test_no_deadlock_is_cried_where_everybody_comes() -> None:
    with RecordingWorld(tp=2, pp=2) as world:
        group = world.run(lambda c: c.seam.open_control_group(0, timeout_s=1).exchange(b"x", timeout_s=1)).check()
    assert group.results == {rank: [b"x"] * 4 for rank in range(4)}
    assert group.elapsed_s == 0


def test_deadlines_fire_exactly_and_in_order() -> None:
    fired = []

    def sleeper(context: RankContext) -> None:
        for seconds in ((600.0, 0.25), (10.5, 1000.0))[context.rank]:
            context.seam.sleep(seconds)
            fired.append((context.seam.now(), context.rank))

    with RecordingWorld(tp=2) as world:
        result = world.run(sleeper)
    assert fired == [(10.5, 1), (600.0, 0), (600.25, 0), (1010.5, 1)]
    assert result.elapsed_s == 1010.5


def test_a_wait_that_is_over_at_its_deadline_says_so() -> None:
    class Soon:
        expires_s = 3.0
        label = "soon"

        def poll(self) -> bool:
            return world.kernel.now_s >= 3.0

        def result(self) -> None:
            return None

    with RecordingWorld() as world:
        result = world.run(lambda c: (c.seam.wait_any([Soon()], timeout_s=2.0), c.seam.now(),
                                      c.seam.wait_any([Soon()], timeout_s=2.0), c.seam.now()))
    assert result.results[0] == (False, 2.0, True, 3.0)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0])
def test_an_endless_wait_is_refused(timeout_s: float) -> None:
    with RecordingWorld() as world:
        result = world.run(lambda c: c.seam.open_control_group(0, timeout_s=timeout_s))
    assert "no wait without a deadline" in str(result.errors[0])


def test_a_rank_that_dies_runs_no_finally_until_the_world_is_unwound() -> None:
    said = []

    def dies(context: RankContext) -> str:
        try:
            if context.rank == 0:
                context.world.kernel.die()
        finally:
            said.append(context.rank)
        context.seam.sleep(1)
        return "alive: " + ",".join(map(str, said))

    with RecordingWorld(tp=2) as world:
        result = world.run(dies)
    assert result.died == [0]
    assert result.results == {1: "alive: 1"}


def test_a_spin_loop_is_not_called_a_deadlock() -> None:
    def spins(context: RankContext) -> None:
        while True:
            context.world.kernel.wait(lambda: True, Waiting("poll"))

    with RecordingWorld(max_steps=100) as world, pytest.raises(StepBound, match="polls without waiting"):
        world.run(spins)


def test_a_stall_is_reported_although_a_deadline_ends_it() -> None:
    with RecordingWorld(tp=2) as world:
        result = world.run(lambda c: c.seam.open_control_group(0, timeout_s=5) if c.rank == 0 else None)
    with pytest.raises(AssertionError, match=r"(?s)stall, nobody could go on:.*rank0 +open control group +control0 .*rank 1"):
        result.check()


def test_round_robin_is_fair_and_repeats_itself() -> None:
    def order() -> list[str]:
        said: list[str] = []
        kernel = Kernel()

        def talk(name: str) -> None:
            for i in range(2):
                said.append(f"{name}{i}")
                kernel.wait(lambda: True, Waiting("turn"))

        for name in "abc":
            kernel.spawn(name, lambda n=name: talk(n))
        kernel.run()
        return said

    assert order() == order() == ["a0", "b0", "c0", "a1", "b1", "c1"]


class Held:
    """What a task has in its hands."""


def test_tasks_share_a_greenlet_one_after_the_other_and_what_one_held_is_freed_when_it_ends() -> None:
    ran_in: list[greenlet] = []
    held: list[weakref.ref[Held]] = []

    def short(thing: Held) -> None:
        ran_in.append(getcurrent())
        held.append(weakref.ref(thing))

    def spawns(context: RankContext) -> None:
        kernel = context.world.kernel
        for _ in range(3):
            task = kernel.spawn("short", functools.partial(short, Held()), daemon=True)
            kernel.wait(lambda task=task: task.finished, Waiting("short"), deadline_s=1)  # type: ignore[misc]
            del task
            assert held[-1]() is None

    with RecordingWorld() as world:
        world.run(spawns).check()
    assert len(set(ran_in)) == 1 and ran_in[0].dead


def test_unwinding_an_old_run_leaves_alone_who_runs_in_its_greenlets_now() -> None:
    """A rank that died keeps its greenlet; those of ranks that came to their end serve the next run."""
    kernel = Kernel()
    ended = kernel.spawn("ended", lambda: 1)
    died = kernel.spawn("died", kernel.die)
    kernel.run()
    waits = kernel.spawn("waits", lambda: kernel.wait(never, Waiting("for long"), deadline_s=1), daemon=True)
    kernel.spawn("other", lambda: None)
    kernel.run()
    kernel.kill([ended, died])
    assert kernel.blocked() == [waits] and not waits.finished
    kernel.kill([waits])
    assert waits.finished and kernel.tasks == []


@pytest.mark.parametrize("method", ["flush_cache", "update_weights_from_distributed"])
def test_the_same_job_gives_the_same_log_twice_down_to_the_order_between_ranks(method: str) -> None:
    def log() -> list[Event]:
        faults = Faults().never_answers(engine=1, method=method)
        with RecordingJob(tp=2, pp=2, engines=[1, 2], faults=faults) as run:
            run.connect()
            run.update()
            return list(run.world.events)

    first, second = log(), log()
    assert len(first) > 50
    assert first == second


def test_waiting_outside_a_run_is_refused() -> None:
    with RecordingWorld() as world, pytest.raises(RuntimeError, match="only a task can wait"):
        world.contexts[0].seam.sleep(1)


def test_beyond_the_horizon_no_deadline_lets_anybody_off() -> None:
    def sleeper(context: RankContext) -> float:
        context.seam.sleep(10.0 + context.rank)
        return context.seam.now()

    with RecordingWorld(tp=2) as world:
        world.kernel.horizon_s = 11.0
        assert world.run(sleeper).results == {0: 10.0, 1: 11.0}
        with pytest.raises(Deadlock, match="the next deadline, at 21 s, comes after 11 s, when nobody may still wait") as caught:
            world.run(sleeper)
    assert [row.split() for row in caught.value.table.splitlines()[1:]] == [["rank0", "sleep"], ["rank1", "sleep"]]
