"""More of what can fail with several stages: every source in every bucket, peers, idle ranks, engines that come back; the bug
that this project is for; and nothing that leaks."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.wire import Problem, Topology
from harness.world.world import World, WorldHung

pytestmark = [pytest.mark.beyond_main_job, pytest.mark.needs(pp=2)]

Job = Callable[..., SyncJob]
Exact = Callable[[SyncReport], SyncReport]

CALL_S, PHASE_S, GRACE_S = 3.0, 6.0, 3.0
SHORT = {"update_weight_call_timeout": CALL_S, "update_weight_phase_timeout": PHASE_S, "update_weight_timeout": 20.0}
SMALL = {"update_weight_buffer_size": 1 << 16}

AT_ONCE_S = 5.0
"""For failures that somebody notices: no deadline is involved."""

IN_TIME_S = PHASE_S + GRACE_S + 5.0
"""For failures that only a deadline can notice: a status barrier's, and the five seconds that rule 8 allows."""


@pytest.fixture
def job(checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> SyncJob:
    """Connected, with one exact update behind it, so that there is an old version to keep."""
    ready = start_job(checkpoints("qwen3", 0), args=SMALL | SHORT)
    ready.connect()
    exact(ready.update())
    return ready


def source_of(topology: Topology, stage: int) -> int:
    """The first trainer rank of a stage (megatron-core's order: tensor parallel, then data parallel, then pipeline)."""
    return stage * topology.tp


def assert_one_cause(problems: list[Problem], cause: str) -> None:
    assert {problem.kind for problem in problems} == {"UpdateFailed"}, [problem.line() for problem in problems]
    texts = {problem.text for problem in problems}
    assert len(texts) == 1, f"ranks disagree on what happened: {texts}"
    assert cause in texts.pop(), problems[0].text


def assert_kept(job: SyncJob) -> None:
    """No engine serves, none is in a session, all publish the old version; every trainer rank knows."""
    for state in job.on_receivers("state"):
        assert (state["paused"], state["session_open"], state["weight_version"]) == (True, False, "1"), state
    for state in job.on_trainers("state"):
        assert state["version"] == 1 and "must not serve" in state["poisoned"] and state["group_name"] is None, state


def assert_recovers(job: SyncJob, checkpoint: str, exact: Exact) -> None:
    job.load(checkpoint)
    report = exact(job.update())
    assert report.version == 2 and {engine.version for engine in report.engines} == {"2"}
    assert all(state["poisoned"] is None for state in job.on_trainers("state"))


# --- trainer ranks ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("bucket", [0, 2])
def test_every_source_is_heard_in_every_bucket(stage: int, bucket: int, job: SyncJob, topology: Topology,
                                               checkpoints: Callable[..., str], exact: Exact) -> None:
    source = source_of(topology, stage)
    job.plant(source, "fail_at", rank=source, event="send", stage=stage, bucket=bucket)
    problems = job.failures("update", Deadline.after(AT_ONCE_S))
    assert_one_cause(problems, f"rank {source} (phase send, stage {stage}, group vime-pp_{stage}, bucket {bucket}): "
                               f"InjectedFailure: injected")
    job.harvest(source)
    assert_kept(job)
    assert_recovers(job, checkpoints("qwen3", 1), exact)


@pytest.mark.needs(tp=2, pp=2)
def test_a_gather_peer_that_raises_joins_the_gather_all_the_same(job: SyncJob, topology: Topology,
                                                                 checkpoints: Callable[..., str], exact: Exact) -> None:
    peer = source_of(topology, 1) + 1
    job.plant(peer, "fail_at", rank=peer, event="gather", stage=1, nth=1)
    assert_one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), f"rank {peer} (phase send, stage 1): InjectedFailure")
    job.harvest(peer)
    assert_kept(job)
    assert_recovers(job, checkpoints("qwen3", 1), exact)


def test_a_rank_that_is_not_even_active_is_heard(job: SyncJob, topology: Topology, checkpoints: Callable[..., str],
                                                 exact: Exact) -> None:
    idle = source_of(topology, 1)
    job.plant(idle, "fail_at", rank=idle, event="phase", stage=0)
    assert_one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), f"rank {idle} (phase send, stage 0): InjectedFailure")
    job.harvest(idle)
    assert_kept(job)
    assert_recovers(job, checkpoints("qwen3", 1), exact)


# --- engines that come back ---------------------------------------------------------------------------------------------------

def test_a_killed_engine_is_replaced_and_does_not_serve_before_its_first_complete_update(
        job: SyncJob, world: World, checkpoints: Callable[..., str], exact: Exact) -> None:
    dead = job.engines[1].rank
    job.plant(dead, "engine_dies", engine=1, method="receive", nth=1)
    assert_one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), "rollout engine 1")
    (other,) = world.run("harness.world.receiver:state", on=[job.engines[0].rank], deadline=job.deadline)
    assert (other["paused"], other["session_open"], other["weight_version"]) == (True, False, "1"), other
    world.respawn(dead, job.deadline)
    job.renew_engine(1)
    job.connect()
    # A failure before any byte moves: the engine with the old weights is told to go on, the new one has none to serve.
    job.plant(job.engines[0].rank, "engine_error", engine=0, method="flush_cache")
    assert_one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), "rollout engine 0 failed in flush_cache")
    assert [state["paused"] for state in job.on_receivers("state")] == [True, True]
    job.load(checkpoints("qwen3", 1))
    assert exact(job.update()).version == 2


def test_a_stopped_engine_ends_the_update_at_the_deadline_and_recovers_when_it_goes_on(
        job: SyncJob, world: World, checkpoints: Callable[..., str], exact: Exact) -> None:
    stopped = job.engines[1].rank
    job.plant(stopped, "never_answers", engine=1, method="receive", nth=1)
    began = time.monotonic()
    problems = job.failures("update", Deadline.after(IN_TIME_S))
    assert CALL_S <= time.monotonic() - began < IN_TIME_S
    assert_one_cause(problems, "update_weights_from_distributed of rollout engine 1")
    world.signal(stopped, signal.SIGCONT, job.deadline)
    assert_recovers(job, checkpoints("qwen3", 1), exact)


def test_a_dead_engine_between_updates_is_named_and_the_others_go_on_serving_the_old_weights(job: SyncJob, world: World) -> None:
    world.kill(job.engines[1].rank, job.deadline)
    assert_one_cause(job.failures("update", Deadline.after(IN_TIME_S)), "rollout engine 1 failed in pause_generation")
    job.choose(job.engines[:1])
    (state,) = job.on_receivers("state")
    assert (state["paused"], state["weight_version"]) == (False, "1"), "nothing was touched: it may serve"


# --- the bug that this project is for -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["gloo_retain", "gloo"])
def test_the_old_behaviour_never_ends_well(backend: str, checkpoints: Callable[..., str], start_job: Job) -> None:
    """`gloo_retain` keeps a replaced group open as stock NCCL does, and nothing happens until a deadline; `gloo` destroys it,
    and the source that nobody listens to learns of it at once."""
    job = old_style_job(backend, checkpoints, start_job, SHORT)
    began = time.monotonic()
    problems = job.failures("update", Deadline.after(IN_TIME_S))
    took_s = time.monotonic() - began
    assert_one_cause(problems, "rollout engine 0")
    if not job.world.healthy:  # one stage's bytes came where the other's were expected, and gloo aborts on another size
        return
    assert (took_s >= CALL_S) == (backend == "gloo_retain"), f"{took_s:.1f} s"
    (state,) = job.on_receivers("state")
    sending = set(re.findall(r"bucket 0\): .* over (?:transfer group )?'?(vime-pp_[01])", problems[0].text))
    assert sending | {state["group_name"]} == {"vime-pp_0", "vime-pp_1"}, (
        f"the engine listens to {state['group_name']}, the group that came last; the failure is of {sending}: "
        f"{problems[0].text}")
    assert (state["paused"], state["weight_version"]) == (True, "default"), "it must not serve what it got"


def test_the_hang_report_of_the_old_behaviour_names_both_groups_and_who_waits(checkpoints: Callable[..., str],
                                                                              start_job: Job) -> None:
    job = old_style_job("gloo_retain", checkpoints, start_job, {})  # the library's deadlines are far away
    run = job.world.start("harness.world.trainer:update", on=job.world.trainer_ranks)
    with pytest.raises(WorldHung) as hung:
        run.wait(Deadline.after(4.0))
    rows = rows_of(str(hung.value))
    (listening,) = re.findall(r"vime-pp_[01]", rows["engine0"])
    assert "update_weights_from_distributed to return" in rows["engine0"], str(hung.value)
    waiting = {f"vime-pp_{stage}": rows[f"rank{source_of(job.world.topology, stage)}"] for stage in (0, 1)}
    unheard = next(group for group in waiting if group != listening)
    assert unheard in waiting[unheard] and "send" in waiting[unheard], f"nobody listens to {unheard}:\n{hung.value}"


def rows_of(report: str) -> dict[str, str]:
    """The rows of a hang table by their first cell; a row may go on over several lines."""
    rows: dict[str, str] = {}
    name = ""
    for line in report.splitlines():
        if line.startswith("│"):
            name = (line.split("│")[1].split() or [name])[0]
            rows[name] = rows.get(name, "") + line
    return rows


def old_style_job(backend: str, checkpoints: Callable[..., str], start_job: Job, deadlines: dict[str, float]) -> SyncJob:
    job = start_job(checkpoints("qwen3", 0), args=SMALL | deadlines, engines=1, backend=backend)
    job.world.clean = False
    job.connect_as("harness.world.old_style:connect_engines")
    return job


@pytest.mark.parametrize("backend", ["gloo_retain", "gloo"])
def test_staged_sync_passes_where_the_old_behaviour_fails(backend: str, checkpoints: Callable[..., str], start_job: Job,
                                                          exact: Exact) -> None:
    job = start_job(checkpoints("qwen3", 0), args=SMALL | SHORT, engines=1, backend=backend)
    job.world.clean = False
    job.connect()
    for step in (0, 1, 2):
        job.load(checkpoints("qwen3", step))
        exact(job.update())


# --- leaks ---------------------------------------------------------------------------------------------------------------

@pytest.mark.nccl_timeout(150)
def test_nothing_leaks_on_sources_and_engines(world: World, checkpoints: Callable[..., str], start_job: Job,
                                              exact: Exact) -> None:
    """Descriptors, sockets and threads after update 10 are those after update 100."""
    job = start_job(checkpoints("qwen3", 0), args={"update_weight_buffer_size": 1 << 18})
    job.connect()
    exact(job.update())
    ranks = [*world.trainer_ranks, *(engine.rank for engine in job.engines)]

    def held() -> list[dict[str, Any]]:
        return world.run("harness.world.rank:resources", on=ranks, deadline=job.deadline)

    def updates(number: int) -> None:
        world.run("harness.world.trainer:update_often", on=world.trainer_ranks, deadline=job.deadline, number=number)

    job.on_receivers("forget", stop=True)
    updates(9)
    after_10 = held()
    updates(90)
    after_100 = held()
    assert after_100 == after_10
