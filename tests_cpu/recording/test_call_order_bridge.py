"""Whole call sequences of every rank with bridge export, under both contracts.

Two tensors per stage and a bucket for each, or one bucket for all; one engine of one worker. The stories are literals: they are
what design.md section 3 says, not what plan.py computes. The stub bridge yields views of one buffer that it overwrites.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.recording.bridge import bridge
from harness.recording.exporter import UntouchableEngine
from harness.recording.job import RecordingJob
from harness.recording.log import actor_calls, assert_story, calls
from harness.recording.model import small_table
from harness.recording.world import RankContext
from staged_sync.exporter import Contract
from tests_cpu.recording.failing import assert_none

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

OTHERS_CONNECT = [
    "barrier control group 0",
    "barrier connect",
    "barrier connect checked",
    "barrier connected",
]

COLLECTIVE_LEAD = [
    "rpc pause_generation engine0",
    "rpc flush_cache engine0",
    "barrier paused",
    "rpc start_weight_update engine0",
    "barrier started",
    "gather export stage=0 item 0",
    "gather export stage=0 item 1",
    "rpc vime-pp_0 stage=0 bucket=0 acquire lock",
    "rpc vime-pp_0 stage=0 bucket=0 update_weights_from_distributed engine0",
    "send vime-pp_0 stage=0 bucket=0 hf.s0.dense0",
    "rpc vime-pp_0 stage=0 bucket=0 release lock",
    "gather export stage=0 item 2",
    "rpc vime-pp_0 stage=0 bucket=1 acquire lock",
    "rpc vime-pp_0 stage=0 bucket=1 update_weights_from_distributed engine0",
    "send vime-pp_0 stage=0 bucket=1 hf.s0.dense1",
    "rpc vime-pp_0 stage=0 bucket=1 release lock",
    "gather export stage=0 item 3",
    "rpc vime-pp_0 stage=0 bucket=2 acquire lock",
    "rpc vime-pp_0 stage=0 bucket=2 update_weights_from_distributed engine0",
    "send vime-pp_0 stage=0 bucket=2 hf.s1.dense0",
    "rpc vime-pp_0 stage=0 bucket=2 release lock",
    "gather export stage=0 item 4",
    "rpc vime-pp_0 stage=0 bucket=3 acquire lock",
    "rpc vime-pp_0 stage=0 bucket=3 update_weights_from_distributed engine0",
    "send vime-pp_0 stage=0 bucket=3 hf.s1.dense1",
    "rpc vime-pp_0 stage=0 bucket=3 release lock",
    "barrier stage=0 model exported",
    "synchronize vime-pp_0 stage=0",
    "rpc finish_weight_update engine0",
    "barrier finished",
    "rpc update_weight_version engine0",
    "barrier published",
    "rpc continue_generation engine0",
    "barrier resumed",
]

COLLECTIVE_PEER = [
    "barrier paused",
    "barrier started",
    "gather export stage=0 item 0",
    "gather export stage=0 item 1",
    "gather export stage=0 item 2",
    "gather export stage=0 item 3",
    "gather export stage=0 item 4",
    "barrier stage=0 model exported",
    "barrier finished",
    "barrier published",
    "barrier resumed",
]


def only_the_lead(context: RankContext, engines: list[Any]) -> list[Any]:
    return engines if context.rank == 0 else [UntouchableEngine() for _ in engines]


def test_pipeline_collective_all_ranks_iterate_once_and_stage_0_sends() -> None:
    with RecordingJob(table=small_table(2, dense=2), pp=2, args={"update_weight_buffer_size": 70}, engine_handles=only_the_lead,
                      make_exporter=bridge("pipeline_collective")) as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        assert_story(calls(connect.events, 1), OTHERS_CONNECT)
        assert_story(calls(update.events, 0), COLLECTIVE_LEAD)
        assert_story(calls(update.events, 1), COLLECTIVE_PEER)
        assert_story(actor_calls(update.events, "engine0/worker0"), [
            "receive vime-pp_0 bucket=0 hf.s0.dense0",
            "receive vime-pp_0 bucket=1 hf.s0.dense1",
            "receive vime-pp_0 bucket=2 hf.s1.dense0",
            "receive vime-pp_0 bucket=3 hf.s1.dense1",
        ])
        assert run.differences() == []


def test_pipeline_collective_tp2_pp2_dp2_replicas_iterate_too() -> None:
    with RecordingJob(table=small_table(2, dense=2), tp=2, pp=2, dp=2, args={"update_weight_buffer_size": 70},
                      engine_handles=only_the_lead, make_exporter=bridge("pipeline_collective")) as run:
        run.connect().check()
        update = run.update().check()
        assert_story(calls(update.events, 0), COLLECTIVE_LEAD)
        for rank in (1, 2, 3, 4, 5, 6, 7):
            assert_story(calls(update.events, rank), COLLECTIVE_PEER)
        assert run.differences() == []


def test_pipeline_collective_three_updates_keep_one_group() -> None:
    with RecordingJob(table=small_table(2, dense=2), pp=2, make_exporter=bridge("pipeline_collective")) as run:
        run.connect().check()
        for run.step in (1, 2, 3):
            run.update().check()
            assert_none(run.differences())
        assert [channel.live for channel in run.world.network.channels] == [True]
        run.connect().check()  # the same engines: the group is kept
        assert [channel.live for channel in run.world.network.channels] == [True]


def test_stage_local_stages_take_turns_and_inactive_ones_join_one_barrier_and_do_not_export() -> None:
    """tp2·pp2: ranks 0 and 2 are sources, 1 and 3 iterate with them; between open and close there is one barrier a stage."""
    def sources(context: RankContext, engines: list[Any]) -> list[Any]:
        return engines if context.rank in (0, 2) else [UntouchableEngine() for _ in engines]

    with RecordingJob(table=small_table(2, dense=2), tp=2, pp=2, engine_handles=sources,
                      make_exporter=bridge("stage_local", ("tp",))) as run:
        connect, update = run.connect().check(), run.update().check()
        for rank in (1, 2, 3):
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
            "gather export stage=0 item 0",
            "gather export stage=0 item 1",
            "gather export stage=0 item 2",
            "rpc vime-pp_0 stage=0 bucket=0 acquire lock",
            "rpc vime-pp_0 stage=0 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_0 stage=0 bucket=0 hf.s0.dense0 hf.s0.dense1",
            "rpc vime-pp_0 stage=0 bucket=0 release lock",
            "barrier stage=0 stage 0 exported",
            "synchronize vime-pp_0 stage=0",
            "close vime-pp_0 stage=0",
            "state stage=0 group_name=None",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 exported",
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
            "gather export stage=0 item 0",
            "gather export stage=0 item 1",
            "gather export stage=0 item 2",
            "barrier stage=0 stage 0 exported",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "barrier stage=1 stage 1 exported",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert_story(calls(update.events, 2), [
            "barrier paused",
            "barrier started",
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 exported",
            "barrier stage=0 stage 0 closed",
            "state stage=1 group_name=vime-pp_1",
            "listen vime-pp_1 stage=1 10.0.0.1:20001",
            "rpc vime-pp_1 stage=1 init_weights_update_group engine0",
            "open vime-pp_1 stage=1 world_size=2",
            "barrier stage=1 stage 1 open",
            "gather export stage=1 item 0",
            "gather export stage=1 item 1",
            "gather export stage=1 item 2",
            "rpc vime-pp_1 stage=1 bucket=0 acquire lock",
            "rpc vime-pp_1 stage=1 bucket=0 update_weights_from_distributed engine0",
            "send vime-pp_1 stage=1 bucket=0 hf.s1.dense0 hf.s1.dense1",
            "rpc vime-pp_1 stage=1 bucket=0 release lock",
            "barrier stage=1 stage 1 exported",
            "synchronize vime-pp_1 stage=1",
            "close vime-pp_1 stage=1",
            "state stage=1 group_name=None",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert_story(calls(update.events, 3), [
            "barrier paused",
            "barrier started",
            "barrier stage=0 stage 0 open",
            "barrier stage=0 stage 0 exported",
            "barrier stage=0 stage 0 closed",
            "barrier stage=1 stage 1 open",
            "gather export stage=1 item 0",
            "gather export stage=1 item 1",
            "gather export stage=1 item 2",
            "barrier stage=1 stage 1 exported",
            "barrier stage=1 stage 1 closed",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ])
        assert run.differences() == []


@pytest.mark.parametrize("contract", ["pipeline_collective", "stage_local"])
def test_with_one_stage_both_contracts_are_the_same_update(contract: Contract) -> None:
    with RecordingJob(table=small_table(1, dense=2), make_exporter=bridge(contract)) as run:
        connect, update = run.connect().check(), run.update().check()
        assert_story(calls(connect.events, 0), LEAD_CONNECTS)
        barriers = [line for line in calls(update.events, 0) if line.startswith("barrier")]
        assert barriers == [
            "barrier paused",
            "barrier started",
            "barrier stage=0 model exported" if contract == "pipeline_collective" else "barrier stage=0 stage 0 exported",
            "barrier finished",
            "barrier published",
            "barrier resumed",
        ]
        assert [channel.live for channel in run.world.network.channels] == [True]
        assert run.differences() == []
