"""Deadlines of locks and barriers, verdicts on what was sent, and what a group is worth after a time-out."""

from __future__ import annotations

from collections.abc import Callable

from harness.faults import Faults
from harness.recording.exporter import Shards
from harness.recording.job import RecordingJob
from harness.recording.log import order
from harness.recording.model import StubUnit, small_table
from staged_sync.exporter import NamedTensor
from tests_cpu.recording.failing import (
    CALL_S,
    DEADLINES,
    GRACE_S,
    PHASE_S,
    assert_none,
    failing_job,
    problems_after,
    problems_of_engines_at_rest,
    problems_of_recovery,
)
from tests_cpu.recording.test_rank_faults import failing


def sleeps_once(run: RecordingJob, rank: int, step: str, label: str, seconds: float) -> Callable[[str, str], None]:
    left = [seconds]

    def before(now: str, what: str) -> None:
        if (now, what) == (step, label) and left:
            run.world.contexts[rank].seam.sleep(left.pop())
    return before


def test_a_lock_that_somebody_else_holds_is_given_up_at_the_deadline() -> None:
    with failing_job(Faults(), pp=2, max_steps=50_000) as run:
        run.connect().check()
        run.world.lock.held = True
        result = run.update()
        assert_none(problems_of_engines_at_rest(run) + [f"rank {rank}: {error}" for rank, error in result.errors.items()
                                                        if "somebody else holds it" not in str(error)])
        assert CALL_S <= result.elapsed_s <= CALL_S + GRACE_S


def test_an_acquire_given_up_at_its_deadline_does_not_keep_the_lock() -> None:
    with failing_job(Faults(), pp=2) as run:
        run.connect().check()
        run.exporters[1].before = sleeps_once(run, 1, "convert", "s1.dense0", PHASE_S + 1)  # type: ignore[attr-defined]
        run.update()
        assert not run.world.lock.held


def test_a_rank_that_is_late_for_a_barrier_costs_one_update_and_one_generation() -> None:
    with failing_job(Faults(), expert=0, pp=2) as run:
        run.connect().check()
        run.exporters[1].before = sleeps_once(run, 1, "units", "expert", 2 * PHASE_S)  # type: ignore[attr-defined]
        result = run.update()
        assert_none([f"rank {rank}: {error}" for rank, error in result.errors.items()
                     if "rank 1 did not come within 105 s" not in str(error)] + problems_of_engines_at_rest(run))
        run.step = 2
        recovery = run.update()
        assert_none([f"recovery: rank {rank}: {error}" for rank, error in recovery.errors.items()])
        assert order(recovery.events, "barrier")[:2] == ["rank0: barrier control group 1", "rank1: barrier control group 1"]
        assert run.differences() == []


def test_a_barrier_waits_no_longer_than_the_update_may_take() -> None:
    update_s, slow_s = PHASE_S + 2 * GRACE_S, PHASE_S - GRACE_S
    args = {**DEADLINES, "update_weight_timeout": update_s, "update_weight_buffer_size": 70}
    faults = Faults().rank_dies(rank=1, event="barrier", stage=1)
    with RecordingJob(pp=2, table=small_table(2, dense=2), args=args, faults=faults) as run:
        run.connect().check()
        run.exporters[0].before = sleeps_once(run, 0, "units", "dense", slow_s)  # type: ignore[attr-defined]
        result = run.update()
        assert "rank 1 did not come" in str(result.errors[0])
        assert slow_s < result.elapsed_s <= update_s + GRACE_S
    faults.assert_all_fired()


def test_a_rank_that_has_failed_by_itself_says_so_when_another_one_does_not_come() -> None:
    faults = Faults().rank_dies(rank=1, event="barrier", stage=0, nth=1)
    with failing_job(faults, pp=2) as run:
        run.connect().check()
        run.exporters[0].before = failing("convert", "s0.dense0")  # type: ignore[attr-defined]
        result = run.update()
        faults.assert_all_fired()
        text = str(result.errors[0])
        assert "rank 0 (phase send, stage 0): ValueError: cannot convert s0.dense0" in text and "rank 1 did not come" in text


def test_a_tensor_lost_on_the_way_is_caught_before_finish() -> None:
    with failing_job(Faults(), pp=2) as run:
        run.connect().check()
        exporter = run.exporters[1]
        convert = exporter.convert

        def forgetful(unit: StubUnit, gathered: Shards) -> list[NamedTensor]:
            return [] if unit.label == "s1.dense1" else convert(unit, gathered)

        exporter.convert = forgetful  # type: ignore[method-assign]
        result = run.update()
        cause = "stage 1 sent 2 tensors, announced 3 at connect; first offender: hf.s1.dense1"
        assert_none(problems_after(run, result, cause, limit_s=0) + problems_of_engines_at_rest(run))
        assert order(result.events, "handle")[-1] == "engine0: handle update_weights_from_distributed"  # abandoned
        exporter.convert = convert  # type: ignore[method-assign]
        assert_none(problems_of_recovery(run))


def test_a_failed_single_stage_update_opens_a_new_group_for_the_next() -> None:
    faults = Faults().engine_error(engine=1, method="update_weights_from_distributed", nth=1)
    with failing_job(faults, engines=[1, 1]) as run:
        run.connect().check()
        result = run.update()
        assert_none(problems_after(run, result, "rollout engine 1 failed in update_weights_from_distributed", limit_s=GRACE_S))
        assert_none(problems_of_recovery(run))
        assert [channel.live for channel in run.world.network.channels] == [False, True]
