"""The in-process engine: what it refuses, what it says about itself, and how an open session is abandoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import read_checkpoint
from staged_sync.engines.in_process import EngineRefused, InProcessEngine
from staged_sync.engines.info import EngineInfo
from staged_sync.vllm import abandon, api, reload
from tests_gpu.vllm.conftest import PROMPTS
from tests_gpu.vllm.source import Receiver, buckets, send, transfer_group, update

pytestmark = pytest.mark.beyond_main_job

Reference = Callable[[Path], list[dict[str, list[Any]]]]


@pytest.fixture
def whole(engine: Receiver, checkpoint: Path) -> Iterator[Receiver]:
    """The shared engine with complete weights, before and after."""
    update(engine, read_checkpoint(checkpoint), "whole")
    yield engine
    abandon_session(engine)
    update(engine, read_checkpoint(checkpoint), "whole")


def abandon_session(receiver: Receiver) -> str | None:
    try:
        outcome = receiver.ask(abandon.METHOD, **abandon.request())
    except Exception as error:
        outcome = error
    return abandon.objection(outcome)


def test_what_it_says_about_itself(whole: Receiver) -> None:
    info = EngineInfo.from_dict(whole.ask("get_weight_transfer_info"))
    assert info == EngineInfo(vllm_version=api.vllm_version(), backend="gloo", workers=1, packed_in="init",
                              weight_version="whole", paused=False, session_open=False, weights_complete=True,
                              weight_transfer_backend="gloo")
    with transfer_group([whole], "vime-pp_0", packed=True, buffer_bytes=512):
        info = EngineInfo.from_dict(whole.ask("get_weight_transfer_info"))
        assert (info.group_name, info.packed, info.packed_buffer_size_bytes) == ("vime-pp_0", True, 512)
    with pytest.raises(EngineRefused, match="holds transfer group 'vime-pp_0', not 'vime-pp_1'"):
        whole.ask("destroy_weights_update_group", group_name="vime-pp_1")
    whole.ask("destroy_weights_update_group", group_name="vime-pp_0")
    whole.ask("destroy_weights_update_group", group_name="vime-pp_0")
    assert whole.ask("get_weight_transfer_info")["group_name"] is None


def test_generating_is_refused_while_paused(whole: Receiver, checkpoint: Path, reference: Reference) -> None:
    whole.ask("pause_generation")
    assert whole.ask("is_paused")
    with pytest.raises(EngineRefused, match="continue_generation must come first"):
        whole.ask("generate", prompts=PROMPTS)
    whole.ask("continue_generation")
    assert whole.ask("generate", prompts=PROMPTS) == reference(checkpoint)


def test_a_session_in_the_open_serves_nobody(whole: Receiver) -> None:
    whole.ask("start_weight_update", is_checkpoint_format=True)
    assert whole.worker._weight_update_active
    for method, arguments in (("generate", {"prompts": PROMPTS}), ("continue_generation", {})):
        with pytest.raises(EngineRefused, match="finish_weight_update must come first"):
            whole.ask(method, **arguments)
    with pytest.raises(RuntimeError, match="already active"):
        whole.ask("start_weight_update")
    assert whole.ask("get_weight_transfer_info")["session_open"]


@pytest.mark.parametrize("sent", [0, 2, 5, 9, 13, 31])
def test_an_abandoned_session_is_gone_and_the_next_is_exact(sent: int, whole: Receiver, checkpoint: Path,
                                                            reference: Reference) -> None:
    whole.ask("pause_generation")
    whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0") as group:
        if sent:
            send([whole], group, buckets(read_checkpoint(checkpoint), sent)[0])
        assert abandon_session(whole) is None
        assert not whole.worker._weight_update_active
        info = EngineInfo.from_dict(whole.ask("get_weight_transfer_info"))
        assert (info.session_open, info.weights_complete, info.paused) == (False, False, True)
        for method, arguments in (("generate", {"prompts": PROMPTS}), ("continue_generation", {})):
            with pytest.raises(EngineRefused):
                whole.ask(method, **arguments)
    update(whole, read_checkpoint(checkpoint), "again")
    assert whole.ask("generate", prompts=PROMPTS) == reference(checkpoint)
    assert whole.ask("get_weight_version") == "again"


HALF_FILLED = 5
"""The first so many tensors of the checkpoint: gate of layer 0 is among them and up is not, and they share a layer in vLLM."""


def leave_half_filled(receiver: Receiver, checkpoint: Path) -> None:
    receiver.ask("start_weight_update")
    with transfer_group([receiver], "vime-pp_0") as group:
        bucket = buckets(read_checkpoint(checkpoint), HALF_FILLED)[0]
        assert "model.layers.0.mlp.gate_proj.weight" in bucket and "model.layers.0.mlp.up_proj.weight" not in bucket
        send([receiver], group, bucket)
        assert abandon_session(receiver) is None


def test_what_a_half_filled_layer_had_received_is_rolled_back(whole: Receiver, checkpoint: Path, reference: Reference,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rollback vLLM counts gate twice and takes the layer for complete; so this also shows that it is needed."""
    leave_half_filled(whole, checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(reload, "roll_back", lambda model: 0)
        with pytest.raises(AttributeError, match="weight_loader"):
            update(whole, read_checkpoint(checkpoint), "spoilt")
    update(whole, read_checkpoint(checkpoint), "exact")
    assert whole.ask("generate", prompts=PROMPTS) == reference(checkpoint)


def test_a_stock_back_end_is_made_to_forget_instead(whole: Receiver, checkpoint: Path, reference: Reference,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    leave_half_filled(whole, checkpoint)
    monkeypatch.setattr(reload, "roll_back", lambda model: 0)
    with monkeypatch.context() as patch:
        patch.setattr(whole.engine, "_registered_as", "nccl")
        whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0") as group:
        send([whole], group, read_checkpoint(checkpoint))
    whole.ask("finish_weight_update")
    assert whole.ask("generate", prompts=PROMPTS) == reference(checkpoint)


def test_abandoning_a_packed_groups_session(whole: Receiver) -> None:
    whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0", packed=True):
        assert abandon_session(whole) is None
    assert not whole.worker._weight_update_active


def test_abandoning_nothing_is_harmless(whole: Receiver, checkpoint: Path, reference: Reference) -> None:
    assert abandon_session(whole) is None
    assert whole.ask("generate", prompts=PROMPTS) == reference(checkpoint)


def test_an_update_that_disagrees_about_packing_is_refused_by_name(whole: Receiver) -> None:
    whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0", packed=True):
        with pytest.raises(EngineRefused, match=r"packed=False, but group 'vime-pp_0' was opened with packed=True"):
            whole.ask("update_weights_from_distributed", names=["model.norm.weight"], dtypes=[torch.bfloat16], shapes=[(96,)],
                      group_name="vime-pp_0", packed=False)
        assert whole.worker._weight_update_active


@pytest.mark.parametrize(("name", "shape", "error"), [("model.layers.9.foo.weight", (3,), ValueError),
                                                      ("model.norm.weight", (7,), AssertionError)])
def test_a_bucket_that_vllm_cannot_load_closes_the_session(name: str, shape: tuple[int, ...], error: type[Exception],
                                                          whole: Receiver) -> None:
    whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0") as group, pytest.raises(error):
        send([whole], group, {name: torch.ones(shape, dtype=torch.bfloat16)})
    assert not whole.worker._weight_update_active
    with pytest.raises(RuntimeError, match="without a matching start"):
        whole.ask("finish_weight_update")
    with pytest.raises(EngineRefused, match="broken off"):
        whole.ask("generate", prompts=PROMPTS)


def test_the_wrong_transport_and_format_are_refused(whole: Receiver) -> None:
    with pytest.raises(EngineRefused, match="back end 'nccl', this engine receives with 'gloo'"):
        whole.ask("init_weights_update_group", master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2,
                  group_name="g", backend="nccl")
    with pytest.raises(EngineRefused, match="checkpoint format only"):
        whole.ask("start_weight_update", is_checkpoint_format=False)


def test_an_llm_without_weight_transfer_is_refused(engine: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine.llm.llm_engine.vllm_config, "weight_transfer_config", None)
    with pytest.raises(EngineRefused, match="cannot take weights"):
        InProcessEngine(engine.engine.llm)


def test_the_source_closing_in_the_middle_of_a_bucket_fails_the_engine_at_once(whole: Receiver) -> None:
    """Announced, and never sent: the worker blocks in its receive until the source hangs up."""
    whole.ask("start_weight_update")
    with transfer_group([whole], "vime-pp_0") as group:
        call = whole.handle.update_weights_from_distributed.remote(
            names=["model.norm.weight"], dtypes=[torch.bfloat16], shapes=[(96,)], group_name="vime-pp_0")
        group.close(timeout_s=5)
        with pytest.raises(Exception, match="received nothing from the source"):
            call.result(5.0)
    assert not whole.worker._weight_update_active
