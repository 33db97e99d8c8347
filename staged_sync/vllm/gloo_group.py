"""What both ends of a gloo transfer group share: the store's keys, the terms, and how the process group is made.

The source (rank 0) hosts a TCPStore on the socket it listens on, and writes the terms there. A worker dials it, compares the
terms with what its engine was told, claims its rank and publishes where its gloo device accepts connections. When every worker
has, all of them build a ProcessGroupGloo over that store. Strings and JSON only: nothing is pickled.

Needs torch only. The worker's end is used by `staged_sync.vllm.gloo_engine` inside vLLM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from staged_sync.errors import TransportError
from staged_sync.exporter import NamedTensor, TensorMeta
from staged_sync.packing import as_bytes, plan_chunks, unpack
from staged_sync.vllm.rendezvous import bare_host, check_timeout, endpoint, is_own_address, reach
from staged_sync.vllm.sockets import Endpoint, listening_endpoints

TERMS_KEY = "terms"
IDLE_TIMEOUT_S = 1800.0
"""Upper bound of one gloo operation, pytorch's own default. The real bounds are the caller's deadlines: closing either end
ends the other's operation at once."""

POISON = 0xFF
"""Receive buffers are filled with this byte: NaN in every floating dtype, so that bytes that never came show up."""


def joined_key(rank: int) -> str:
    return f"joined/{rank}"


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends must agree on before a byte moves; `name` is for texts only (vLLM ignores group names)."""

    name: str
    world_size: int
    packed: bool
    packed_buffer_size_bytes: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def check_source(self, encoded: str) -> None:
        """Raise TransportError that names every term in which the source's differ from these."""
        theirs = json.loads(encoded)
        ours = asdict(self)
        relevant = ["world_size", "packed", *(["packed_buffer_size_bytes"] if self.packed else [])]
        differing = [f"{key}: the source has {theirs.get(key)!r}, the engine was told {ours[key]!r}"
                     for key in relevant if theirs.get(key) != ours[key]]
        if differing:
            raise TransportError(f"transfer group {self.name!r}: both ends must agree before a byte moves; "
                                 + "; ".join(differing))


def make_device(address: str) -> tuple[Any, Endpoint | None]:
    """A gloo device that accepts on `address`, and where it accepts (None where that cannot be found out).

    gloo's default device binds what the host's name resolves to, which other hosts often cannot reach; we bind the address
    that the two ends are known to reach each other by.
    """
    before = listening_endpoints()
    if is_own_address(address):
        device = dist.ProcessGroupGloo.create_device(hostname=address)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    new = listening_endpoints() - before
    return device, new.pop() if len(new) == 1 else None


def make_process_group(store: dist.Store, rank: int, world_size: int, device: Any, *, connect_timeout_s: float) -> Any:
    """A ProcessGroupGloo outside of torch's registry. Waits for all members, at most about `connect_timeout_s`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=max(connect_timeout_s, 0.001))
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def start_broadcast(group: Any, buffer: torch.Tensor, timeout_s: float) -> Any:
    """Start one broadcast from rank 0 of a uint8 buffer; returns torch's Work."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=timeout_s)
    return group.broadcast([buffer], options)


class GlooReceiver:
    """A worker's end of a transfer group; named like vLLM's PyNcclCommunicator (`broadcast`, `destroy`), whose slot it fills."""

    def __init__(self, terms: Terms, rank: int, store: dist.Store, group: Any, receive_timeout_s: float) -> None:
        self.terms = terms
        self.rank = rank
        self._store: dist.Store | None = store
        self._group = group
        self._receive_timeout_s = receive_timeout_s

    @classmethod
    def join(cls, host: str, port: int, rank: int, terms: Terms, *, timeout_s: float,
             receive_timeout_s: float = IDLE_TIMEOUT_S) -> GlooReceiver:
        """Join group `terms.name` as `rank` (1 ...). Waits for the source and all other workers, at most about `timeout_s`;
        afterwards each `broadcast` waits for at most `receive_timeout_s`.

        Raises TransportError where nobody listens at `host:port`, where the terms differ, or where the rank is taken.
        """
        deadline_s = time.monotonic() + check_timeout(timeout_s)
        check_timeout(receive_timeout_s)
        if not 1 <= rank < terms.world_size:
            raise TransportError(f"transfer group {terms.name!r} has workers 1 to {terms.world_size - 1}; this engine was given "
                                 f"a rank offset that makes this worker rank {rank}")
        local_address = reach(host, port, timeout_s=timeout_s)
        try:
            store = dist.TCPStore(bare_host(host), port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
            terms.check_source(store.get(TERMS_KEY).decode())
            if store.add(f"claimed/{rank}", 1) != 1:
                raise TransportError(f"rank {rank} of transfer group {terms.name!r} is taken by another worker: two engines "
                                     f"were given overlapping rank offsets")
            device, accepts_at = make_device(local_address)
            store.set(joined_key(rank), json.dumps(accepts_at))
            group = make_process_group(store, rank, terms.world_size, device, connect_timeout_s=deadline_s - time.monotonic())
        except dist.DistError as error:
            raise TransportError(f"rank {rank} could not join transfer group {terms.name!r} at {endpoint(host, port)} within "
                                 f"{timeout_s:.1f} s: {error}") from error
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"rank {rank} could not connect to all of transfer group {terms.name!r} at "
                                 f"{endpoint(host, port)}: {error}") from error
        return cls(terms, rank, store, group, receive_timeout_s)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Receive the next tensor of the group in place: CPU, contiguous, as many bytes as the source sends.

        Blocks until it is in. Raises TransportError at once where the source has closed its end, and after the group's
        receive timeout where nothing comes. `stream` is ignored.
        """
        if self._group is None:
            raise TransportError(f"rank {self.rank} has left transfer group {self.terms.name!r}")
        try:
            start_broadcast(self._group, as_bytes(tensor), self._receive_timeout_s).wait()
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank} of transfer group {self.terms.name!r} received nothing from the source: "
                                 f"{error}") from error

    def receive(self, metas: Sequence[TensorMeta]) -> Iterator[list[NamedTensor]]:
        """Receive the next bucket, announced as `metas`: what one broadcast brings, by broadcast, a chunk when packed, else one
        tensor. Raises like `broadcast`.

        Every buffer is a fresh one: vLLM keeps references to what it loads until the layer is complete.
        """
        if self.terms.packed:
            chunks = plan_chunks([meta.nbytes for meta in metas], self.terms.packed_buffer_size_bytes)
        else:
            chunks = [range(i, i + 1) for i in range(len(metas))]
        for chunk in chunks:
            announced = [metas[i] for i in chunk]
            buffer = torch.full((sum(meta.nbytes for meta in announced),), POISON, dtype=torch.uint8)
            self.broadcast(buffer)
            tensors = unpack(buffer, [(meta.dtype, meta.shape) for meta in announced])
            yield [(meta.name, tensor) for meta, tensor in zip(announced, tensors, strict=True)]

    def destroy(self) -> None:
        """Leave the group: connections, threads and file descriptors go. Idempotent."""
        self._group = None
        self._store = None
