"""Whole call sequences of every rank with one pipeline stage: vime's single-source path, plus the one publish.

Two dense tensors in one bucket, one expert tensor in another, one engine of one worker. The stories are literals: they are
what design.md section 3 says, not what plan.py computes.
"""

from __future__ import annotations

from harness.recording.job import RecordingJob
from harness.recording.log import actor_calls, assert_story, calls
from harness.recording.model import small_table

LEAD_CONNECTS = [
    "barrier control group 0",
    "barrier connect",
    "rpc get_weight_transfer_info engine0",
    "barrier connect checked",
    "state stage=0 group_name=vime-pp_0",
    "listen vime-pp_0 stage=0 10.0.0.1:20000",
    "rpc vime-pp_0 stage=0 init_weights_update_group engine0",
    "open vime-pp_0 stage=0 world_size=2",
    "barrier connected",
]

PEER_CONNECTS = [
    "barrier control group 0",
    "barrier connect",
    "barrier connect checked",
    "barrier connected",
]


def job(**layout: int) -> RecordingJob:
    return RecordingJob(table=small_table(1, dense=2, expert=1), **layout)


def test_tp1_pp1_is_vimes_single_source_path_plus_the_publish() -> None:
    with job() as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        assert_story(calls(update.events, 0), [
            "rpc pause_generation engine0",
            "rpc flush_cache engine0",
            "barrier paused",
            "rpc start_weight_update engine0",
            "barrier started",
            "rpc vime-pp_0 stage=0 bucket=0 acquire lock",
            "rpc vime-pp_0 stage=0 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_0 stage=0 bucket=0 hf.s0.dense0 hf.s0.dense1",
            "rpc vime-pp_0 stage=0 bucket=0 release lock",
            "barrier stage=0 stage 0 dense",
            "rpc vime-pp_0 stage=0 bucket=1 acquire lock",
            "rpc vime-pp_0 stage=0 bucket=1 update_weights_from_distributed engine0",
            "send vime-pp_0 stage=0 bucket=1 hf.s0.expert0",
            "rpc vime-pp_0 stage=0 bucket=1 release lock",
            "barrier stage=0 stage 0 expert",
            "synchronize vime-pp_0 stage=0",
            "rpc finish_weight_update engine0",
            "barrier finished",
            "rpc update_weight_version engine0",  # ours: vime sends the version with every bucket
            "barrier published",
            "rpc continue_generation engine0",
            "barrier resumed",
        ])
        assert_story(actor_calls(connect.events + update.events, "engine0"), [
            "handle get_weight_transfer_info",
            "handle init_weights_update_group",
            "handle pause_generation",
            "handle flush_cache",
            "handle start_weight_update",
            "handle update_weights_from_distributed",
            "handle update_weights_from_distributed",
            "handle finish_weight_update",
            "handle update_weight_version",
            "handle continue_generation",
            "generate version 1",
        ])
        assert_story(actor_calls(connect.events + update.events, "engine0/worker0"), [
            "join vime-pp_0 rank 1 of 2",
            "receive vime-pp_0 bucket=0 hf.s0.dense0 hf.s0.dense1",
            "receive vime-pp_0 bucket=1 hf.s0.expert0",
        ])
        assert run.differences() == []


def test_tp2_pp1_the_peer_gathers_and_meets_and_does_nothing_else() -> None:
    with job(tp=2) as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        assert_story(calls(connect.events, 1), PEER_CONNECTS)
        assert_story(calls(update.events, 0), [
            "rpc pause_generation engine0",
            "rpc flush_cache engine0",
            "barrier paused",
            "rpc start_weight_update engine0",
            "barrier started",
            "gather tp stage=0 s0.dense0",
            "gather tp stage=0 s0.dense1",
            "rpc vime-pp_0 stage=0 bucket=0 acquire lock",
            "rpc vime-pp_0 stage=0 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_0 stage=0 bucket=0 hf.s0.dense0 hf.s0.dense1",
            "rpc vime-pp_0 stage=0 bucket=0 release lock",
            "barrier stage=0 stage 0 dense",
            "gather etp stage=0 s0.expert0",
            "rpc vime-pp_0 stage=0 bucket=1 acquire lock",
            "rpc vime-pp_0 stage=0 bucket=1 update_weights_from_distributed engine0",
            "send vime-pp_0 stage=0 bucket=1 hf.s0.expert0",
            "rpc vime-pp_0 stage=0 bucket=1 release lock",
            "barrier stage=0 stage 0 expert",
            "synchronize vime-pp_0 stage=0",
            "rpc finish_weight_update engine0",
            "barrier finished",
            "rpc update_weight_version engine0",
            "barrier published",
            "rpc continue_generation engine0",
            "barrier resumed",
        ])
        assert_story(calls(update.events, 1), [
            "barrier paused",
            "barrier started",
            "gather tp stage=0 s0.dense0",
            "gather tp stage=0 s0.dense1",
            "barrier stage=0 stage 0 dense",
            "gather etp stage=0 s0.expert0",
            "barrier stage=0 stage 0 expert",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert run.differences() == []


def test_the_persistent_group_serves_the_next_update_too() -> None:
    with job() as run:
        run.connect().check()
        first = run.update().check()
        run.step = 2
        second = run.update().check()
        assert_story(calls(second.events, 0), calls(first.events, 0))
        assert [channel.name for channel in run.world.network.channels] == ["vime-pp_0"]
        assert run.world.network.live() == run.world.network.channels
        assert run.differences() == []
        assert [engine.version for engine in run.world.engines] == ["2"]
