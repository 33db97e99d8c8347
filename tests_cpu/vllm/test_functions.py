"""vime's module functions, over real gloo into engines in this process, without a trainer world around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staged_sync import (
    ConfigurationError,
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
    update_weights_from_distributed,
)
from staged_sync.engines.local import LocalHandle
from staged_sync.packing import plan_chunks, unpack
from staged_sync.vllm.gloo_group import GlooReceiver, Terms

ARGS = SimpleNamespace(rollout_num_gpus_per_engine=1, update_weight_call_timeout=20.0, update_weight_phase_timeout=30.0,
                       update_weight_timeout=60.0, update_weight_packed_buffer_size=64)

TENSORS = [("strided", torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()), ("empty", torch.zeros(0, 4)),
           ("scalar", torch.tensor(3.5)), ("expanded", torch.ones(1).expand(5)),
           ("parameter", torch.nn.Parameter(torch.arange(30, dtype=torch.float32)))]


class Engine:
    """What an engine's worker does with the wire, and nothing else."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.group: GlooReceiver | None = None

    def get_weight_transfer_info(self) -> None:
        """Being there is enough to be told `packed` when the group is opened."""

    def init_weights_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
                                  backend: str, packed: bool, packed_buffer_size_bytes: int, timeout_s: float) -> None:
        assert backend == "gloo"
        self.terms = Terms(group_name, world_size, packed, packed_buffer_size_bytes)
        self.group = GlooReceiver.join(master_address, master_port, rank_offset, self.terms, timeout_s=timeout_s,
                                       receive_timeout_s=timeout_s)

    def update_weights_from_distributed(self, names: Sequence[str], dtypes: Sequence[torch.dtype],
                                        shapes: Sequence[tuple[int, ...]], group_name: str, packed: bool) -> None:
        assert self.group is not None and packed == self.terms.packed
        specs = list(zip(dtypes, shapes, strict=True))
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in specs]
        if not packed:
            for name, (dtype, shape) in zip(names, specs, strict=True):
                self.weights[name] = torch.empty(shape, dtype=dtype)
                self.group.broadcast(self.weights[name])
            return
        for chunk in plan_chunks(sizes, self.terms.packed_buffer_size_bytes):
            buffer = torch.empty(sum(sizes[i] for i in chunk), dtype=torch.uint8)
            self.group.broadcast(buffer)
            self.weights |= zip((names[i] for i in chunk), unpack(buffer, [specs[i] for i in chunk]), strict=True)

    def destroy_weights_update_group(self, group_name: str) -> None:
        if self.group is not None:
            self.group.destroy()
            self.group = None


@pytest.fixture
def engines() -> Iterator[tuple[list[Engine], list[Any]]]:
    plain = [Engine(), Engine()]
    handles = [LocalHandle(engine) for engine in plain]
    yield plain, handles
    for handle in handles:
        assert handle.shut_down(timeout_s=10)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_connect_update_disconnect(packed: bool, engines: tuple[list[Engine], list[Any]]) -> None:
    plain, handles = engines
    args = SimpleNamespace(**vars(ARGS), vllm_weight_sync_packed=packed)
    group = connect_rollout_engines_from_distributed(args, "mine", handles)
    assert update_weights_from_distributed("mine", group, 1, handles, TENSORS) == []
    assert update_weights_from_distributed("mine", group, 2, handles, TENSORS[:1], packed=packed) == []
    for engine in plain:
        assert {name: tensor.detach().equal(engine.weights[name]) for name, tensor in TENSORS} == dict.fromkeys(
            (name for name, _ in TENSORS), True)
    with pytest.raises(ValueError, match=f"mine was opened with packed={packed}"):
        update_weights_from_distributed("mine", group, 3, handles, TENSORS, packed=not packed)
    disconnect_rollout_engines_from_distributed(args, "mine", group, handles)
    disconnect_rollout_engines_from_distributed(args, "mine", group, handles)
    assert [engine.group for engine in plain] == [None, None]


def test_wrong_input_is_said_before_anybody_is_asked() -> None:
    with pytest.raises(ConfigurationError, match="rollout_engines must name at least one engine"):
        connect_rollout_engines_from_distributed(ARGS, "mine", [])
