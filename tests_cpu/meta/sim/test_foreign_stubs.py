"""What foreign code is given instead of torch.distributed, megatron, ray and its model answers as the real things do."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.foreign import model
from harness.foreign.job import ForeignJob
from harness.foreign.stubs import ActorHandle
from harness.recording.model import same_bytes
from harness.recording.topology import Layout
from harness.recording.world import RankContext, RunResult
from harness.sim import Scenario
from harness.sim.scenario import make_table
from staged_sync.errors import RanksAbsent


def on_ranks(scenario: Scenario, function: Callable[[RankContext], Any]) -> RunResult:
    """`function` on every rank, where the stubs are in place; `scenario.impl` is not looked at."""
    job = ForeignJob(scenario)
    try:
        with job.scope():
            return job.world.run(function)
    finally:
        job.close()


def results(scenario: Scenario, function: Callable[[RankContext], Any]) -> list[Any]:
    return [result for _, result in sorted(on_ranks(scenario, function).check().results.items())]


# --- megatron -----------------------------------------------------------------------------------------------------------
def test_parallel_groups_are_megatron_s_with_context_parallel_ranks_told_apart() -> None:
    def ask(context: RankContext) -> tuple[Any, ...]:
        from megatron.core import mpu  # type: ignore[import-not-found, unused-ignore]
        plain, with_cp = mpu.get_data_parallel_group(), mpu.get_data_parallel_group(with_context_parallel=True)
        ranks = mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank(), with_cp.rank()
        return (*ranks, *map(dist.get_process_group_ranks, (plain, with_cp, mpu.get_pipeline_model_parallel_group())))

    found = results(Scenario(tp=2, cp=2, dp=2, pp=2), ask)
    assert found[0] == (0, 0, 0, [0, 4], [0, 2, 4, 6], [0, 8])
    assert found[7] == (1, 1, 3, [3, 7], [1, 3, 5, 7], [7, 15])


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "dp": 2, "ep": 2}])
def test_a_rank_has_its_shards_and_its_experts_by_local_and_by_global_number(layout: dict[str, int]) -> None:
    def names(parameters: Any) -> list[str]:
        return [name for name, _ in parameters()]

    found = results(Scenario(stages=((1, 4),), **layout), lambda context: (
        names(model.named_parameters), names(model.local_parameters), sorted(model.local_weights())))
    expert = "decoder.layers.0.mlp.experts.linear.weight"
    for rank, (by_global, by_local, weights) in enumerate(found):
        first = 2 * Layout(**layout).ranks[rank].ep
        assert by_global == ["decoder.layers.0.dense.weight0", f"{expert}{first}", f"{expert}{first + 1}"]
        assert by_local == ["decoder.layers.0.dense.weight0", f"{expert}0", f"{expert}1"]
        assert weights == sorted(f"vp_stages.0.{name}" for name in by_local)


def test_shards_put_together_are_the_tensor_and_less_is_refused() -> None:
    def convert(context: RankContext) -> bool:
        name, shard = next(iter(model.named_parameters()))
        assert (shard.tensor_model_parallel, shard.partition_dim, shard.partition_stride) == (True, 0, 1)
        with pytest.raises(ValueError, match=r"dense.weight0: 2 elements were gathered, all shards have 8: .*tensor-parallel"):
            model.convert_to_hf(None, "", name, shard)
        with pytest.raises(KeyError, match="no parameter of this model: 'decoder.layers.0.dense.weight1'"):
            model.convert_to_hf(None, "", "decoder.layers.0.dense.weight1", shard)
        shards = [torch.empty_like(shard) for _ in range(4)]
        dist.all_gather(shards, shard)
        ((hf_name, tensor),) = model.convert_to_hf(None, "", name, torch.cat(shards))
        ((wanted_name, wanted),) = model.named_tensors()
        return bool(hf_name == wanted_name and tensor.shape == wanted.shape
                    and torch.equal(tensor.view(torch.int16), wanted.view(torch.int16)))

    assert results(Scenario(tp=4), convert) == [True] * 4  # 6 elements in 4 shards: padded


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    run = on_ranks(Scenario(dp=2, ep=2, stages=((0, 3),)), lambda context: list(model.named_parameters()))
    assert str(run.errors[0]) == "stage 0 has 3 experts, which 2 expert-parallel ranks cannot share equally"


def test_a_bridge_yields_the_whole_model_on_every_rank() -> None:
    def export(context: RankContext) -> list[list[str]]:
        from mbridge import AutoBridge as MBridge  # type: ignore[import-not-found, unused-ignore]
        from megatron.bridge import AutoBridge  # type: ignore[import-not-found, unused-ignore]
        megatron = AutoBridge.from_hf_pretrained("a path")
        return [[item.param_name for item in megatron.export_hf_weights([], conversion_tasks=megatron.get_conversion_tasks([]))],
                [name for name, _ in MBridge.from_pretrained("a path").export_weights([])]]

    names = [meta.name for units in make_table(((1, 0), (1, 2)), 1) for unit in units for meta in unit.tensors]
    assert results(Scenario(tp=2, pp=2, ep=2, etp=1, stages=((1, 0), (1, 2))), export) == [[names, names]] * 4


# --- torch.distributed, time --------------------------------------------------------------------------------------------
def test_collectives_bring_together_what_the_ranks_have() -> None:
    def gather(context: RankContext) -> tuple[Any, ...]:
        mine = torch.tensor([context.rank, 10])
        together, largest, total = torch.empty(4, dtype=torch.int64), mine.clone(), mine.clone()
        handle = dist.all_gather_into_tensor(together, mine, async_op=True)
        assert handle.wait()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, f"of {context.rank}")
        return together.tolist(), largest.tolist(), total.tolist(), objects

    assert results(Scenario(tp=2), gather) == [([0, 10, 1, 10], [1, 10], [1, 20], ["of 0", "of 1"])] * 2


@pytest.mark.parametrize("meet", [
    lambda group: dist.barrier(group=group), lambda group: dist.monitored_barrier(group, timeout=timedelta(seconds=7)),
    lambda group: dist.all_gather_object([None, None], 1, group=group)])
def test_a_group_of_ones_own_has_its_own_time_out(meet: Callable[[Any], None]) -> None:
    def wait(context: RankContext) -> None:
        first, alone = dist.new_group(backend="gloo", timeout=timedelta(seconds=7)), dist.new_group([0])
        assert (alone is None) == (context.rank == 1)
        if context.rank == 0:
            dist.barrier(group=alone)
            meet(first)

    run = on_ranks(Scenario(tp=2), wait)
    assert isinstance(run.errors[0], RanksAbsent) and "in group group1: rank 1 did not come within 7 s" in str(run.errors[0])
    assert run.elapsed_s == 7


def test_clocks_and_sleeps_are_virtual() -> None:
    def sleep(context: RankContext) -> list[float]:
        began = time.monotonic(), time.time(), time.perf_counter()
        time.sleep(600)  # noqa: TID251 (the one that is replaced)
        return [time.monotonic() - began[0], time.time() - began[1], time.perf_counter() - began[2]]

    assert on_ranks(Scenario(), sleep).results == {0: [600, 600, 600]}


# --- ray, the device ----------------------------------------------------------------------------------------------------
def test_calls_take_arguments_by_position_and_refuse_what_does_not_fit_where_they_are_made() -> None:
    def call(context: RankContext) -> str:
        import ray  # type: ignore[import-not-found, unused-ignore]
        engine = ActorHandle(context.world.engines[0])
        with pytest.raises(TypeError, match="missing a required argument: 'group_name'"):
            engine.destroy_weights_update_group.remote()
        ray.get(engine.destroy_weights_update_group.remote("a group"))
        with pytest.raises(AttributeError, match="engine0 has no method 'sulk'"):
            engine.sulk.remote()
        return " ".join(event.text() for event in context.world.events if event.event == "rpc")

    assert results(Scenario(), call) == ["rpc stage=0 destroy_weights_update_group engine0"]


def test_a_wait_for_the_device_can_have_a_time_out() -> None:
    def send(context: RankContext) -> list[bool]:
        import ray  # type: ignore[import-not-found, unused-ignore]

        from harness.foreign.dist import init_process_group
        engine, (name, tensor) = ActorHandle(context.world.engines[0]), next(model.named_tensors())
        joins = engine.init_weights_update_group.remote("10.0.0.1", 9, 1, 2, "g", "nccl")
        group = init_process_group(init_method="tcp://10.0.0.1:9", world_size=2, rank=0, group_name="g")
        ray.get(joins)
        broadcast = dist.broadcast(tensor, 0, group=group, async_op=True)
        sent = torch.cuda.Event()
        sent.record()
        with pytest.raises(RuntimeError, match="Timed out waiting 5 s for a broadcast: g: engine0/worker0 to receive"):
            broadcast.wait(timeout=timedelta(seconds=5))
        seen = [sent.query()]
        assert broadcast.wait()  # does not block, as with NCCL: what is written now comes after it
        tensor.zero_()
        ray.get([engine.start_weight_update.remote(), engine.update_weights_from_distributed.remote(
            [name], [tensor.dtype], [tensor.shape], "g")])
        received = context.world.engines[0].weights()[name]
        return [*seen, sent.query(), broadcast.is_completed(), same_bytes(received, next(model.named_tensors())[1])]

    assert on_ranks(Scenario(), send).results == {0: [False, True, True, True]}
