"""The source's end of the tests: what a trainer does to engines, in a few lines, over the real transport."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from staged_sync.engines.in_process import InProcessEngine
from staged_sync.engines.local import LocalHandle
from staged_sync.seam import Wire
from staged_sync.vllm.rendezvous import Listener, listen
from staged_sync.vllm.transport import GlooTransferGroup, open_gloo_group

DEADLINE_S = 20.0


class Receiver:
    """An engine under test: the object, for looking at, and its handle, for calls that take part in a transfer."""

    def __init__(self, llm: Any) -> None:
        self.engine = InProcessEngine(llm)
        self.handle = LocalHandle(self.engine)

    def ask(self, method: str, **kwargs: Any) -> Any:
        return getattr(self.handle, method).remote(**kwargs).result(DEADLINE_S)

    @property
    def worker(self) -> Any:
        return self.engine.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def transfer_engine(self) -> Any:
        return self.worker.weight_transfer_engine


def wait(*works: Any) -> list[Any]:
    """Results of all `works`; raises the first error, or TimeoutError at the deadline."""
    pending, deadline = list(works), time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as nothing:
        while pending:
            for work in [work for work in pending if work.poll()]:
                work.result()
                pending.remove(work)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(pending)} of {len(works)} works did not end within {DEADLINE_S} s")
            nothing.select(0.001)
    return [work.result() for work in works]


def dial(receivers: Sequence[Receiver], name: str, wire: Wire) -> tuple[Listener, Any, list[Any]]:
    """Start opening a group to `receivers` (one worker each): listener, dial, RPCs."""
    listener = listen("127.0.0.1", None)
    opening = open_gloo_group(listener, name=name, world_size=1 + len(receivers), wire=wire, timeout_s=DEADLINE_S)
    calls = [receiver.handle.init_weights_update_group.remote(
        master_address=listener.host, master_port=listener.port, rank_offset=1 + i, world_size=1 + len(receivers),
        group_name=name, backend="gloo", packed=wire.packed, packed_buffer_size_bytes=wire.packed_buffer_size_bytes,
        timeout_s=DEADLINE_S) for i, receiver in enumerate(receivers)]
    return listener, opening, calls


@contextmanager
def transfer_group(receivers: Sequence[Receiver], name: str, *, packed: bool = False,
                   buffer_bytes: int = 1 << 16) -> Iterator[GlooTransferGroup]:
    """An open group; closed at the end."""
    listener, opening, calls = dial(receivers, name, Wire("gloo", packed, buffer_bytes))
    try:
        group = wait(opening, *calls)[0]
    finally:
        listener.close()
    try:
        yield group
    finally:
        group.close(timeout_s=5)


def send(receivers: Sequence[Receiver], group: GlooTransferGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Announce and send one bucket."""
    names = list(tensors)
    calls = [receiver.handle.update_weights_from_distributed.remote(
        names=names, dtypes=[tensors[n].dtype for n in names], shapes=[tuple(tensors[n].shape) for n in names],
        group_name=group.terms.name, packed=group.terms.packed) for receiver in receivers]
    wait(group.send([tensors[n] for n in names]), *calls)


def buckets(tensors: Mapping[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{n: tensors[n] for n in names[i:i + size]} for i in range(0, len(names), size)]


def update(receiver: Receiver, tensors: Mapping[str, torch.Tensor], version: str, *, packed: bool = False,
           bucket_size: int = 7, buffer_bytes: int = 1 << 16) -> None:
    """One whole session with one group."""
    receiver.ask("pause_generation")
    receiver.ask("flush_cache")
    receiver.ask("start_weight_update")
    with transfer_group([receiver], "vime-pp_0", packed=packed, buffer_bytes=buffer_bytes) as group:
        for bucket in buckets(tensors, bucket_size):
            send([receiver], group, bucket)
        receiver.ask("finish_weight_update")
        receiver.ask("update_weight_version", weight_version=version)
        receiver.ask("continue_generation")
        receiver.ask("destroy_weights_update_group", group_name="vime-pp_0")
