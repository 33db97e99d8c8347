"""Faults strike once, at the place they were planted, and a fault that never struck is an error."""

from __future__ import annotations

import pytest

from harness.faults import Faults, InjectedFailure
from harness.recording.server import ServerDied
from harness.recording.world import RankContext, RecordingWorld


def test_two_faults_at_one_place_are_refused() -> None:
    faults = Faults().fail_at(rank=3, event="gather", stage=1)
    with pytest.raises(ValueError, match=r"two faults at one place: rank 3 at gather stage 1 \(nth=0\)"):
        faults.rank_dies(rank=3, event="gather", stage=1)
    faults.engine_error(engine=0, method="start_weight_update")
    with pytest.raises(ValueError, match="two faults at one place: engine 0 at start_weight_update"):
        faults.never_answers(engine=0, method="start_weight_update")
    faults.engine_error(engine=0, method="start_weight_update", nth=1).fail_at(rank=3, event="gather", stage=0)


def test_a_rank_fails_at_the_nth_matching_event_only() -> None:
    faults = Faults().fail_at(rank=1, event="gather", stage=0, nth=2)

    def walk(context: RankContext) -> list[int]:
        done = []
        for i in range(4):
            with context.trace.at(stage=i % 2):
                context.trace.record("gather")
                context.trace.record("send")
            done.append(i)
        with context.trace.at(stage=0):
            try:
                context.trace.record("gather")
            except InjectedFailure:
                done.append(99)
            context.trace.record("gather")
        return done

    with RecordingWorld(tp=2, faults=faults) as world:
        assert world.run(walk).check().results == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3, 99]}
    faults.assert_all_fired()


def test_a_fault_that_never_struck_fails_the_test_that_planted_it() -> None:
    faults = Faults().fail_at(rank=0, event="send").engine_error(engine=1, method="flush_cache")
    with pytest.raises(AssertionError) as caught:
        faults.assert_all_fired()
    assert str(caught.value).splitlines() == [
        "planted faults that did not fire exactly once:",
        "rank 0 at send (nth=0): fired 0 times",
        "engine 1 at flush_cache (nth=0): fired 0 times",
    ]


def ask(context: RankContext, engine: int, method: str) -> object:
    work = context.seam.call(context.world.handles[engine], method)
    if not context.seam.wait_any([work], timeout_s=10):
        return "no answer"
    return work.result()


def test_an_engine_refuses_answers_no_is_silent_or_dies() -> None:
    faults = (Faults().engine_error(engine=0, method="pause_generation")
              .engine_error(engine=1, method="pause_generation", reply={"success": False})
              .never_answers(engine=2, method="pause_generation")
              .engine_dies(engine=3, method="pause_generation"))
    with RecordingWorld(tp=4, engines=[1, 1, 1, 1], faults=faults) as world:
        result = world.run(lambda c: ask(c, c.rank, "pause_generation"))
        assert isinstance(result.errors[0], InjectedFailure)
        assert isinstance(result.errors[3], ServerDied)
        assert result.results == {1: {"success": False}, 2: "no answer"}
        assert not any(engine.paused for engine in world.engines)
        later = world.run(lambda c: ask(c, c.rank, "flush_cache"))
        assert later.results == {0: None, 1: None, 2: "no answer"}
        assert isinstance(later.errors[3], ServerDied)
    faults.assert_all_fired()


def test_a_rank_dies_without_a_word() -> None:
    faults = Faults().rank_dies(rank=0, event="barrier")

    def meet(context: RankContext) -> None:
        group = context.seam.open_control_group(0, timeout_s=1)
        with context.trace.waiting("barrier", detail="meet"):
            group.exchange(b"", timeout_s=5)

    with RecordingWorld(tp=2, faults=faults) as world:
        result = world.run(meet)
    assert result.died == [0]
    assert "rank 0 did not come within 5 s" in str(result.errors[1])
    assert [e.text() for e in result.events if e.rank == 0] == ["barrier meet"]
