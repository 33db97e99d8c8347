"""Planted faults in live worlds: one cause on every rank, in time; nobody serves a mixture; the next update is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.wire import Problem, Topology

pytestmark = pytest.mark.beyond_main_job

Job = Callable[..., SyncJob]
Exact = Callable[[SyncReport], SyncReport]

AT_ONCE_S = 10.0
"""For failures that somebody notices: no deadline of the library is involved, only a busy machine."""

SHORT = {"update_weight_call_timeout": 3.0, "update_weight_phase_timeout": 6.0, "update_weight_timeout": 20.0}
IN_TIME_S = SHORT["update_weight_phase_timeout"] + 2 * 5 + 5
"""For failures that only a deadline can notice: the phase's, both graces, and the five seconds that rule 8 allows."""

SMALL = {"update_weight_buffer_size": 1 << 16}
"""Many buckets per stage."""


@pytest.mark.parametrize(("method", "nth"), [
    ("pause_generation", 0), ("start_weight_update", 0), ("init_weights_update_group", 0),
    ("update_weights_from_distributed", 0), ("update_weights_from_distributed", 2), ("receive", 5),
    ("finish_weight_update", 0)], ids=str)
def test_an_engine_that_raises_is_named_on_every_rank_and_the_next_update_is_exact(
        topology: Topology, method: str, nth: int, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    job = start_job(checkpoints("qwen3", 0), args=SMALL, scenario=f"after engine 1 raised in {method} {nth}")
    if method == "init_weights_update_group" and topology.pp == 1:
        job.plant(job.engines[1].rank, "engine_error", engine=1, method=method, nth=nth)
        _one_cause(job.failures("connect", Deadline.after(AT_ONCE_S)), "injected: engine 1 at init_weights_update_group")
        job.harvest(job.engines[1].rank)
        job.connect()
    else:
        job.connect()
        job.plant(job.engines[1].rank, "engine_error", engine=1, method=method, nth=nth)
        _one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), f"injected: engine 1 at {method}")
        job.harvest(job.engines[1].rank)
        states = job.on_receivers("state")
        assert [state["weight_version"] for state in states] == ["default", "default"], "an incomplete version was published"
        assert all(state["paused"] != (method == "pause_generation") for state in states)
    job.load(checkpoints("qwen3", 1))
    assert exact(job.update()).version == 1


@pytest.mark.parametrize("nth", [0, 2])
def test_a_source_that_raises_is_heard_on_every_rank_and_the_next_update_is_exact(
        topology: Topology, nth: int, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    # One tensor parallel rank gathers nothing; its source fails as it announces a bucket.
    event = "rpc" if topology.tp == 1 else "gather"
    source, stage = topology.tp * (topology.pp - 1), topology.pp - 1
    job = start_job(checkpoints("qwen3", 0), args=SMALL, scenario=f"after the last source raised in {event} {nth}")
    job.connect()
    job.plant(source, "fail_at", rank=source, event=event, stage=stage, nth=nth)
    _one_cause(job.failures("update", Deadline.after(AT_ONCE_S)), f"injected: rank {source} at {event}")
    job.harvest(source)
    job.load(checkpoints("qwen3", 1))
    assert exact(job.update()).version == 1


@pytest.mark.needs(pp=2)  # somebody must be left to say so
def test_a_source_that_is_killed_in_the_middle_of_a_bucket_is_named_by_all_others(
        topology: Topology, checkpoints: Callable[..., str], start_job: Job) -> None:
    source, stage = topology.tp * (topology.pp - 1), topology.pp - 1
    job = start_job(checkpoints("qwen3"), args=SMALL | SHORT)
    job.connect()
    job.plant(source, "rank_dies", rank=source, event="send", stage=stage, nth=2)
    problems = job.survivors(Deadline.after(IN_TIME_S), dead=source)
    assert all(f"trainer ranks [{source}] did not come" in problem.text for problem in problems), [p.text for p in problems]
    for state in job.on_receivers("state"):
        assert (state["weight_version"], state["paused"]) == ("default", True), "no engine may serve a mixture"


def _one_cause(problems: list[Problem], cause: str) -> None:
    """Every trainer rank raises `UpdateFailed` with one and the same text, and the text has the cause."""
    assert {problem.kind for problem in problems} == {"UpdateFailed"}, [problem.line() for problem in problems]
    texts = {problem.text for problem in problems}
    assert len(texts) == 1, f"ranks disagree on what happened: {texts}"
    assert cause in texts.pop(), problems[0].text
