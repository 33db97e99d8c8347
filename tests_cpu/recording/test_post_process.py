"""Quantised engines that keep weights in a layout of their own: vime's calls around the session, and only around it."""

from __future__ import annotations

from dataclasses import replace

from harness.faults import Faults
from harness.recording.engines import EngineOptions
from harness.recording.log import assert_story, calls
from staged_sync.errors import UpdateFailed
from tests_cpu.recording.failing import failing_job

PACKED = {"quant_method": "compressed-tensors"}


def test_engines_restore_before_the_session_and_quantise_after_it() -> None:
    engines = [EngineOptions(post_processes=True), EngineOptions()]  # the second one does so by itself, as vLLM >= 0.29
    with failing_job(Faults(), pp=2, engines=engines, expert=0, quantization_config=PACKED) as job:
        job.connect().check()
        update = job.update().check()
        assert job.differences() == []
    lead = [line for line in calls(update.events, rank=0) if not line.startswith(("rpc vime-pp", "send", "state", "listen"))]
    assert_story(lead, [
        "rpc pause_generation engine0", "rpc pause_generation engine1",
        "rpc flush_cache engine0", "rpc flush_cache engine1",
        "barrier paused",
        "rpc post_process_weights engine0",
        "rpc start_weight_update engine0", "rpc start_weight_update engine1",
        "barrier started",
        "open vime-pp_0 stage=0 world_size=3", "barrier stage=0 stage 0 open",
        "barrier stage=0 stage 0 dense", "barrier stage=0 stage 0 expert",
        "synchronize vime-pp_0 stage=0", "close vime-pp_0 stage=0", "barrier stage=0 stage 0 closed",
        "barrier stage=1 stage 1 open", "barrier stage=1 stage 1 dense", "barrier stage=1 stage 1 expert",
        "barrier stage=1 stage 1 closed",
        "rpc finish_weight_update engine0", "rpc finish_weight_update engine1",
        "barrier finished",
        "rpc post_process_weights engine0",
        "rpc update_weight_version engine0", "rpc update_weight_version engine1",
        "barrier published",
        "rpc continue_generation engine0", "rpc continue_generation engine1",
        "barrier resumed",
    ])


def test_a_restore_that_fails_has_touched_the_weights() -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[EngineOptions(post_processes=True)], quantization_config=PACKED) as job:
        job.connect().check()
        faults.engine_error(engine=0, method="post_process_weights")
        errors = job.update().errors
        assert {error.state for error in errors.values() if isinstance(error, UpdateFailed)} == {"poisoned"} and len(errors) == 2
        assert job.world.engines[0].paused
        job.update().check()
        assert job.differences() == []


def test_a_quantisation_that_fails_publishes_nothing() -> None:
    faults = Faults()
    with failing_job(faults, pp=2, engines=[EngineOptions(post_processes=True)], quantization_config=PACKED) as job:
        job.connect().check()
        faults.engine_error(engine=0, method="post_process_weights", nth=1)
        errors = job.update().errors
        assert all("rollout engine 0 failed in post_process_weights" in str(error) for error in errors.values()) and errors
        assert job.world.engines[0].paused and job.world.engines[0].version is None


def test_ranks_that_disagree_on_post_processing_are_refused() -> None:
    with failing_job(Faults(), pp=2, quantization_config=PACKED) as job:
        updater = job.updaters[1]
        updater._rank = replace(updater._rank, settings=replace(updater._rank.settings, post_process=False))
        errors = job.connect().errors
    assert len(errors) == 2 and all("the wire must be the same on every rank" in str(error) for error in errors.values())
