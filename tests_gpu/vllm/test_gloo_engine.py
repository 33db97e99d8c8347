"""The `gloo` back end inside real vLLM engines: what arrives, what is loaded, what the engine then says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.checkpoints import make_checkpoint, read_checkpoint
from staged_sync.errors import TransportError
from staged_sync.seam import Wire
from staged_sync.vllm import cpu_repairs
from tests_gpu.vllm.conftest import PROMPTS, EngineFactory
from tests_gpu.vllm.source import Receiver, dial, send, transfer_group, update, wait

pytestmark = pytest.mark.beyond_main_job

Reference = Callable[[Path], list[dict[str, list[Any]]]]


@pytest.fixture
def received(vllm_cpu: None) -> Iterator[dict[str, torch.Tensor]]:
    """What the back end says arrived, by name, before vLLM saw it."""
    from staged_sync.vllm.gloo_engine import GlooWeightTransferEngine

    arrived: dict[str, torch.Tensor] = {}

    def keep(engine: Any, group: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        arrived.update({name: tensor.clone() for name, tensor in tensors})

    GlooWeightTransferEngine.on_receive.append(keep)
    yield arrived
    GlooWeightTransferEngine.on_receive.remove(keep)


def assert_same_bytes(arrived: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert arrived.keys() == expected.keys()
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype and arrived[name].shape == tensor.shape, name
        assert torch.equal(arrived[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(("packed", "bucket_size", "buffer_bytes"),
                         [(False, 1, 1), (False, 7, 1), (True, 7, 1), (True, 7, 1 << 16), (True, 1000, 1 << 30)])
def test_an_update_makes_the_engine_the_checkpoint(packed: bool, bucket_size: int, buffer_bytes: int, engine: Receiver,
                                                   checkpoint: Path, tmp_path: Path, reference: Reference,
                                                   received: dict[str, torch.Tensor]) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", step=3)
    update(engine, read_checkpoint(other), "other")
    before = engine.engine.generate(PROMPTS)
    assert before != reference(checkpoint)
    received.clear()
    update(engine, read_checkpoint(checkpoint), "v1", packed=packed, bucket_size=bucket_size, buffer_bytes=buffer_bytes)
    assert_same_bytes(received, read_checkpoint(checkpoint))
    assert engine.engine.generate(PROMPTS) == reference(checkpoint)
    assert engine.engine.get_weight_version() == "v1"


def test_two_stages_in_one_session(engine: Receiver, checkpoint: Path, reference: Reference) -> None:
    """Each stage opens its own group, closes it, and the next one replaces it on the engine."""
    tensors = read_checkpoint(checkpoint)
    first = {name: t for name, t in tensors.items() if "layers.0." in name or "layers.1." in name or "embed" in name}
    second = {name: t for name, t in tensors.items() if name not in first}
    assert first and second
    engine.ask("pause_generation")
    engine.ask("start_weight_update")
    for stage, part in enumerate([first, second]):
        with transfer_group([engine], f"vime-pp_{stage}", packed=True) as group:
            send([engine], group, part)
    engine.ask("finish_weight_update")
    engine.ask("continue_generation")
    engine.ask("destroy_weights_update_group", group_name="vime-pp_1")
    assert engine.engine.generate(PROMPTS) == reference(checkpoint)


def test_a_tied_head_is_packed_again(make_engine: EngineFactory, tmp_path: Path, reference: Reference,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the repair the engine computes logits with the old head, silently; so this also shows that it is needed."""
    tied = make_checkpoint(tmp_path / "tied", "qwen3", tied=True)
    receiver = make_engine(tied)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_repairs, "repair", lambda model: None)
        update(receiver, read_checkpoint(tied), "stale")
        assert receiver.engine.generate(PROMPTS) != reference(tied)
    update(receiver, read_checkpoint(tied), "fresh")
    assert receiver.engine.generate(PROMPTS) == reference(tied)
    heads = cpu_repairs.tied_packed_layers(receiver.transfer_engine.model)
    assert {type(layer).__name__ for layer in heads} == {"VocabParallelEmbedding", "ParallelLMHead"}


def test_experts_are_packed_again(make_engine: EngineFactory, tmp_path: Path, reference: Reference,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the repair the engine's kernel reads checkpoint-shaped bytes as packed ones; so this also shows that it is needed.
    Three updates in a row: what is packed in place must not be packed twice."""
    steps = [make_checkpoint(tmp_path / f"moe{step}", "qwen3_moe", step=step, num_layers=2) for step in (0, 1, 2)]
    receiver = make_engine(steps[0])
    with monkeypatch.context() as patch:
        patch.setattr(cpu_repairs, "pack_experts", lambda layer: None)
        update(receiver, read_checkpoint(steps[0]), "stale")
        assert receiver.engine.generate(PROMPTS) != reference(steps[0])
    for step in steps:
        update(receiver, read_checkpoint(step), step.name)
        assert receiver.engine.generate(PROMPTS) == reference(step)


def test_latent_attention_is_updated_on_processors_with_amx_too(make_engine: EngineFactory, tmp_path: Path, reference: Reference,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, vLLM drops a weight that a reload needs: without the repair every update fails, which is shown where it is so."""
    steps = [make_checkpoint(tmp_path / f"mla{step}", "deepseek_v3", step=step, num_layers=2) for step in (0, 1, 2)]
    receiver = make_engine(steps[0])
    if torch.cpu._is_amx_tile_supported():
        with monkeypatch.context() as patch:
            patch.setattr(cpu_repairs, "make_room", lambda model: None)
            with pytest.raises(Exception, match=r"size of tensor a \(0\) must match"):
                update(receiver, read_checkpoint(steps[0]), "no room")
    for step in steps:
        update(receiver, read_checkpoint(step), step.name)
        assert receiver.engine.generate(PROMPTS) == reference(step)


def test_room_is_made_once_and_only_where_a_weight_was_dropped() -> None:
    def attention(weight: torch.Tensor, amx: bool) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.is_amx_bmm_enabled = amx
        layer.kv_b_proj = torch.nn.Linear(1, 1)
        layer.kv_b_proj.weight = torch.nn.Parameter(weight)
        vars(layer.kv_b_proj).update(output_partition_sizes=[96], input_size_per_partition=32, params_dtype=torch.bfloat16)
        return layer

    dropped, kept, other = attention(torch.empty(0), True), attention(torch.ones(2), True), attention(torch.empty(0), False)
    cpu_repairs.make_room(torch.nn.Sequential(dropped, kept, other))
    made = dropped.kv_b_proj.weight
    assert (made.shape, made.dtype, bool(made.isnan().all())) == ((96, 32), torch.bfloat16, True)
    assert torch.equal(kept.kv_b_proj.weight, torch.ones(2)) and other.kv_b_proj.weight.numel() == 0


def test_a_model_that_would_go_stale_is_refused() -> None:
    experts = torch.nn.Module()
    experts.quant_method = mock.Mock(spec=["moe_kernel"])
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), experts)
    with pytest.raises(cpu_repairs.Unrepaired, match=r"(?s)mixture-of-experts.*- 1 \(Mock\)$"):
        cpu_repairs.prepare(model)


def test_vllms_experts_are_what_is_refused(vllm_cpu: None) -> None:
    """The attribute that gives a mixture-of-experts layer away is still vLLM's."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    assert "self.moe_kernel" in inspect.getsource(FusedMoEMethodBase.__init__)


def test_a_new_group_destroys_the_replaced_one(engine: Receiver) -> None:
    """The old source's send fails at once: nobody listens to it any more."""
    with transfer_group([engine], "vime-pp_0") as first, transfer_group([engine], "vime-pp_1"):
        held = engine.transfer_engine.model_update_group
        assert held.terms.name == "vime-pp_1"
        with pytest.raises(TransportError, match="'vime-pp_0' failed"):
            wait(first.send([torch.zeros(1 << 22)]))
    engine.ask("destroy_weights_update_group", group_name="vime-pp_1")
    assert engine.transfer_engine.model_update_group is None


def test_gloo_retain_keeps_the_replaced_group_open(make_engine: EngineFactory, checkpoint: Path) -> None:
    """Like stock NCCL: the old source's send finds no one who listens, and no one who says so."""
    receiver = make_engine(checkpoint, backend="gloo_retain")
    with transfer_group([receiver], "vime-pp_0") as first, transfer_group([receiver], "vime-pp_1"):
        assert receiver.transfer_engine.model_update_group.terms.name == "vime-pp_1"
        assert [group.terms.name for group in receiver.transfer_engine.retained] == ["vime-pp_0"]
        stuck = first.send([torch.zeros(1 << 22)])
        with pytest.raises(TimeoutError):
            _wait_briefly(stuck)
    receiver.ask("destroy_weights_update_group", group_name="vime-pp_1")
    assert receiver.transfer_engine.retained == []


def _wait_briefly(work: Any) -> None:
    assert not work.drain(1.0)
    assert not work.poll()
    raise TimeoutError


def test_an_update_before_any_group_is_refused(engine: Receiver) -> None:
    engine.ask("start_weight_update")
    with pytest.raises(RuntimeError, match="holds no transfer group"):
        engine.ask("update_weights_from_distributed", names=["model.norm.weight"], dtypes=[torch.bfloat16], shapes=[(96,)],
                   group_name="none")
    assert not engine.engine.get_weight_transfer_info()["session_open"]


def test_joining_nobody_fails_at_once_and_leaves_no_group(engine: Receiver) -> None:
    listener, opening, calls = dial([engine], "gone", Wire("gloo", False, 1))
    wait(opening, *calls)[0].close(timeout_s=5)
    with pytest.raises(TransportError, match=r"nobody can be reached at 127\.0\.0\.1:\d+"):
        engine.ask("init_weights_update_group", master_address="127.0.0.1", master_port=listener.port, rank_offset=1,
                   world_size=2, group_name="gone", backend="gloo", timeout_s=5.0)
    assert engine.transfer_engine.model_update_group is None
    assert engine.engine.get_weight_transfer_info()["group_name"] is None


@pytest.mark.parametrize(("told", "text"), [
    ({"packed": True}, "packed: the source has False, the engine was told True"),
    ({"world_size": 3}, "world_size: the source has 2, the engine was told 3"),
    ({"rank_offset": 2}, "a rank offset that makes this worker rank 2"),
])
def test_both_ends_compare_terms_before_a_byte_moves(told: dict[str, Any], text: str, engine: Receiver) -> None:
    from staged_sync.vllm.rendezvous import listen
    from staged_sync.vllm.transport import open_gloo_group

    listener = listen("127.0.0.1", None)
    opening = open_gloo_group(listener, name="terms", world_size=2, wire=Wire("gloo", False, 1), timeout_s=5)
    agreed = {"master_address": listener.host, "master_port": listener.port, "rank_offset": 1, "world_size": 2,
              "group_name": "terms", "backend": "gloo", "timeout_s": 5.0}
    with pytest.raises(TransportError, match=text):
        engine.ask("init_weights_update_group", **{**agreed, **told})
    listener.close()
    assert opening.poll()
    with pytest.raises(TransportError, match="given up"):
        opening.result()


def test_an_unknown_dtype_is_refused(engine: Receiver) -> None:
    with transfer_group([engine], "vime-pp_0"):
        engine.ask("start_weight_update")
        with pytest.raises(TransportError, match="dtype 'bfloat61', which torch does not know"):
            engine.ask("update_weights_from_distributed", names=["model.norm.weight"], dtypes=["bfloat61"], shapes=[(96,)],
                       group_name="vime-pp_0")
    engine.ask("destroy_weights_update_group", group_name="vime-pp_0")


def test_registering_again_is_harmless(vllm_cpu: None) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from staged_sync.vllm.plugin import BACKENDS, register

    before = {name: WeightTransferEngineFactory._registry.get(name) for name in BACKENDS}
    register()
    register()
    assert all(WeightTransferEngineFactory._registry[name] is (before[name] or WeightTransferEngineFactory._registry[name])
               for name in BACKENDS)
    assert WeightTransferEngineFactory._registry["gloo"]().__name__ == "GlooWeightTransferEngine"
