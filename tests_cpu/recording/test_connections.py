"""What ranks must agree on before they update together, and what is remembered of engines from update to update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.faults import Faults
from harness.recording.bridge import bridge
from harness.recording.engines import EngineOptions
from harness.recording.job import RecordingJob
from harness.recording.lock import StubLock
from harness.recording.log import actor_calls
from harness.recording.model import small_table
from harness.recording.server import Handle
from harness.recording.world import RankContext, RunResult
from staged_sync import rank, transfer_group
from staged_sync.errors import CompletenessError, ConfigurationError, DeadlineExceeded, UpdateFailed
from staged_sync.session import Fleet
from tests_cpu.recording.failing import CALL_S, GRACE_S, failing_job


def connect_each(job: RecordingJob, engines_of: Callable[[int], list[int]]) -> RunResult:
    """`connect_rollout_engines` with other engines on every rank."""
    def connect(context: RankContext) -> None:
        chosen = engines_of(context.rank)
        job.updaters[context.rank].connect_rollout_engines([job.world.handles[i] for i in chosen], job.world.lock.handle,
                                                           [job.counts[i] for i in chosen])
    return job.world.run(connect)


def disconnect(job: RecordingJob, ranks: list[int]) -> None:
    job.world.run(lambda context: job.updaters[context.rank].disconnect_rollout_engines(), ranks=ranks).check()


def one_text(result: RunResult, kind: type[Exception]) -> str:
    assert {type(error) for error in result.errors.values()} == {kind}, result.errors
    texts = {str(error) for error in result.errors.values()}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.parametrize("others", [[0], [1, 0], [0, 2]], ids=["fewer", "another order", "another one"])
def test_ranks_that_hold_other_engines_are_refused_before_anything_is_paused(others: list[int]) -> None:
    with RecordingJob(pp=2, engines=[1, 1, 1]) as job:
        result = connect_each(job, lambda rank: [0, 1] if rank == 0 else others)
        text = one_text(result, ConfigurationError)
    assert "rollout_engines and engine_gpu_counts must be the same, in the same order, on every rank: rank 1 has" in text
    assert result.elapsed_s == 0


def test_ranks_with_another_wire_are_refused() -> None:
    with RecordingJob(pp=2) as job:
        settings = job.updaters[1]._rank.settings
        job.updaters[1]._rank = replace(job.updaters[1]._rank, settings=replace(settings, packed=not settings.packed))
        text = one_text(job.connect(), ConfigurationError)
    assert "the wire must be the same on every rank: rank 1 has" in text


@pytest.mark.parametrize(("field", "setting"), [
    ("bucket_bytes", "update_weight_buffer_size"), ("call_s", "update_weight_call_timeout"),
    ("phase_s", "update_weight_phase_timeout"), ("update_s", "update_weight_timeout"),
])
def test_ranks_that_would_not_keep_the_same_pace_are_refused(field: str, setting: str) -> None:
    """With another bucket size a rank waits in a barrier while the others are inside the exporter's next collective."""
    with failing_job(Faults(), pp=2, make_exporter=bridge("pipeline_collective", ("pp",))) as job:
        settings = job.updaters[1]._rank.settings
        other = (replace(settings, bucket_bytes=10**6) if field == "bucket_bytes" else
                 replace(settings, timeouts=replace(settings.timeouts, **{field: getattr(settings.timeouts, field) + 1})))
        job.updaters[1]._rank = replace(job.updaters[1]._rank, settings=other)
        result = job.connect()
        text = one_text(result, ConfigurationError)
        assert f"args.{setting} must be the same on every rank: rank 1 has" in text and len(text.splitlines()) == 2
        assert result.elapsed_s == 0


def test_an_engine_named_twice_is_refused() -> None:
    with RecordingJob(pp=2, engines=[1, 1]) as job:
        text = one_text(connect_each(job, lambda rank: [0, 1, 0]), ConfigurationError)
    assert "rollout_engines must name each engine once (the same one stands at indices 0 and 2)" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connect_that_one_rank_does_not_see_to_its_end_connects_nobody(rank: int) -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[1, 1]) as job:
        connect_each(job, lambda rank: [0]).check()
        job.update().check()
        faults.fail_at(rank=rank, event="barrier.done", nth=1)  # "connect checked"
        result = connect_each(job, lambda rank: [0, 1])
        assert {type(error) for error in result.errors.values()} == {UpdateFailed}
        assert all("InjectedFailure: injected" in str(error) for error in result.errors.values())
        faults.assert_all_fired()
        assert "no rollout engines are connected" in one_text(job.update(), ConfigurationError)
        connect_each(job, lambda rank: [0, 1]).check()
        job.step = 2
        job.update().check()
        assert job.differences() == []


def test_a_refused_connect_leaves_nobody_connected() -> None:
    with RecordingJob(pp=2) as job:
        job.connect().check()
        one_text(job.connect(counts=[1, 1]), ConfigurationError)
        assert "no rollout engines are connected" in one_text(job.update(), ConfigurationError)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_without_a_connection_tells_the_others_why_it_does_not_come(alone: int) -> None:
    with failing_job(Faults(), pp=2) as job:
        job.connect().check()
        disconnect(job, [alone])
        result = job.update()
        assert type(result.errors[alone]) is ConfigurationError
        assert type(result.errors[1 - alone]) is UpdateFailed
        assert (f"rank {alone} (phase pause): ConfigurationError: no rollout engines are connected on rank {alone}" in
                str(result.errors[1 - alone])) and result.elapsed_s == 0
        assert not any(engine.paused for engine in job.world.engines), "nothing was touched"
        job.connect().check()
        job.update().check()
        assert job.differences() == []


def test_ranks_without_a_connection_are_told_so_at_once_however_often_they_try() -> None:
    with failing_job(Faults(), tp=2, pp=2) as job:
        job.connect().check()
        disconnect(job, [0, 1, 2, 3])
        for _ in range(2):
            result = job.update()
            assert {type(error) for error in result.errors.values()} == {ConfigurationError} and len(result.errors) == 4
            assert result.elapsed_s == 0
        job.connect().check()
        job.update().check()
        assert job.differences() == []


def test_an_interrupt_while_a_rank_looks_around_is_heard_by_the_others() -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    with failing_job(Faults(), pp=2) as job:
        job.connect().check()
        job.exporters[1].problems = interrupted  # type: ignore[method-assign]
        result = job.connect()
        assert type(result.errors[1]) is KeyboardInterrupt
        assert "rank 1 left connect_rollout_engines: KeyboardInterrupt" in str(result.errors[0])
        del job.exporters[1].problems
        job.connect().check()
        job.update().check()
        assert job.differences() == []


def test_an_error_of_our_own_that_one_rank_meets_alone_at_connect_is_heard_by_the_others() -> None:
    def silent(target: Any) -> str:
        raise DeadlineExceeded("the engine's actor does not say who it is")

    with failing_job(Faults(), tp=2) as job:
        seam = job.world.contexts[1].seam
        seam.identity = silent  # type: ignore[method-assign]
        result = job.connect()
        assert {type(error) for error in result.errors.values()} == {UpdateFailed}
        assert all("does not say who it is" in str(error) for error in result.errors.values())
        assert "rank 1 left connect_rollout_engines" in str(result.errors[0])
        del seam.identity
        job.connect().check()
        job.update().check()
        assert job.differences() == []


def stuck_at_close(job: RecordingJob) -> None:
    """The persistent group of rank 0 cannot be closed any more."""
    group = job.updaters[0]._rank.source.group
    assert group is not None
    real = group._group.close

    def close(*, timeout_s: float) -> None:
        real(timeout_s=timeout_s)
        raise DeadlineExceeded("the communicator does not go away")

    group._group.close = close  # type: ignore[method-assign]


def test_a_group_that_cannot_be_closed_does_not_stop_its_source_from_connecting_others() -> None:
    with failing_job(Faults(), tp=2, engines=[1, 1]) as job:
        connect_each(job, lambda rank: [0]).check()
        job.update().check()
        stuck_at_close(job)
        connect_each(job, lambda rank: [1]).check()
        job.update().check()
        assert [line for line in job.differences() if not line.startswith("engine0/")] == []


def test_a_group_that_cannot_be_closed_is_disconnected_all_the_same() -> None:
    with failing_job(Faults()) as job:
        job.connect().check()
        stuck_at_close(job)
        disconnect(job, [0])
        assert "no rollout engines are connected" in one_text(job.update(), ConfigurationError)


def test_ranks_that_hold_different_connections_do_not_update_together() -> None:
    with RecordingJob(pp=2) as job:
        job.connect().check()
        link = job.updaters[1]._link
        assert link is not None
        job.updaters[1]._link = replace(link, serial="another")
        text = one_text(job.update(), UpdateFailed)
        assert "ranks hold different connections" in text and "Call it again on every rank" in text
        assert not any(engine.paused for engine in job.world.engines), "nothing was touched"


@pytest.mark.parametrize("plain", [False, True], ids=["tells", "plain vime"])
def test_engines_of_a_failed_update_are_cleared_also_when_others_were_updated_in_between(plain: bool) -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[EngineOptions(plain_vime=plain), 1]) as job:
        connect_each(job, lambda rank: [0]).check()
        faults.fail_at(rank=1, event="send", stage=1)
        one_text(job.update(), UpdateFailed)
        connect_each(job, lambda rank: [1]).check()
        job.update().check()
        connect_each(job, lambda rank: [0]).check()
        job.step = 2
        told = actor_calls(job.update().check().events, "engine0")
    clears = told.index("handle update_weights_from_distributed")
    assert clears < told.index("handle start_weight_update"), told
    # One that says nothing may hold parts of the old session's layers: an empty session comes first.
    assert told.count("handle start_weight_update") == told.count("handle finish_weight_update") == (2 if plain else 1)


@pytest.mark.parametrize("plain", [False, True], ids=["tells", "plain vime"])
def test_an_engine_that_came_before_the_first_complete_update_stays_paused_with_what_it_was_born_with(plain: bool) -> None:
    """The engines of the first connect hold what the trainer began with; one that has replaced them may hold anything."""
    faults = Faults()
    with failing_job(faults, pp=2, engines=[1, EngineOptions(plain_vime=plain)]) as job:
        for engine, serves in ((0, True), (1, False)):
            connect_each(job, lambda rank, engine=engine: [engine]).check()  # type: ignore[misc]
            faults.engine_error(engine=engine, method="flush_cache")
            one_text(job.update(), UpdateFailed)
            assert job.world.engines[engine].paused is not serves
        job.update().check()
        assert not job.world.engines[1].paused


def test_a_replaced_engine_is_not_held_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle keeps an actor alive, and by that its GPU."""
    monkeypatch.setattr(rank.logger, "disabled", True)  # pytest keeps what is logged, and with it an error's frames
    faults = Faults()
    mine: list[weakref.ref[Any]] = []

    def handles(context: RankContext, engines: list[Any]) -> list[Any]:
        copies = [Handle(engine._server) for engine in engines]  # as every rank deserialises its own
        mine.extend(weakref.ref(handle) for handle in copies)
        return copies

    with failing_job(faults, pp=2, engines=[1, 1], engine_handles=handles) as job:
        job.connect(handles=job.world.handles[:1], counts=[1]).check()
        faults.fail_at(rank=1, event="send", stage=1)
        one_text(job.update(), UpdateFailed)
        job.connect(handles=job.world.handles[1:], counts=[1]).check()
        job.update().check()
        job.world.engines[0]._busy.clear()  # the stub's last error, which was raised in the lead as it is
        gc.collect()
        assert [handle() for handle in mine[:2]] == [None, None]
        assert None not in [handle() for handle in mine[2:]]


@pytest.mark.parametrize("plain", [False, True], ids=["tells", "plain vime"])
def test_an_unclean_engine_that_does_not_answer_is_the_only_one_that_is_blamed(plain: bool) -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[1, EngineOptions(plain_vime=plain)]) as job:
        job.connect().check()
        faults.fail_at(rank=1, event="send", stage=1)
        one_text(job.update(), UpdateFailed)
        faults.never_answers(engine=1, method="update_weights_from_distributed")  # which clears what the update has left
        result = job.update()
        text = one_text(result, UpdateFailed)
        assert "still waiting for flush_cache of rollout engine 1" in text and "engine 0" not in text
        assert result.elapsed_s <= CALL_S + 3 * GRACE_S


def test_ranks_in_different_calls_are_told_who_is_in_which() -> None:
    with failing_job(Faults(), pp=2) as job:
        job.connect().check()

        def different(context: RankContext) -> None:
            updater = job.updaters[context.rank]
            if context.rank == 0:
                updater.update_weights()
            else:
                updater.connect_rollout_engines(job.world.handles, job.world.lock.handle, job.counts)

        result = job.world.run(different)
        assert [type(result.errors[rank]) for rank in (0, 1)] == [UpdateFailed, ConfigurationError]
        assert all("rank 0 is in update_weights, rank 1 is in connect_rollout_engines" in str(error)
                   for error in result.errors.values()), result.errors
        assert result.elapsed_s == 0 and not any(engine.paused for engine in job.world.engines)
        job.connect().check()
        job.update().check()
        assert job.differences() == []


@pytest.mark.parametrize("plain", [False, True], ids=["tells", "plain vime"])
def test_a_session_that_a_trainer_before_this_one_has_left_open_is_cleared(plain: bool) -> None:
    with failing_job(Faults(), pp=2, engines=[EngineOptions(plain_vime=plain)]) as job:
        engine = job.world.engines[0]

        def before(context: RankContext) -> None:
            if context.rank == 0:
                for method in ("pause_generation", "flush_cache", "start_weight_update"):
                    work = context.seam.call(engine.handle, method)
                    assert context.seam.wait_any([work], timeout_s=10)
                    work.result()
        job.world.run(before).check()
        job.connect().check()
        result = job.update()
        assert result.errors == {} and job.differences() == []
        if plain:  # refused; an empty session, for what the old one has left in layers; the real one
            told = actor_calls(result.events, "engine0")
            assert [call.split("_")[0] for call in told if call in ("handle start_weight_update", "handle finish_weight_update")
                    ] == ["handle start", "handle start", "handle finish", "handle start", "handle finish"]
        # A plain engine does not say that a session is open, so its cache is flushed inside it.
        assert len(result.violations) == (1 if plain else 0), result.violations


def test_an_engine_whose_weights_are_not_complete_is_cleared_although_no_session_is_open() -> None:
    """A trainer before this one has abandoned its session: parameters may be on the meta device, so it must not serve."""
    faults = Faults()
    with failing_job(faults, pp=2, engines=[EngineOptions(info={"weights_complete": False}), 1]) as job:
        job.connect().check()
        faults.engine_error(engine=1, method="flush_cache")
        one_text(job.update(), UpdateFailed)
        assert [engine.paused for engine in job.world.engines] == [True, False], "the other one has whole weights and serves"
        events = job.update().check().events
        assert job.differences() == []
    for engine, cleared in (("engine0", True), ("engine1", False)):
        told = actor_calls(events, engine)
        clears = told.index("handle update_weights_from_distributed")
        assert (clears < told.index("handle start_weight_update")) == cleared, told


@pytest.mark.parametrize("rank", [0, 1])
def test_versions_stay_together_when_one_rank_leaves_while_engines_are_resumed(rank: int) -> None:
    faults = Faults()
    with failing_job(faults, pp=2) as job:
        job.connect().check()
        faults.fail_at(rank=rank, event="phase", nth=6)
        job.update()
        faults.assert_all_fired()
        job.step = 2
        job.update().check()
        assert {updater.weight_version for updater in job.updaters} == {int(job.world.engines[0].version)} == {2}


@pytest.mark.parametrize("rank", [0, 1])
def test_versions_come_together_again_when_one_rank_does_not_see_the_last_one_published(rank: int) -> None:
    faults = Faults()
    with failing_job(faults, pp=2) as job:
        job.connect().check()
        done = [event.detail for event in job.update().check().events if (event.rank, event.event) == (rank, "barrier.done")]
        faults.fail_at(rank=rank, event="barrier.done", nth=done.index("published"))
        job.update()
        faults.assert_all_fired()
        assert sorted(updater.weight_version for updater in job.updaters) == [1, 2]
        job.update().check()
        versions = {updater.weight_version for updater in job.updaters}
        assert versions == {int(job.world.engines[0].version)} == {job.updaters[0].weight_version}


def test_what_one_rank_knows_of_a_failed_update_counts_for_all() -> None:
    """Rank 1 leaves with the news that all are paused; the others start, and wait for it."""
    faults = Faults()
    with failing_job(faults, pp=2) as job:
        job.connect().check()
        faults.fail_at(rank=1, event="barrier.done")
        job.update()
        faults.assert_all_fired()
        assert [updater.poisoned is None for updater in job.updaters] == [False, True]
        faults.engine_error(engine=0, method="pause_generation")
        result = job.update()
        assert "must not serve" in one_text(result, UpdateFailed)
        assert [error.state for error in result.errors.values() if isinstance(error, UpdateFailed)] == ["poisoned"] * 2


def test_a_group_that_an_engine_does_not_hold_any_more_is_opened_anew() -> None:
    """Somebody else has used the engine in between, or its workers were restarted behind the same handle."""
    with RecordingJob(engines=[1, 1]) as job:
        job.connect().check()
        job.update().check()

        def drop(context: RankContext) -> None:
            work = context.seam.call(job.world.handles[1], "destroy_weights_update_group", group_name="vime-pp_0")
            assert context.seam.wait_any([work], timeout_s=10)
            work.result()

        job.world.run(drop).check()
        job.connect().check()
        job.step = 2
        job.update().check()
        assert job.differences() == []


def test_a_fleet_is_another_one_with_other_engines_counts_or_lock() -> None:
    engines, lock = [object(), object()], object()
    fleet = Fleet(tuple(engines), (1, 2), lock, (True, True))
    assert fleet.same_as(engines, [1, 2], lock)
    assert not fleet.same_as(engines, [2, 1], lock)
    assert not fleet.same_as(engines, [1, 2], object())
    assert not fleet.same_as(engines[::-1], [1, 2], lock)
    assert not fleet.same_as(engines[:1], [1], lock)


@pytest.mark.parametrize("broken", ["optional", "describe", "gathers", "problems"])
def test_an_exporter_that_breaks_at_connect_is_a_problem_of_all_at_once(broken: str) -> None:
    def explode(*_: Any) -> Any:
        raise KeyError("who knows")

    checkpoint = small_table(2, dense=3) if broken == "optional" else None  # asked about what nobody sends
    with failing_job(Faults(), pp=2, checkpoint=checkpoint) as job:
        setattr(job.exporters[0], broken, explode)
        result = job.connect()
        assert "KeyError: 'who knows'" in one_text(result, ConfigurationError)
    assert result.elapsed_s == 0


def test_a_failed_pause_after_a_failed_update_does_not_call_the_engines_well() -> None:
    faults = Faults()
    with failing_job(faults, pp=2) as job:
        job.connect().check()
        faults.fail_at(rank=1, event="send", stage=1)
        one_text(job.update(), UpdateFailed)
        faults.engine_error(engine=0, method="pause_generation")
        result = job.update()
        assert {error.state for error in result.errors.values() if isinstance(error, UpdateFailed)} == {"poisoned"}
        assert "must not serve" in one_text(result, UpdateFailed)
        assert all(engine.paused for engine in job.world.engines)


def test_an_interrupt_while_the_lock_is_acquired_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_job(Faults(), pp=2) as job:
        job.connect().check()
        real, interrupted = transfer_group._lock_answer, []

        def answer(seam: Any, trace: Any, call: Any, deadline: Any) -> Any:
            if "acquire" in call.label and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return real(seam, trace, call, deadline)

        monkeypatch.setattr(transfer_group, "_lock_answer", answer)
        result = job.update()
        assert interrupted and any(isinstance(error, KeyboardInterrupt) for error in result.errors.values())
        assert not job.world.lock.held


def test_a_new_lock_is_used_from_the_next_connect_on() -> None:
    with RecordingJob(pp=1) as job:
        job.connect().check()
        group = job.updaters[0]._rank.source.group
        job.connect().check()
        assert job.updaters[0]._rank.source.group is group, "the same engines and lock: the group is kept"
        other = StubLock(job.world.kernel)
        job.connect(lock=other.handle).check()
        job.world.lock.held = True  # somebody else's by now
        job.update().check()
        assert job.updaters[0]._rank.source.group is not group
        assert job.differences() == [] and not other.held


@pytest.mark.parametrize("reply", [{"success": 0}, {"success": None}, {"success": False}, False])
def test_a_reply_that_says_no_is_a_failure(reply: Any) -> None:
    faults = Faults()
    with failing_job(faults, pp=2) as job:
        job.connect().check()
        faults.engine_error(engine=0, method="finish_weight_update", reply=reply)
        assert f"rollout engine 0 failed in finish_weight_update: it answered {reply!r}" in one_text(job.update(), UpdateFailed)


def test_completeness_errors_are_the_same_on_every_rank() -> None:
    with RecordingJob(pp=2, table=small_table(2), checkpoint=small_table(2, dense=3)) as job:
        assert "missing: hf.s0.dense2" in one_text(job.connect(), CompletenessError)


def test_a_roll_back_that_fails_leaves_no_session_open() -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[EngineOptions(plain_vime=True)]) as job:
        job.connect().check()
        faults.fail_at(rank=1, event="send", stage=1)
        one_text(job.update(), UpdateFailed)
        faults.engine_error(engine=0, method="finish_weight_update")  # of the empty session before the real one
        assert "rollout engine 0 failed in finish_weight_update" in one_text(job.update(), UpdateFailed)
        assert not job.world.engines[0]._session_open() and job.world.engines[0].paused
        job.step = 2
        job.update().check()
        assert job.differences() == []
