"""Bridge export from real Megatron models through the real Megatron-Bridge and mbridge into real engines.

All stages iterate, the source of stage 0 sends everything over the group that it opened at connect. On CPUs the bridges run with
harness/bridge_cpu.py and models of harness/megatron_te.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.wire import Topology

Job = Callable[..., SyncJob]
Exact = Callable[[SyncReport], SyncReport]
ThreeUpdates = Callable[..., tuple[SyncJob, list[SyncReport]]]

pytestmark = [pytest.mark.bridge, pytest.mark.nccl_timeout(150)]

TE: dict[str, Any] = {"names": "te"}
BRIDGES = ("megatron-bridge", "mbridge")
SOME = 1 << 18
LONG = {"update_weight_call_timeout": 40.0, "update_weight_phase_timeout": 60.0, "update_weight_timeout": 100.0}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("export", BRIDGES)
def test_three_updates_with_changed_weights_are_exact_on_two_engines(
        topology: Topology, export: str, tied: bool, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """58 tensors, 57 if tied (where mbridge yields the embedding once per stage that holds it): each arrives once."""
    steps = [checkpoints("qwen3", step, tied=tied) for step in (0, 1, 2)]
    job = start_job(steps[0], args={"update_weight_buffer_size": SOME} | LONG, build=TE, export=export,
                    scenario=f"{export}{' tied' * tied}")
    job.connect()
    for version, step in enumerate(steps, start=1):
        job.load(step)
        report = exact(job.update())
        assert report.version == version
        assert [engine.tensors_total for engine in report.engines] == [57 if tied else 58] * 2
        assert report.stages == ["vime-pp_0"]
        assert {event["rank"] for event in job.story("send")} == {0}, "only the source of stage 0 sends"
        assert job.story("open", "close", "listen") == [], "the group of connect is kept"
        iterated = [[event["detail"] for event in rank["events"] if event["event"] == "gather"] for rank in job.updates[-1]]
        assert all(one == iterated[0] for one in iterated) and len(iterated[0]) >= 58, "every rank iterates all of it"
        assert report.buckets > 2


@pytest.mark.parametrize("export", BRIDGES)
def test_raw_and_bridge_export_are_the_same_bytes(topology: Topology, export: str, checkpoints: Callable[..., str],
                                                  start_job: Job, exact: Exact) -> None:
    """One model by Transformer Engine's names, exported by our own converters and by the bridge: both are the checkpoint's
    tensors, each once, to the last bit. Other weights in between, so that neither lives on what the other one sent."""
    job = start_job(checkpoints("qwen3"), args=LONG, build=TE, scenario="raw, Transformer Engine's names")
    job.connect()
    raw = exact(job.update())
    for step, name in ((1, export), (0, f"{export}, the weights that raw sent")):
        job.reconfigure(checkpoints("qwen3", step), args=LONG, scenario=name, build=TE, export=export)
        job.connect()
        bridged = exact(job.update())
    assert [e.tensors_equal for e in bridged.engines] == [e.tensors_equal for e in raw.engines] == [58, 58]
    assert bridged.bytes == raw.bytes


def test_a_weights_getter_is_asked_instead_of_the_model(checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """As in vime: the tensors to send are kept elsewhere. The model's own are NaN."""
    job = start_job(checkpoints("qwen3"), args=LONG, build=TE, export="weights_getter")
    job.connect()
    for step in (0, 1):
        job.load(checkpoints("qwen3", step))
        exact(job.update())


@pytest.mark.parametrize("export", BRIDGES)
def test_an_engine_that_fails_in_a_bucket_fails_every_rank_and_the_next_update_is_exact(
        export: str, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """Ranks that only iterate learn of it before the next bucket, so it takes no deadline; the source opens a new group."""
    job = start_job(checkpoints("qwen3", 0), args={"update_weight_buffer_size": SOME} | LONG, build=TE, export=export)
    job.connect()
    exact(job.update())
    job.plant(job.engines[1].rank, "engine_error", engine=1, method="update_weights_from_distributed", nth=1)
    errors = job.failures("update", Deadline.after(20.0))
    job.harvest(job.engines[1].rank)
    assert {error.kind for error in errors} == {"UpdateFailed"} and len({error.text for error in errors}) == 1
    assert "rollout engine 1 failed in update_weights_from_distributed" in errors[0].text
    for state in job.on_receivers("state"):
        assert (state["paused"], state["session_open"], state["weight_version"]) == (True, False, "1"), state
    job.load(checkpoints("qwen3", 1))
    assert exact(job.update()).version == 2


@pytest.mark.needs(pp=2)
def test_a_real_collective_declared_stage_local_is_told_by_its_name(checkpoints: Callable[..., str], start_job: Job) -> None:
    """Stage 0 waits inside mbridge for the others, which wait for it in a barrier and give up first. Stage 0 ends with the
    time-out of the trainer's own groups, which is all that bounds a collective inside a bridge (30 s here)."""
    short = {"update_weight_call_timeout": 3.0, "update_weight_phase_timeout": 6.0, "update_weight_timeout": 20.0}
    job = start_job(checkpoints("qwen3"), args=short, build=TE, export="mbridge declared stage_local")
    job.world.clean = False  # Megatron's pipeline group is lost
    job.connect()
    run = job.world.start("harness.world.trainer:update", on=job.world.trainer_ranks)
    outcomes = run.wait(Deadline.after(90.0), error_grace_s=90.0)
    errors = [outcome.problem for outcome in outcomes.values() if outcome.problem is not None]
    assert [error.kind for error in errors] == ["UpdateFailed"] * len(job.world.trainer_ranks)
    assert all("exporter declared stage_local but behaves as pipeline-collective" in error.text for error in errors), errors


@pytest.mark.own_world
@pytest.mark.parametrize("export", BRIDGES)
def test_experts_over_expert_parallel_ranks(three_updates: ThreeUpdates, export: str) -> None:
    _, reports = three_updates({"pp": 2, "dp": 2, "ep": 2}, "qwen3_moe", num_layers=4, build=TE, args=LONG, export=export)
    assert [report.stages for report in reports] == [["vime-pp_0"]] * 3


@pytest.mark.own_world
@pytest.mark.parametrize("export", BRIDGES)
def test_virtual_chunks(three_updates: ThreeUpdates, export: str) -> None:
    _, reports = three_updates({"pp": 2, "vpp": 2}, "qwen3", num_layers=4, args=LONG, export=export,
                               build=TE | {"layers": [[[0], [2]], [[1], [3]]]})
    assert [report.stages for report in reports] == [["vime-pp_0"]] * 3
