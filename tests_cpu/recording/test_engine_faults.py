"""An engine refuses, says no, is silent or dies at every RPC of an update, one at a time."""

from __future__ import annotations

import pytest

from harness.faults import Faults
from harness.recording.kernel import Waiting
from harness.recording.log import actor_calls, assert_story, calls
from tests_cpu.recording.failing import (
    CALL_S,
    GRACE_S,
    assert_none,
    failing_job,
    problems_after,
    problems_of_engines_at_rest,
    problems_of_recovery,
)

BEFORE_START = [("pause_generation", 0), ("flush_cache", 0)]
WEIGHTS_TOUCHED = [
    ("start_weight_update", 0),
    ("init_weights_update_group", 0),
    ("update_weights_from_distributed", 0),
    ("update_weights_from_distributed", 1),
    ("update_weights_from_distributed", 2),
    ("init_weights_update_group", 1),
    ("update_weights_from_distributed", 3),
    ("update_weights_from_distributed", 4),
    ("update_weights_from_distributed", 5),
    ("finish_weight_update", 0),
]
PUBLISHING = [("update_weight_version", 0), ("continue_generation", 0)]
"""Every RPC that an engine takes up in a tp1·pp2 update with three buckets per stage."""

REPLIES = [None, False, {"success": False, "message": "out of memory"}]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "pp": 2}], ids=["tp1pp2", "tp2pp2"])
@pytest.mark.parametrize("reply", REPLIES, ids=["raises", "False", "success=False"])
@pytest.mark.parametrize(("method", "nth"), BEFORE_START + WEIGHTS_TOUCHED + PUBLISHING)
def test_a_refusal_is_raised_on_every_rank_at_once_and_the_next_update_is_exact(
        method: str, nth: int, reply: object, layout: dict[str, int]) -> None:
    faults = Faults().engine_error(engine=1, method=method, nth=nth, reply=reply)
    with failing_job(faults, engines=[1, 2], **layout) as run:
        run.connect().check()
        result = run.update()
        assert_none(problems_after(run, result, f"rollout engine 1 failed in {method}", limit_s=GRACE_S))
        if (method, nth) in BEFORE_START:
            assert not any(engine.paused for engine in run.world.engines if engine.index == 0 or method == "flush_cache")
        if (method, nth) in WEIGHTS_TOUCHED:
            assert_none(problems_of_engines_at_rest(run))
        assert_none(problems_of_recovery(run))
    faults.assert_all_fired()


@pytest.mark.parametrize("kind", ["never_answers", "engine_dies"])
@pytest.mark.parametrize(("method", "nth"), BEFORE_START + WEIGHTS_TOUCHED + PUBLISHING)
def test_a_silent_or_dead_engine_ends_in_time_and_its_replacement_serves_only_complete_weights(
        kind: str, method: str, nth: int) -> None:
    faults: Faults = getattr(Faults(), kind)(engine=1, method=method, nth=nth)
    with failing_job(faults, engines=[1, 2], pp=2) as run:
        run.connect().check()
        result = run.update()
        limit_s = CALL_S + 2 * GRACE_S if kind == "never_answers" else 2 * GRACE_S
        assert_none(problems_after(run, result, "rollout engine 1", limit_s=limit_s))
        if (method, nth) in WEIGHTS_TOUCHED:
            assert_none(problems_of_engines_at_rest(run))

        replacement = run.world.add_engine(2)
        healthy = run.world.engines[0]
        run.step = 2
        run.connect(handles=[healthy.handle, replacement.handle], counts=[1, 2]).check()
        recovery = run.update()
        assert (recovery.errors, recovery.violations) == ({}, ())
        assert [line for line in run.differences() if not line.startswith("engine1/")] == []
        assert actor_calls(recovery.events, "engine2").count(f"generate version {replacement.version}") == 1
    faults.assert_all_fired()


def test_the_story_of_an_engine_that_refuses_a_bucket() -> None:
    """No finish, no resume; the lock is given back, the group closed, the session cleared by a rejected update."""
    faults = Faults().engine_error(engine=0, method="update_weights_from_distributed", nth=4)
    with failing_job(faults, pp=2) as run:
        run.connect().check()
        result = run.update()
        story = calls(result.events, 1)
        assert_story(story[story.index("barrier stage=1 stage 1 open"):], [
            "barrier stage=1 stage 1 open",
            "rpc vime-pp_1 stage=1 bucket=0 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=0 hf.s1.dense0",
            "rpc vime-pp_1 stage=1 bucket=0 release lock",
            "rpc vime-pp_1 stage=1 bucket=1 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=1 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=1 hf.s1.dense1",
            "send.failed vime-pp_1 stage=1 bucket=1 hf.s1.dense1",
            "rpc vime-pp_1 stage=1 bucket=1 release lock",
            lambda line: line.startswith("error stage=1 EngineError: rollout engine 0 failed in update_weights"),
            "close vime-pp_1 stage=1",
            "barrier stage=1 stage 1 dense",
            "state group_name=None",
        ])
        lead = calls(result.events, 0)
        assert_story(lead[lead.index("barrier stage=1 stage 1 open"):], [
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 dense",
            "rpc stage=1 update_weights_from_distributed engine0",  # lists of unequal length: clears the session
        ])
        engine = run.world.engines[0]
        assert engine.paused and engine.version is None and not engine.workers[0].active


def test_an_engine_that_refuses_to_pause_leaves_the_others_serving_their_old_weights() -> None:
    faults = Faults().engine_error(engine=1, method="pause_generation")
    with failing_job(faults, engines=[1, 1], pp=2) as run:
        run.connect().check()
        result = run.update()
        assert_story(calls(result.events, 0), [
            "rpc pause_generation engine0",
            "rpc pause_generation engine1",
            lambda line: line.startswith("error EngineError: rollout engine 1 failed in pause_generation"),
            "barrier paused",
            "rpc continue_generation engine0",
        ])
        assert "No weights were touched" in str(result.errors[1])
        assert actor_calls(result.events, "engine0")[-1] == "generate version None"


def test_an_engine_that_was_only_slow_to_pause_serves_again() -> None:
    """It is told to go on without an answer to its pause: it takes its calls one after the other."""
    with failing_job(Faults(), engines=[1, 1], pp=2) as run:
        run.connect().check()
        engine = run.world.engines[1]
        real = engine.pause_generation

        def slow() -> None:
            run.world.kernel.wait(lambda: False, Waiting("sleep", for_time=True), deadline_s=run.world.kernel.now_s + 2 * CALL_S)
            real()

        engine.pause_generation = slow  # type: ignore[method-assign]
        result = run.update()
        assert_none(problems_after(run, result, "rollout engine 1", limit_s=2 * CALL_S + GRACE_S))
        later = run.world.run(lambda context: context.seam.sleep(2 * CALL_S))
        told = [call for call in actor_calls(later.events, "engine1") if call.startswith("handle ")]
        assert told[-1] == "handle continue_generation" and not any(engine.paused for engine in run.world.engines)


def test_a_silent_engine_is_given_up_exactly_at_the_deadline_of_one_call() -> None:
    faults = Faults().never_answers(engine=0, method="start_weight_update")
    with failing_job(faults, pp=2) as run:
        run.connect().check()
        result = run.update()
        first_error = next(event for event in result.events if event.event == "error")
        assert (first_error.rank, first_error.time_s) == (0, CALL_S)
        assert "args.update_weight_call_timeout" in str(result.errors[1])
