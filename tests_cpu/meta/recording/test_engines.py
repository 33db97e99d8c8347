"""The stub engine is vLLM's worker where it matters: one slot, a session with its errors, names ignored, bytes kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.recording.engines import EngineOptions
from harness.recording.log import actor_calls
from harness.recording.seam import RecordedTransferGroup
from harness.recording.world import RankContext, RecordingWorld, RunResult
from staged_sync.errors import DeadlineExceeded, TransportError
from staged_sync.exporter import TensorMeta
from staged_sync.seam import Wire

MODEL = {name: TensorMeta(name, torch.float32, (3,)) for name in ("a", "b")}
ONE, TWO = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])


def finished(context: RankContext, *works: Any, timeout_s: float = 10.0) -> list[Any]:
    """Results of all works, watched together; the first failure is raised."""
    left = list(works)
    while left:
        for work in [work for work in left if work.poll()]:
            work.result()
            left.remove(work)
        if left and not context.seam.wait_any(left, timeout_s=timeout_s):
            raise DeadlineExceeded(f"{', '.join(work.label for work in left)} took longer than {timeout_s} s")
    return [work.result() for work in works]


def ask(context: RankContext, method: str, engine: int = 0, **kwargs: Any) -> Any:
    return finished(context, context.seam.call(context.world.handles[engine], method, **kwargs))[0]


def open_group(context: RankContext, name: str = "g", *, packed: bool = False, engine: int = 0, offset: int = 1,
               world_size: int = 2, announced: int | None = None) -> RecordedTransferGroup:
    seam, wire = context.seam, Wire("gloo", packed, 16)
    listener = seam.listen(address=None, port_range=None)
    join = seam.call(context.world.handles[engine], "init_weights_update_group", master_address=listener.host,
                     master_port=listener.port, rank_offset=offset, world_size=announced or world_size, group_name=name,
                     backend="gloo", packed=packed, packed_buffer_size_bytes=16)
    dial = seam.open_transfer_group(listener, name=name, world_size=world_size, wire=wire, timeout_s=30)
    group: RecordedTransferGroup = finished(context, join, dial, timeout_s=60)[1]
    return group


def send(context: RankContext, group: RecordedTransferGroup, *named: tuple[str, torch.Tensor], engine: int = 0,
         **changed: Any) -> None:
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    announced = {"names": names, "dtypes": [t.dtype for t in tensors], "shapes": [tuple(t.shape) for t in tensors],
                 "group_name": "any name", "packed": False, **changed}
    reply = context.seam.call(context.world.handles[engine], "update_weights_from_distributed", **announced)
    finished(context, reply, group.send(tensors))


def quiet(context: RankContext) -> None:
    for method in ("pause_generation", "flush_cache", "start_weight_update"):
        ask(context, method)


def run(function: Any, *, engines: tuple[int | EngineOptions, ...] = (1,), tp: int = 1) -> tuple[RunResult, RecordingWorld]:
    with RecordingWorld(tp=tp, engines=engines, model=MODEL) as world:
        return world.run(function), world


@pytest.mark.parametrize(("calls", "message"), [
    (["start_weight_update", "start_weight_update"], "a weight update is already active. Call finish_weight_update first"),
    (["finish_weight_update"], "finish_weight_update called without a matching start_weight_update"),
    (["start_weight_update", "finish_weight_update", "finish_weight_update"], "without a matching start_weight_update"),
])
def test_the_session_refuses_as_vllm_does(calls: list[str], message: str) -> None:
    result, _ = run(lambda c: [ask(c, method) for method in calls])
    assert message in str(result.errors[0])


def test_an_update_without_a_session_is_refused() -> None:
    result, _ = run(lambda c: send(c, open_group(c), ("a", ONE)))
    assert "start_weight_update must be called before update_weights" in str(result.errors[0])


@pytest.mark.parametrize(("named", "changed", "message"), [
    ([("a", ONE)], {"dtypes": []}, "`dtype_names` should be of the same size as `names`: got 0 and 1"),
    ([("a", ONE)], {"shapes": []}, "`shapes` should be of the same size as `names`: got 0 and 1"),
    ([("z", ONE)], {}, "There is no module or parameter named 'z'"),
    ([("a", torch.zeros(4))], {}, "a: loaded shape (4,), parameter (3,)"),
])
def test_a_rejected_update_clears_the_session(named: list[tuple[str, torch.Tensor]], changed: dict[str, Any],
                                              message: str) -> None:
    def rejected(context: RankContext) -> None:
        quiet(context)
        group = open_group(context)
        try:
            send(context, group, *named, **changed)
        finally:
            assert not context.world.engines[0].workers[0].active

    result, _ = run(rejected)
    assert message in str(result.errors[0])


def test_bytes_are_stored_by_name_and_finish_publishes_nothing_by_itself() -> None:
    def update(context: RankContext) -> None:
        quiet(context)
        group = open_group(context)
        send(context, group, ("a", ONE), ("b", TWO))
        group.close(timeout_s=1)
        ask(context, "finish_weight_update")
        assert context.world.engines[0].version is None
        ask(context, "update_weight_version", weight_version="7")

    result, world = run(update)
    result.check()
    held = world.engines[0].weights()
    assert held["a"] is not None and held["b"] is not None
    assert torch.equal(held["a"], ONE) and torch.equal(held["b"], TWO)
    assert world.engines[0].version == "7"


def test_finish_takes_a_version_where_it_is_given_one() -> None:
    options = EngineOptions(plain_vime=True)
    def update(context: RankContext) -> None:
        quiet(context)
        send(context, open_group(context), ("a", ONE), ("b", TWO))
        ask(context, "finish_weight_update", weight_version="3")

    result, world = run(update, engines=(options,))
    assert result.check() and world.engines[0].version == "3"
    assert not world.contexts[0].seam.has_method(world.handles[0], "update_weight_version")
    assert not world.contexts[0].seam.has_method(world.handles[0], "get_weight_transfer_info")


def test_the_last_init_wins_and_a_send_into_the_replaced_group_fails_at_once() -> None:
    def replaced(context: RankContext) -> None:
        quiet(context)
        first = open_group(context, "first")
        open_group(context, "second")
        send(context, first, ("a", ONE))

    result, world = run(replaced)
    assert isinstance(result.errors[0], TransportError) and result.elapsed_s == 0
    assert "connection closed by peer: engine0/worker0 left transfer group first" in str(result.errors[0])
    assert "replace first live" in actor_calls(result.events, "engine0/worker0")
    assert world.engines[0].workers[0].slot is world.network.channels[1]
    assert any(v.startswith("rule 1: engine0 engine0/worker0 is asked to join second while it holds live group first")
               for v in result.violations)


def test_with_retain_replaced_the_send_hangs_as_stock_nccl_does_and_the_stall_names_both_groups() -> None:
    def replaced(context: RankContext) -> None:
        quiet(context)
        first = open_group(context, "first")
        open_group(context, "second")
        work = first.send([ONE])
        call = context.seam.call(context.world.handles[0], "update_weights_from_distributed", names=["a"],
                                 dtypes=[ONE.dtype], shapes=[(3,)], group_name="first", packed=False)
        finished(context, work, call)

    result, _ = run(replaced, engines=(EngineOptions(retain_replaced=True),))
    assert isinstance(result.errors[0], DeadlineExceeded) and result.elapsed_s == 10
    rows = result.stalls[0].splitlines()
    assert any("rank0" in row and "first: engine0/worker0 to receive" in row for row in rows)
    assert any("engine0/worker0" in row and "receive" in row and "second" in row for row in rows)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"world_size": 3, "announced": 4}, "joins g with world size 4, its source has 3"),
    ({"offset": 2, "world_size": 2}, "joins g as rank 2, which belongs to nobody: it is out of range"),
])
def test_a_wrong_rank_or_world_size_is_told(arguments: dict[str, int], message: str) -> None:
    result, _ = run(lambda c: open_group(c, **arguments))
    assert message in str(result.errors[0])


def test_two_workers_that_claim_one_rank_are_both_named() -> None:
    def collide(context: RankContext) -> None:
        listener = context.seam.listen(address=None, port_range=None)
        joins = [context.seam.call(handle, "init_weights_update_group", master_address=listener.host,
                                   master_port=listener.port, rank_offset=1, world_size=3, group_name="g", backend="gloo")
                 for handle in context.world.handles]
        context.seam.open_transfer_group(listener, name="g", world_size=3, wire=Wire("gloo", False, 0), timeout_s=30)
        finished(context, joins[1])

    result, _ = run(collide, engines=(1, 1))
    assert "engine1/worker0 joins g as rank 1, which belongs to engine0/worker0" in str(result.errors[0])


def test_ends_that_disagree_on_packed_do_not_load_shifted_bytes_in_silence() -> None:
    def disagree(context: RankContext) -> None:
        quiet(context)
        group = open_group(context, packed=True)
        context.world.engines[0].workers[0].wire = Wire("gloo", False, 0)
        send(context, group, ("a", ONE), ("b", TWO))

    result, _ = run(disagree)
    assert "expects a broadcast of 12 bytes, rank 0 sends 24" in str(result.errors[0])


def test_a_strided_tensor_is_refused_at_the_edge() -> None:
    result, _ = run(lambda c: open_group(c).send([torch.zeros(4, 3).t()]))
    assert "tensor 0 of 1 in this send is not contiguous (strides (1, 3))" in str(result.errors[0])


def test_a_send_ends_only_when_every_worker_has_received() -> None:
    def slow(context: RankContext) -> tuple[bool, bool]:
        quiet(context)
        work = open_group(context, world_size=2).send([ONE])
        before = work.poll()
        call = context.seam.call(context.world.handles[0], "update_weights_from_distributed", names=["a"],
                                 dtypes=[ONE.dtype], shapes=[(3,)], group_name="g", packed=False)
        finished(context, work, call)
        return before, work.poll()

    result, _ = run(slow)
    assert result.check().results == {0: (False, True)}


def test_closing_a_group_in_mid_send_fails_the_receiver_at_once() -> None:
    def leaves(context: RankContext) -> None:
        quiet(context)
        group = open_group(context)
        call = context.seam.call(context.world.handles[0], "update_weights_from_distributed", names=["a", "b"],
                                 dtypes=[ONE.dtype] * 2, shapes=[(3,)] * 2, group_name="g", packed=False)
        finished(context, group.send([ONE]))
        group.close(timeout_s=1)
        group.close(timeout_s=1)
        finished(context, call)

    result, _ = run(leaves)
    assert "connection closed by peer: rank 0 left transfer group g" in str(result.errors[0])
    assert result.elapsed_s == 0


@pytest.mark.parametrize(("deeds", "violation"), [
    (["flush_cache"], "rule 3: engine0 flushed before it was paused"),
    (["start_weight_update"], "rule 3: engine0 a session starts before pause and flush"),
    (["pause_generation", "flush_cache", "start_weight_update", "continue_generation"],
     "rule 9: engine0 generates with unfit weights: engine0/worker0 has a session open"),
    (["pause_generation", "flush_cache", "start_weight_update", "finish_weight_update", "update_weight_version"],
     "rule 9: engine0 publishes version 1 without having received a weight"),
])
def test_what_must_not_happen_is_noted(deeds: list[str], violation: str) -> None:
    extra = {"update_weight_version": {"weight_version": 1}}
    result, _ = run(lambda c: [ask(c, deed, **extra.get(deed, {})) for deed in deeds])
    assert any(violation in noted for noted in result.violations)


def test_serving_after_an_abandoned_session_or_with_a_mixture_is_noted() -> None:
    def half(context: RankContext) -> None:
        quiet(context)
        group = open_group(context)
        send(context, group, ("a", ONE))
        with pytest.raises(ValueError, match="same size"):
            ask(context, "update_weights_from_distributed", names=["x"], dtypes=[], shapes=[], group_name="g")
        ask(context, "continue_generation")
        quiet(context)
        send(context, group, ("a", ONE))
        ask(context, "finish_weight_update")
        ask(context, "continue_generation")

    result, _ = run(half)
    assert [noted.split(" (after")[0] for noted in result.violations] == [
        "rule 9: engine0 generates with unfit weights: engine0/worker0 was left in session 1: its parameters are on the meta "
        "device",
        "rule 9: engine0 generates with unfit weights: engine0/worker0 has 1 of 2 weights from before session 2, e.g. b",
    ]


def test_calls_of_one_engine_queue_behind_each_other() -> None:
    def queue(context: RankContext) -> None:
        calls = [context.seam.call(context.world.handles[0], m) for m in ("pause_generation", "flush_cache", "generate")]
        finished(context, *calls)

    result, _ = run(queue)
    assert actor_calls(result.events, "engine0") == ["handle pause_generation", "handle flush_cache", "handle generate"]


def test_the_lock_answers_at_once_and_is_released_by_its_holder_only_once() -> None:
    def locking(context: RankContext) -> list[Any]:
        lock = context.world.lock.handle
        call = context.seam.call
        return [finished(context, call(lock, m))[0] for m in ("acquire", "acquire", "release", "acquire")]

    result, world = run(locking)
    assert result.results == {0: [True, False, None, True]} and world.lock.held
