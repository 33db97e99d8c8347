"""The source's end (rank 0) of a gloo transfer group: dial, send, close. Needs torch only.

Nothing here blocks longer than it was given: dialling and sending are works to be polled, closing is bounded and breaks what
is pending, so that the peers' blocked receives fail at once.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from staged_sync.errors import DeadlineExceeded, StagedSyncError, TransportError
from staged_sync.packing import as_bytes, pack
from staged_sync.seam import TransferGroup, Wire, Work
from staged_sync.vllm.gloo_group import (
    IDLE_TIMEOUT_S,
    TERMS_KEY,
    Terms,
    joined_key,
    make_device,
    make_process_group,
    start_broadcast,
)
from staged_sync.vllm.rendezvous import Listener, check_timeout, endpoint
from staged_sync.vllm.sockets import Endpoint, shut_down_connections

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Once every worker has joined, connecting them takes milliseconds; a worker that dies in between may cost this much."""


def never_destroy(thing: Any) -> None:
    """Leak `thing`. The destructor of a gloo group that holds a pending operation blocks its thread, with the interpreter
    locked, until the operation's own timeout; also when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Ended:
    """A work that has ended: with `value`, or with `error`."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    def poll(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def open_gloo_group(listener: Listener, *, name: str, world_size: int, wire: Wire, timeout_s: float) -> GlooDial:
    """Start rank 0 of transfer group `name` on `listener`, whose socket becomes the group's store.

    The work ends when all `world_size - 1` workers have joined, then `result()` is a `GlooTransferGroup`; or with
    `DeadlineExceeded` that names the missing ranks. Closing the listener before that ends the dial.
    Raises TransportError where the listener was used before or there is nobody to send to.
    """
    check_timeout(timeout_s)
    if world_size < 2:
        raise TransportError(f"transfer group {name!r} needs at least one worker (world size 2), got world size {world_size}")
    store = _host_store(listener, timeout_s)
    terms = Terms(name, world_size, wire.packed, wire.packed_buffer_size_bytes)
    store.set(TERMS_KEY, terms.encode())
    dial = GlooDial(listener, store, terms, timeout_s)
    listener.on_close = dial.cancel
    return dial


def _host_store(listener: Listener, timeout_s: float) -> dist.TCPStore:
    """A TCPStore that serves on the listener's own socket.

    `use_libuv=False`: the libuv server does not take a socket over. `wait_for_workers=False`: it would block here.
    """
    taken = listener.take_socket()
    fd = taken.detach()
    try:
        return dist.TCPStore(listener.address, listener.port, None, True, timedelta(seconds=max(timeout_s, 0.001)),
                             wait_for_workers=False, master_listen_fd=fd, use_libuv=False)
    except RuntimeError as error:
        raise TransportError(f"no store can be hosted at {endpoint(listener.host, listener.port)}: {error}") from error


class GlooDial:
    """Waiting for the workers to join (a `Work`)."""

    def __init__(self, listener: Listener, store: dist.TCPStore, terms: Terms, timeout_s: float) -> None:
        self._listener = listener
        self._store: dist.TCPStore | None = store
        self._terms = terms
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._missing = list(range(1, terms.world_size))
        self._outcome: Ended | None = None

    def poll(self) -> bool:
        """True once all workers have joined and are connected, or the deadline is over. Looks at the store, never waits for
        a worker to join."""
        if self._outcome is None:
            try:
                self._look()
            except StagedSyncError as error:
                self._end(error=error)
            except RuntimeError as error:
                self._end(error=TransportError(f"transfer group {self._terms.name!r} could not be opened at {self._where()}: "
                                               f"{error}"))
        return self._outcome is not None

    def result(self) -> GlooTransferGroup:
        if self._outcome is None:
            raise RuntimeError("result() before poll() was true")
        group: GlooTransferGroup = self._outcome.result()
        return group

    def cancel(self) -> None:
        """End the dial: workers that wait for it fail at once. Does nothing where it has ended."""
        if self._outcome is None:
            self._end(error=TransportError(f"dialling transfer group {self._terms.name!r} was given up; {self._absentees()}"))

    def _look(self) -> None:
        assert self._store is not None
        store = self._store
        self._missing = [rank for rank in self._missing if not store.check([joined_key(rank)])]
        if not self._missing:
            self._end(value=self._connect(store))
        elif time.monotonic() >= self._deadline_s:
            raise DeadlineExceeded(
                f"transfer group {self._terms.name!r}: {self._absentees()}, after {self._timeout_s:.1f} s. They were told to "
                f"dial {self._where()}: can they reach it, are they alive, do the engine sizes add up?")

    def _connect(self, store: dist.TCPStore) -> GlooTransferGroup:
        peers = [json.loads(store.get(joined_key(rank))) for rank in range(1, self._terms.world_size)]
        device, accepts_at = make_device(self._listener.address)
        left_s = max(self._deadline_s - time.monotonic(), 1.0)
        group = make_process_group(store, 0, self._terms.world_size, device, connect_timeout_s=min(left_s, CONNECT_S))
        return GlooTransferGroup(self._terms, store, group, accepts_at, {(host, port) for host, port in filter(None, peers)})

    def _absentees(self) -> str:
        return f"worker rank(s) {', '.join(map(str, self._missing)) or 'none'} of {self._terms.world_size - 1} have not joined"

    def _where(self) -> str:
        where = endpoint(self._listener.host, self._listener.port)
        return where if self._listener.host == self._listener.address else f"{where} (resolved to {self._listener.address})"

    def _end(self, value: GlooTransferGroup | None = None, error: BaseException | None = None) -> None:
        # A failed dial must hang up on the workers that wait in its store: nothing may keep it, and a traceback would.
        self._outcome = Ended(value, error.with_traceback(None) if error is not None else None)
        self._store = None
        self._listener.on_close = None


class GlooSend:
    """Broadcasts under way, in order (a `Work`). Holds the buffers until they have ended."""

    def __init__(self, name: str, buffers: Sequence[torch.Tensor], works: Sequence[Any]) -> None:
        self._name = name
        self._buffers = list(buffers)
        self._works = list(works)
        self._error: TransportError | None = None

    def poll(self) -> bool:
        while self._works and self._error is None and self._works[0].is_completed():
            self._reap(None)
        return self._error is not None or not self._works

    def result(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self, timeout_s: float) -> bool:
        """Wait until gloo has let go of every buffer, however it ended; whether it has in `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._works and (self._works[0].is_completed() or time.monotonic() < deadline_s):
            self._reap(max(deadline_s - time.monotonic(), 0.001))
        return not self._works

    def _reap(self, timeout_s: float | None) -> None:
        """Take the first work's outcome; it has completed, or is given `timeout_s` to."""
        work = self._works[0]
        try:
            work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if not work.is_completed():
                return
            self._error = self._error or TransportError(f"sending over transfer group {self._name!r} failed: {error}")
        del self._works[0]
        del self._buffers[0]


class _AllSent:
    """Ends when all of `sends` have (a `Work`)."""

    def __init__(self, sends: Sequence[GlooSend]) -> None:
        self._sends = list(sends)

    def poll(self) -> bool:
        return all(send.poll() for send in self._sends)

    def result(self) -> None:
        for send in self._sends:
            send.result()


class GlooTransferGroup:
    """Rank 0 of {source} + {all workers of all engines} over gloo. CPU tensors only."""

    def __init__(self, terms: Terms, store: dist.TCPStore, group: Any, accepts_at: Endpoint | None,
                 peers: set[Endpoint]) -> None:
        self.terms = terms
        self._store: dist.TCPStore | None = store
        self._group: Any = group
        self._accepts_at = accepts_at
        self._peers = peers
        self._sends: list[GlooSend] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def send(self, tensors: Sequence[torch.Tensor]) -> GlooSend:
        """Start broadcasting one bucket from rank 0: tensor by tensor, or packed into chunks, as the terms say.

        Raises TransportError for tensors that are not contiguous or not on the CPU, and where the group is closed or broken.
        """
        if self._group is None:
            raise TransportError(f"transfer group {self.terms.name!r} is closed")
        self._forget_ended_sends()
        _check_sendable(self.terms.name, tensors)
        if self.terms.packed:
            memory = self._memory_for(sum(tensor.nbytes for tensor in tensors))
            buffers = list(pack(tensors, self.terms.packed_buffer_size_bytes, memory))
        else:
            buffers = [as_bytes(tensor) for tensor in tensors]
        works = [start_broadcast(self._group, buffer, IDLE_TIMEOUT_S) for buffer in buffers]
        send = GlooSend(self.terms.name, buffers, works)
        self._sends.append(send)
        return send

    def synchronize(self) -> _AllSent:
        """Ends when everything sent so far has been handed to the network. Raises like `send` where the group is closed."""
        if self._group is None:
            raise TransportError(f"transfer group {self.terms.name!r} is closed")
        self._memory = torch.empty(0, dtype=torch.uint8)  # a persistent group must not hold a bucket's worth between updates
        return _AllSent(self._sends)

    def close(self, *, timeout_s: float) -> None:
        """Destroy the communicator; frees sockets, file descriptors and threads. Idempotent.

        What is still being sent is broken off, so that every peer's blocked receive fails at once. Raises DeadlineExceeded
        where gloo does not let go of it within `timeout_s`; the group is closed all the same.
        """
        check_timeout(timeout_s)
        if self._group is None:
            return
        group, store, sends = self._group, self._store, self._sends
        self._group, self._store, self._sends = None, None, []
        deadline_s = time.monotonic() + timeout_s
        if not all(send.drain(0.0) for send in sends):
            self._break_off()
            if [send for send in sends if not send.drain(max(deadline_s - time.monotonic(), 0.0))]:
                never_destroy((group, store, sends))
                raise DeadlineExceeded(
                    f"transfer group {self.terms.name!r} did not end within {timeout_s:.1f} s of closing: gloo still holds a "
                    f"broadcast, and lets go of it after {IDLE_TIMEOUT_S:.0f} s at the latest. Restart this process if engines "
                    f"stay connected to it")

    def _memory_for(self, nbytes: int) -> torch.Tensor:
        """Where a packed bucket is laid out; the same memory from bucket to bucket, since having the system find and clear it
        takes longer than the copy. A send under way keeps what it reads from."""
        if self._sends or self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory

    def _forget_ended_sends(self) -> None:
        """Raises where one has failed: the group is broken then."""
        unfinished = [send for send in self._sends if not send.poll()]
        _AllSent([send for send in self._sends if send not in unfinished]).result()
        self._sends = unfinished

    def _break_off(self) -> None:
        if self._accepts_at is None or not shut_down_connections(self._accepts_at, self._peers):
            logger.warning("transfer group %s: its connections were not found, so its peers learn of its end late",
                           self.terms.name)


def _check_sendable(name: str, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            raise TransportError(f"transfer group {name!r} sends CPU tensors; tensor {index} of the bucket is on {tensor.device}")
        if not tensor.is_contiguous():
            raise TransportError(f"transfer group {name!r} sends contiguous tensors; tensor {index} of the bucket has shape "
                                 f"{tuple(tensor.shape)} and stride {tensor.stride()}: gloo would ship wrong bytes")


def open_nccl_group(listener: Listener, *, name: str, world_size: int, wire: Wire, timeout_s: float) -> Work[TransferGroup]:
    """The same for stock vLLM NCCL receivers and CUDA tensors, see staged_sync/vllm/nccl.py. Needs vLLM."""
    from staged_sync.vllm import nccl

    return nccl.open_nccl_group(listener, name=name, world_size=world_size, wire=wire, timeout_s=timeout_s)
