"""Whole call sequences of every rank with two pipeline stages: one stage at a time inside one session.

Two dense tensors in one bucket, one expert tensor in another per stage, one engine of one worker. The stories are literals:
they are what design.md section 3 says, not what plan.py computes.
"""

from __future__ import annotations

from typing import Any

from harness.recording.exporter import StubExporter, UntouchableEngine, UntouchableExporter
from harness.recording.job import RecordingJob
from harness.recording.log import actor_calls, assert_story, calls
from harness.recording.model import small_table
from harness.recording.world import RankContext
from staged_sync.exporter import Exporter

LEAD_CONNECTS = [
    "barrier control group 0",
    "barrier connect",
    "rpc get_weight_transfer_info engine0",
    "barrier connect checked",
    "barrier connected",
]

OTHERS_CONNECT = [
    "barrier control group 0",
    "barrier connect",
    "barrier connect checked",
    "barrier connected",
]

INACTIVE = [
    "barrier paused",
    "barrier started",
    "barrier stage=0 stage 0 open",
    "barrier stage=0 stage 0 dense",
    "barrier stage=0 stage 0 expert",
    "barrier stage=0 stage 0 closed",
    "barrier stage=1 stage 1 open",
    "barrier stage=1 stage 1 dense",
    "barrier stage=1 stage 1 expert",
    "barrier stage=1 stage 1 closed",
    "barrier finished",
    "barrier published",
    "barrier resumed",
]


def test_tp1_pp2_each_source_opens_sends_and_closes_in_its_turn() -> None:
    with RecordingJob(table=small_table(2, dense=2, expert=1), pp=2) as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        assert_story(calls(connect.events, 1), OTHERS_CONNECT)
        assert_story(calls(update.events, 0), [
            "rpc pause_generation engine0",
            "rpc flush_cache engine0",
            "barrier paused",
            "rpc start_weight_update engine0",
            "barrier started",
            "state stage=0 group_name=vime-pp_0",
            "listen vime-pp_0 stage=0 10.0.0.1:20000",
            "rpc vime-pp_0 stage=0 init_weights_update_group engine0",
            "open vime-pp_0 stage=0 world_size=2",
            "barrier stage=0 stage 0 open",
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
            "close vime-pp_0 stage=0",
            "state stage=0 group_name=None",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 dense",
            "barrier stage=1 stage 1 expert",
            "barrier stage=1 stage 1 closed",
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
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 dense",
            "barrier stage=0 stage 0 expert",
            "barrier stage=0 stage 0 closed",
            "state stage=1 group_name=vime-pp_1",
            "listen vime-pp_1 stage=1 10.0.0.1:20001",
            "rpc vime-pp_1 stage=1 init_weights_update_group engine0",
            "open vime-pp_1 stage=1 world_size=2",
            "barrier stage=1 stage 1 open",
            "rpc vime-pp_1 stage=1 bucket=0 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=0 hf.s1.dense0 hf.s1.dense1",
            "rpc vime-pp_1 stage=1 bucket=0 release lock",
            "barrier stage=1 stage 1 dense",
            "rpc vime-pp_1 stage=1 bucket=1 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=1 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=1 hf.s1.expert0",
            "rpc vime-pp_1 stage=1 bucket=1 release lock",
            "barrier stage=1 stage 1 expert",
            "synchronize vime-pp_1 stage=1",
            "close vime-pp_1 stage=1",
            "state stage=1 group_name=None",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert_story(actor_calls(update.events, "engine0"), [
            "handle pause_generation",
            "handle flush_cache",
            "handle start_weight_update",
            "handle init_weights_update_group",
            "handle update_weights_from_distributed",
            "handle update_weights_from_distributed",
            "handle init_weights_update_group",
            "handle update_weights_from_distributed",
            "handle update_weights_from_distributed",
            "handle finish_weight_update",
            "handle update_weight_version",
            "handle continue_generation",
            "generate version 1",
        ])
        assert_story(actor_calls(update.events, "engine0/worker0"), [
            "join vime-pp_0 rank 1 of 2",
            "receive vime-pp_0 bucket=0 hf.s0.dense0 hf.s0.dense1",
            "receive vime-pp_0 bucket=1 hf.s0.expert0",
            "join vime-pp_1 rank 1 of 2",
            "replace vime-pp_0 closed",
            "receive vime-pp_1 bucket=0 hf.s1.dense0 hf.s1.dense1",
            "receive vime-pp_1 bucket=1 hf.s1.expert0",
        ])
        assert run.differences() == []


def exporter(context: RankContext, run: RecordingJob) -> Exporter:
    """Ranks that are inactive all through get an exporter that must not be touched."""
    if context.rank in (2, 3, 6, 7):
        return UntouchableExporter()
    return StubExporter(context.seam, context.trace, run.table, step=lambda: run.step)


def handles(context: RankContext, engines: list[Any]) -> list[Any]:
    """Only the two sources may talk to engines."""
    return engines if context.rank in (0, 4) else [UntouchableEngine() for _ in engines]


def test_tp2_pp2_dp2_gather_peers_gather_and_inactive_ranks_only_meet() -> None:
    """Ranks 0, 4: sources. 1, 5: their TP peers. 2, 3, 6, 7: the second data-parallel replica, needed by nobody."""
    with RecordingJob(table=small_table(2, dense=2, expert=1), tp=2, pp=2, dp=2, make_exporter=exporter,
                      engine_handles=handles) as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        for rank in (1, 2, 3, 4, 5, 6, 7):
            assert_story(calls(connect.events, rank), OTHERS_CONNECT)
        assert_story(calls(update.events, 0), [
            "rpc pause_generation engine0",
            "rpc flush_cache engine0",
            "barrier paused",
            "rpc start_weight_update engine0",
            "barrier started",
            "state stage=0 group_name=vime-pp_0",
            "listen vime-pp_0 stage=0 10.0.0.1:20000",
            "rpc vime-pp_0 stage=0 init_weights_update_group engine0",
            "open vime-pp_0 stage=0 world_size=2",
            "barrier stage=0 stage 0 open",
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
            "close vime-pp_0 stage=0",
            "state stage=0 group_name=None",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 dense",
            "barrier stage=1 stage 1 expert",
            "barrier stage=1 stage 1 closed",
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
            "barrier stage=0 stage 0 open",
            "gather tp stage=0 s0.dense0",
            "gather tp stage=0 s0.dense1",
            "barrier stage=0 stage 0 dense",
            "gather etp stage=0 s0.expert0",
            "barrier stage=0 stage 0 expert",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 dense",
            "barrier stage=1 stage 1 expert",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert_story(calls(update.events, 4), [
            "barrier paused",
            "barrier started",
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 dense",
            "barrier stage=0 stage 0 expert",
            "barrier stage=0 stage 0 closed",
            "state stage=1 group_name=vime-pp_1",
            "listen vime-pp_1 stage=1 10.0.0.1:20001",
            "rpc vime-pp_1 stage=1 init_weights_update_group engine0",
            "open vime-pp_1 stage=1 world_size=2",
            "barrier stage=1 stage 1 open",
            "gather tp stage=1 s1.dense0",
            "gather tp stage=1 s1.dense1",
            "rpc vime-pp_1 stage=1 bucket=0 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=0 hf.s1.dense0 hf.s1.dense1",
            "rpc vime-pp_1 stage=1 bucket=0 release lock",
            "barrier stage=1 stage 1 dense",
            "gather etp stage=1 s1.expert0",
            "rpc vime-pp_1 stage=1 bucket=1 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=1 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=1 hf.s1.expert0",
            "rpc vime-pp_1 stage=1 bucket=1 release lock",
            "barrier stage=1 stage 1 expert",
            "synchronize vime-pp_1 stage=1",
            "close vime-pp_1 stage=1",
            "state stage=1 group_name=None",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert_story(calls(update.events, 5), [
            "barrier paused",
            "barrier started",
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 dense",
            "barrier stage=0 stage 0 expert",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "gather tp stage=1 s1.dense0",
            "gather tp stage=1 s1.dense1",
            "barrier stage=1 stage 1 dense",
            "gather etp stage=1 s1.expert0",
            "barrier stage=1 stage 1 expert",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        for rank in (2, 3, 6, 7):
            assert_story(calls(update.events, rank), INACTIVE)
        assert run.differences() == []


def test_expert_parallel_peers_join_the_expert_pass_only() -> None:
    """tp1 dp2 ep2: rank 1 is another data-parallel replica for dense weights, and holds the other half of the experts."""
    with RecordingJob(table=small_table(2, dense=1, expert=1), dp=2, ep=2, pp=2) as run:
        run.connect().check()
        update = run.update().check()
        assert_story(calls(update.events, 1), [
            "barrier paused",
            "barrier started",
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 dense",
            "gather ep stage=0 s0.expert0",
            "barrier stage=0 stage 0 expert",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 dense",
            "barrier stage=1 stage 1 expert",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert run.differences() == []
