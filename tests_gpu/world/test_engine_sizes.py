"""Engines of several workers (tensor parallel, each worker in a process of its own): every worker is a receiver, and engine i
starts at rank 1 + sum(counts[:i]) of the transfer group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.pool import WorldPool
from harness.world.wire import Topology
from tests_gpu.conftest import on_device

pytestmark = [pytest.mark.own_world, pytest.mark.nccl_timeout(120)]

Exact = Callable[[SyncReport], SyncReport]

SIZES = (2, 1)
"""The larger one first: a rank counted in engines instead of workers would be the second worker's."""

AT_ONCE_S = 20.0


@pytest.fixture
def topology_of_sizes(request: pytest.FixtureRequest) -> Topology:
    return on_device(request.config, Topology(pp=2, engines=2, workers=SIZES))


def test_engines_of_two_workers_and_of_one(worlds: WorldPool, topology_of_sizes: Topology, own_deadline: Deadline,
                                           checkpoints: Callable[..., str], exact: Exact) -> None:
    steps = [checkpoints("qwen3", step) for step in (0, 1)]
    job = SyncJob(worlds.get(topology_of_sizes), steps[0], own_deadline, scenario="engines of 2 workers and of 1",
                  args={"update_weight_buffer_size": 1 << 18})
    wrong = job.failures("connect", Deadline.after(AT_ONCE_S), counts=[1, 1])
    assert {problem.kind for problem in wrong} == {"ConfigurationError"}
    assert all("engine 0" in problem.text and "2" in problem.text for problem in wrong), wrong[0].text
    job.connect()
    for step in steps:
        job.load(step)
        report = exact(job.update())
        assert report.stages == ["vime-pp_0", "vime-pp_1"]
        assert [engine.workers for engine in report.engines] == list(SIZES)
        assert [engine.tensors_total for engine in report.engines] == [2 * 58, 58]
        assert report.engines[0].bytes == 2 * report.bytes


def test_one_of_two_workers_that_dies_in_a_bucket_takes_its_engine_and_nobody_else(
        worlds: WorldPool, topology_of_sizes: Topology, own_deadline: Deadline, checkpoints: Callable[..., str],
        exact: Exact) -> None:
    job = SyncJob(worlds.get(topology_of_sizes), checkpoints("qwen3"), own_deadline, scenario="after a worker died",
                  args={"update_weight_buffer_size": 1 << 16})
    job.connect()
    job.world.clean = False
    large, small = job.engines
    job.world.run("harness.world.receiver:kill_worker", on=[large.rank], deadline=own_deadline, worker=1, broadcast=3)
    problems = job.failures("update", Deadline.after(AT_ONCE_S))
    assert {problem.kind for problem in problems} == {"UpdateFailed"}
    assert len({problem.text for problem in problems}) == 1 and "rollout engine 0" in problems[0].text, problems[0].text
    job.choose([small])
    (state,) = job.on_receivers("state")
    assert (state["paused"], state["session_open"], state["weight_version"]) == (True, False, "default"), state
    job.connect()
    exact(job.update())
