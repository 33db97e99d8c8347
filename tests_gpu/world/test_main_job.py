"""The main job: a real Megatron world syncs, stage by stage, into real engines that knew config.json only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.world.job import SyncJob, SyncReport
from harness.world.wire import Topology

Job = Callable[..., SyncJob]
Exact = Callable[[SyncReport], SyncReport]

STAGES = {1: ["vime-pp_0"], 2: ["vime-pp_0", "vime-pp_1"]}

TURNS = {
    (1, 1): [],
    (2, 1): [],
    (1, 2): [("open", "vime-pp_0", 0), ("close.done", "vime-pp_0", 0),
             ("open", "vime-pp_1", 1), ("close.done", "vime-pp_1", 1)],
    (2, 2): [("open", "vime-pp_0", 0), ("close.done", "vime-pp_0", 0),
             ("open", "vime-pp_1", 2), ("close.done", "vime-pp_1", 2)],
}
"""Who opens and closes a transfer group in an update, and in which order: the source of stage 1 after that of stage 0."""

SOME = 1 << 18


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_three_updates_with_changed_weights_are_exact_on_two_engines(
        topology: Topology, family: str, tied: bool, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    steps = [checkpoints(family, step, tied=tied) for step in (0, 1, 2)]
    job = start_job(steps[0], args={"update_weight_buffer_size": SOME}, scenario=f"{family}{' tied' * tied}")
    said = [job.generate()]
    job.connect()
    versions = []
    for step in steps:
        job.load(step)
        report = exact(job.update())
        versions.append(report.version)
        assert [engine.version for engine in report.engines] == [str(report.version)] * 2
        assert report.stages == STAGES[topology.pp]
        turns = [(event["event"], event["group"], event["rank"]) for event in job.story("open", "close.done")]
        assert turns == TURNS[topology.tp, topology.pp]
        said.append(job.generate())
    assert versions == [1, 2, 3]
    for engine in (0, 1):
        answers = [answer[engine]["tokens"] for answer in said]
        assert all(one != other for i, one in enumerate(answers) for other in answers[:i]), (
            f"engine {engine} said the same before and after an update with other weights: {answers}")


def test_one_engine(topology: Topology, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    job = start_job(checkpoints("qwen3"), engines=1)
    job.connect(counts=[1])
    report = exact(job.update())
    assert len(report.engines) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_bucket_sizes_give_the_same_engine(topology: Topology, packed: bool, checkpoints: Callable[..., str], start_job: Job,
                                           exact: Exact) -> None:
    """One tensor (or what Megatron fuses of several), some, and all that a stage has in one bucket. Every bucket size gets
    other weights, so that an engine cannot pass with what the one before has left."""
    buckets = {}
    job = start_job(checkpoints("qwen3"))
    for step, (name, limit) in enumerate({"one": 1, "some": SOME, "all": 1 << 30}.items()):
        job.reconfigure(checkpoints("qwen3", step), scenario=f"{'packed' if packed else 'unpacked'}, {name} per bucket",
                        args={"update_weight_buffer_size": limit, "vllm_weight_sync_packed": packed,
                              "update_weight_packed_buffer_size": SOME})
        job.connect()
        buckets[name] = exact(job.update()).buckets
    # 5 layers of 8 parameters (two norms, qkv, q norm, k norm, proj, fc1, fc2), embedding, final norm, output layer
    assert buckets["one"] == 5 * 8 + 3
    assert buckets["all"] == topology.pp
    assert topology.pp < buckets["some"] < 5 * 8 + 3


def test_engines_can_be_exchanged_between_updates(topology: Topology, checkpoints: Callable[..., str], start_job: Job,
                                                  exact: Exact) -> None:
    """One engine, the other one, both: identity counts, not the number of engines."""
    job = start_job(checkpoints("qwen3"))
    both = job.engines
    for step, engines in enumerate([both[:1], both[1:], both]):
        job.load(checkpoints("qwen3", step))
        job.choose(engines)
        job.connect()
        exact(job.update())
