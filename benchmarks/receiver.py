"""The receiving end of `benchmarks.transfer`: a process that stands for one engine's worker, and loads nothing.

It takes what each contestant sends into fresh memory, as an engine does that keeps references until a layer is complete, and
drops it. Started by `benchmarks.transfer`; answers remote calls (harness/world/rpc.py), one at a time.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness.world.process import die_with_parent
from harness.world.rpc import Server
from staged_sync.exporter import NamedTensor, TensorMeta
from staged_sync.packing import as_bytes
from staged_sync.vllm.gloo_group import GlooReceiver, Terms

TIMEOUT_S = 120.0


class Receiver:
    """Public methods are what the source may call."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._groups: dict[str, Any] = {}
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._crc: int | None = None

    # --- did everything arrive? -------------------------------------------------------------------------------------------
    def watch(self, on: bool) -> None:
        """From now on keep a CRC-32 of all bytes that arrive, in the order of the model; it costs time."""
        self._crc = 0 if on else None

    def crc(self) -> int | None:
        return self._crc

    def _arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._crc is not None:
                self._crc = zlib.crc32(as_bytes(tensor.cpu()).numpy(), self._crc)

    # --- staged-sync: the names that its source calls (docs/seam.md) ------------------------------------------------------
    def init_weights_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int,
                                  group_name: str, backend: str, packed: bool, packed_buffer_size_bytes: int,
                                  timeout_s: float) -> None:
        if backend == "nccl":
            self._groups[group_name] = StockNcclReceiver(master_address, master_port, rank_offset, world_size, self._device,
                                                         packed, packed_buffer_size_bytes)
            return
        terms = Terms(group_name, world_size, packed, packed_buffer_size_bytes)
        self._groups[group_name] = GlooReceiver.join(master_address, master_port, rank_offset, terms, timeout_s=timeout_s,
                                                     receive_timeout_s=timeout_s)

    def update_weights_from_distributed(self, names: Sequence[str], dtypes: Sequence[torch.dtype],
                                        shapes: Sequence[Sequence[int]], group_name: str, packed: bool) -> None:
        metas = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
        for tensors in self._groups[group_name].receive(metas):
            self._arrived(tensor for _, tensor in tensors)
        self._finish()

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._groups.pop(group_name).destroy()

    # --- torch.distributed: the limit, and the plain way ------------------------------------------------------------------
    def join(self, host: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=TIMEOUT_S))
        dist.init_process_group("nccl" if self._device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S))

    def receive_flat(self, nbytes: int, fresh: bool) -> None:
        """Everything as one tensor: into memory that was touched before, so that nothing but the wire counts, or into `fresh`
        memory, which an engine's rule demands and the system must find first."""
        if not fresh and self._flat.numel() != nbytes:
            self._flat = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if fresh else self._flat
        dist.broadcast(flat, src=0)
        self._finish()
        self._arrived([flat])

    def receive_one(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.broadcast(tensor, src=0)
        self._finish()
        self._arrived([tensor])

    # --- a checkpoint -----------------------------------------------------------------------------------------------------
    def load(self, file: str, names: Sequence[str]) -> None:
        """Into memory of this process (or its device), as a loader copies into parameters; the file is only mapped."""
        tensors = load_file(file)
        for name in names:
            self._arrived([tensors.pop(name).to(self._device, copy=True)])
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StockNcclReceiver:
    """What a stock vLLM worker does (vllm/distributed/weight_transfer/nccl_engine.py), with its own functions and without a
    model. Needs vLLM and CUDA; has not run on a GPU yet."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: torch.device, packed: bool,
                 buffer_bytes: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        self._device, self._packed, self._buffer_bytes = device, packed, buffer_bytes
        self._communicator = stateless_init_process_group(host, port, rank, world_size, device)

    def receive(self, metas: Sequence[TensorMeta]) -> Iterator[list[NamedTensor]]:
        from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_NUM_BUFFERS, packed_nccl_broadcast_consumer

        if self._packed:
            arrived: list[list[NamedTensor]] = []
            packed_nccl_broadcast_consumer(
                iterator=iter((meta.name, (meta.shape, meta.dtype)) for meta in metas), group=self._communicator, src=0,
                post_unpack_func=arrived.append, buffer_size_bytes=self._buffer_bytes,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS, device=self._device)
            yield from arrived
            return
        for meta in metas:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
            self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            yield [(meta.name, tensor)]

    def destroy(self) -> None:
        self._communicator.destroy()


def main(address: str, device: str, parent_pid: int) -> None:
    """Serve until the source ends this process, or has ended itself."""
    die_with_parent(parent_pid)
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    server = Server(address)
    server.target = Receiver(device)
    while True:
        server.serve_one()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], os.getppid())
