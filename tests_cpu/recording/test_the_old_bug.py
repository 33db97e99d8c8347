"""The bug this project exists for (vllm-project/vime#329): every stage opens its own group to the same engines, the receiver
keeps one, and the others send into a group on which nobody listens. Applied as a mutant of our own code, it never ends well."""

from __future__ import annotations

import pytest

from harness.faults import Faults
from harness.mutants import staging
from harness.recording.engines import EngineOptions
from harness.recording.job import RecordingJob
from harness.recording.world import RunResult
from staged_sync.errors import UpdateFailed
from tests_cpu.recording.failing import CALL_S, GRACE_S, failing_job, problems_of_engines_at_rest


def old_behaviour(retain_replaced: bool, pp: int, engines: int = 1) -> tuple[RecordingJob, RunResult]:
    options = [EngineOptions(retain_replaced=retain_replaced) for _ in range(engines)]
    with staging.old_behaviour(), failing_job(Faults(), engines=options, pp=pp) as run:
        run.connect().check()
        return run, run.update()


@pytest.mark.parametrize("engines", [1, 2])
def test_with_stock_nccl_it_hangs_until_a_deadline_and_the_stall_names_both_groups(engines: int) -> None:
    run, result = old_behaviour(retain_replaced=True, pp=2, engines=engines)
    assert {type(error) for error in result.errors.values()} == {UpdateFailed} and len(result.errors) == 2
    assert CALL_S <= result.elapsed_s <= CALL_S + 3 * GRACE_S
    sending = [row for row in result.stalls[0].splitlines() if row.startswith("rank")]
    listening = [row for row in result.stalls[0].splitlines() if row.startswith("engine0/worker0")]
    assert any("wait_any" in row and "vime-pp_1" in row for row in sending), result.stalls[0]
    assert any("receive" in row and "vime-pp_0" in row for row in listening), result.stalls[0]
    assert problems_of_engines_at_rest(run) == []


def test_where_the_replaced_group_is_destroyed_it_fails_at_once() -> None:
    run, result = old_behaviour(retain_replaced=False, pp=2)
    assert {type(error) for error in result.errors.values()} == {UpdateFailed} and len(result.errors) == 2
    assert result.elapsed_s <= GRACE_S
    assert problems_of_engines_at_rest(run) == []


@pytest.mark.parametrize("retain_replaced", [True, False])
def test_one_stage_never_had_the_bug(retain_replaced: bool) -> None:
    run, result = old_behaviour(retain_replaced, pp=1)
    result.check()
    assert run.differences() == []


@pytest.mark.parametrize("retain_replaced", [True, False])
@pytest.mark.parametrize("pp", [2, 3])
def test_ours_passes_where_the_old_behaviour_fails(retain_replaced: bool, pp: int) -> None:
    options = [EngineOptions(workers=2, retain_replaced=retain_replaced), EngineOptions(retain_replaced=retain_replaced)]
    with failing_job(Faults(), engines=options, pp=pp) as run:
        run.connect().check()
        for step in (1, 2, 3):
            run.step = step
            run.update().check()
            assert run.differences() == []
