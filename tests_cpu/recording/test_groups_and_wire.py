"""Transfer groups: who opens them, when, with which ranks, names and wire format; and that the bytes are right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.faults import Faults
from harness.recording.engines import EngineOptions
from harness.recording.job import RecordingJob
from harness.recording.log import assert_story, order
from harness.recording.model import small_table
from staged_sync.errors import ConfigurationError, UpdateFailed
from staged_sync.trace import Event


def details(events: list[Event], event: str) -> list[str]:
    return [f"{e.actor} {e.group} {e.detail}" for e in events if e.event == event]


@pytest.mark.parametrize("plain_vime", [True, False])
def test_connect_opens_nothing_with_more_than_one_stage(plain_vime: bool) -> None:
    with RecordingJob(pp=2, tp=2, engines=[EngineOptions(plain_vime=plain_vime, packed_in="update")]) as run:
        connect = run.connect().check()
        assert run.world.network.channels == []
        asked = [] if plain_vime else ["engine0: handle get_weight_transfer_info"]
        assert_story(order(connect.events, "handle", "listen", "open", "join"), asked)


def test_only_the_source_of_the_active_stage_opens_a_group_and_closes_it_before_the_next() -> None:
    with RecordingJob(pp=3, tp=2, dp=2) as run:
        run.connect().check()
        update = run.update().check()
        assert_story(order(update.events, "open", "close.done"), [
            "rank0: open vime-pp_0 stage=0 world_size=2",
            "rank0: close.done vime-pp_0 stage=0",
            "rank4: open vime-pp_1 stage=1 world_size=2",
            "rank4: close.done vime-pp_1 stage=1",
            "rank8: open vime-pp_2 stage=2 world_size=2",
            "rank8: close.done vime-pp_2 stage=2",
        ])
        assert run.world.network.live() == []


@pytest.mark.parametrize("pp", [1, 2])
def test_rank_offsets_of_engines_with_1_2_and_4_workers_are_1_2_and_4(pp: int) -> None:
    with RecordingJob(pp=pp, engines=[1, 2, 4]) as run:
        joined = [*run.connect().check().events, *run.update().check().events]
        last = f"vime-pp_{pp - 1}"
        assert [line for line in details(joined, "join.done") if last in line] == [
            f"engine0/worker0 {last} rank 1 of 8",
            f"engine1/worker0 {last} rank 2 of 8",
            f"engine1/worker1 {last} rank 3 of 8",
            f"engine2/worker0 {last} rank 4 of 8",
            f"engine2/worker1 {last} rank 5 of 8",
            f"engine2/worker2 {last} rank 6 of 8",
            f"engine2/worker3 {last} rank 7 of 8",
        ]
        assert run.differences() == []


def test_counts_default_to_the_gpus_per_engine_of_the_args() -> None:
    with RecordingJob(engines=[2, 2], args={"rollout_num_gpus_per_engine": 2}) as run:
        context = run.world.contexts[0]
        run.world.run(lambda c: run.updaters[0].connect_rollout_engines(run.world.handles, run.world.lock.handle)).check()
        run.update().check()
        assert context.world.network.channels[0].world_size == 5
        assert run.differences() == []


def test_only_the_active_source_changes_its_group_name() -> None:
    with RecordingJob(pp=2, tp=2, dp=2) as run:
        run.connect().check()
        update = run.update().check()
        assert_story(order(update.events, "state"), [
            "rank0: state stage=0 group_name=vime-pp_0",
            "rank0: state stage=0 group_name=None",
            "rank4: state stage=1 group_name=vime-pp_1",
            "rank4: state stage=1 group_name=None",
        ])
        assert [updater.group_name for updater in run.updaters] == [None] * 8


@pytest.mark.parametrize("event", ["open", "send", "synchronize", "close", "send.done"])
def test_the_group_name_is_restored_after_an_exception(event: str) -> None:
    faults = Faults().fail_at(rank=1, event=event, stage=1)
    with RecordingJob(pp=2, faults=faults) as run:
        run.connect().check()
        update = run.update()
        assert {type(error) for error in update.errors.values()} == {UpdateFailed}
        assert [updater.group_name for updater in run.updaters] == [None, None]
        assert run.world.network.live() == []
    faults.assert_all_fired()


def test_the_persistent_group_keeps_its_name_over_a_failed_update() -> None:
    faults = Faults().fail_at(rank=0, event="send")
    with RecordingJob(faults=faults) as run:
        run.connect().check()
        run.update()
        assert run.updaters[0].group_name == "vime-pp_0"
        run.update().check()
        assert run.differences() == []


PACKED = {"vllm_weight_sync_packed": True, "update_weight_packed_buffer_size": 100}


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize(("args", "broadcasts"), [({}, [60, 80, 100, 84]), (PACKED, [140, 100, 84])])
def test_packed_and_unpacked_bytes_arrive_alike(layout: dict[str, int], args: dict[str, object],
                                                broadcasts: list[int]) -> None:
    """Stage 0: dense tensors of 60, 80 and 100 bytes in one bucket, an expert tensor of 84 in another. Packed: the tensor
    that takes a chunk over 100 bytes closes it."""
    with RecordingJob(table=small_table(layout.get("pp", 1), dense=3, expert=1), engines=[1, 2], args=args, **layout) as run:
        run.connect().check()
        run.update().check()
        assert run.world.network.channels[0].sizes == broadcasts
        assert run.differences() == []


@pytest.mark.parametrize("args", [{}, PACKED], ids=["unpacked", "packed"])
def test_strided_tensors_are_made_contiguous_before_they_are_sent(args: dict[str, object]) -> None:
    """Exporters may yield views; gloo would ship other bytes."""
    with RecordingJob(pp=2, args=args) as run:
        convert = run.exporters[1].convert
        run.exporters[1].convert = lambda unit, gathered: [
            (name, tensor.transpose(0, 2).contiguous().transpose(0, 2)) for name, tensor in convert(unit, gathered)]
        run.connect().check()
        run.update().check()
        assert run.differences() == []


@pytest.mark.parametrize(("setting", "value"), [("packed", False), ("packed_buffer_bytes", 101), ("post_process", True)])
def test_every_part_of_the_wire_must_be_the_same_on_all_ranks(setting: str, value: object) -> None:
    with RecordingJob(pp=2, args=PACKED) as run:
        rank = run.updaters[1]._rank
        run.updaters[1]._rank = replace(rank, settings=replace(rank.settings, **{setting: value}))  # type: ignore[arg-type]
        errors = run.connect().errors
    assert {type(error) for error in errors.values()} == {ConfigurationError} and len(errors) == 2
    assert all("the wire must be the same on every rank: rank 1 has" in str(error) for error in errors.values())


@pytest.mark.parametrize(("buffer_size", "buckets"), [
    (1, ["hf.s0.dense0", "hf.s0.dense1", "hf.s0.dense2", "hf.s0.expert0"]),
    (140, ["hf.s0.dense0 hf.s0.dense1", "hf.s0.dense2", "hf.s0.expert0"]),
    (139, ["hf.s0.dense0", "hf.s0.dense1", "hf.s0.dense2", "hf.s0.expert0"]),
    (240, ["hf.s0.dense0 hf.s0.dense1 hf.s0.dense2", "hf.s0.expert0"]),
])
def test_buckets_hold_as_much_as_fits_and_a_larger_tensor_alone(buffer_size: int, buckets: list[str]) -> None:
    with RecordingJob(table=small_table(1, dense=3, expert=1), args={"update_weight_buffer_size": buffer_size}) as run:
        run.connect().check()
        update = run.update().check()
        assert [e.detail for e in update.events if e.event == "send"] == buckets
        assert run.differences() == []


def test_plain_vime_engines_are_told_packed_with_each_bucket() -> None:
    engines = [EngineOptions(plain_vime=True, packed_in="update")]
    with RecordingJob(pp=2, engines=engines, args={"vllm_weight_sync_packed": True}) as run:
        run.connect().check()
        run.update().check()
        assert run.world.network.channels[0].sizes == [140]
        assert run.differences() == []
        assert run.world.engines[0].version == "1"


def test_a_stage_without_tensors_opens_no_group_and_joins_every_barrier() -> None:
    table = [small_table(1)[0], [], small_table(3)[2]]
    with RecordingJob(table=table, pp=3) as run:
        run.connect().check()
        update = run.update().check()
        assert [channel.name for channel in run.world.network.channels] == ["vime-pp_0", "vime-pp_2"]
        barriers = [[e.text() for e in update.events if e.event == "barrier" and e.rank == rank] for rank in range(3)]
        assert len(barriers[0]) == 4 * 3 + 5
        assert barriers[0] == barriers[1] == barriers[2]
        assert run.differences() == []


def test_connecting_other_engines_closes_the_old_group_and_uses_the_new_ones() -> None:
    with RecordingJob(engines=[1]) as run:
        run.connect().check()
        run.update().check()
        replacement = run.world.add_engine(2)
        run.step = 2
        run.connect(handles=[replacement.handle], counts=[2]).check()
        run.update().check()
        assert [(c.name, c.live) for c in run.world.network.channels] == [("vime-pp_0", False), ("vime-pp_0", True)]
        assert [engine.version for engine in run.world.engines] == ["1", "2"]
        assert run.world.engines[0].workers[0].slot is None


def test_connecting_the_same_engines_again_keeps_the_group() -> None:
    with RecordingJob(engines=[1]) as run:
        run.connect().check()
        again = run.connect().check()
        assert len(run.world.network.channels) == 1
        assert [e.text() for e in again.events if e.event in ("open", "close", "join")] == []
        run.update().check()
