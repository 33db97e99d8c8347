"""The source's end (rank 0) of a transfer group to stock vLLM NCCL receivers. Needs vLLM and CUDA in the trainer.

Uses the parts below vLLM's own trainer engine, because that opens and closes a session by itself: a
`vllm.distributed.utils.StatelessProcessGroup` over a store on the socket that the source already listens on, and a
`PyNcclCommunicator` over it (as vllm/distributed/weight_transfer/nccl_common.py does, `stateless_init_process_group`, which
takes neither a socket nor a timeout). Checked against the installed vLLM's signatures; **has not run on a GPU yet**.

Three things that stock NCCL cannot do better:

* The meeting blocks (the store's wait for workers, then `ncclCommInitRank`), so it runs in one helper thread per dial. The store
  gives up after the dial's timeout; an `ncclCommInitRank` that hangs ends only with this process. A communicator that
  comes up after its dial was given up is destroyed.
* Nobody can say *which* workers are missing: vLLM's workers only count themselves in the store. The text says how many.
* Enqueueing can block the source's own thread: NCCL connects when it first uses a way to send, and its queue has an end. A
  watchdog aborts the communicator after the dial's timeout; until then a refusal by an engine is not seen.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from staged_sync.errors import DeadlineExceeded, TransportError
from staged_sync.packing import misaligned, pack
from staged_sync.seam import Wire
from staged_sync.vllm.rendezvous import Listener, check_timeout, endpoint


def open_nccl_group(listener: Listener, *, name: str, world_size: int, wire: Wire, timeout_s: float) -> NcclDial:
    """Start rank 0 of transfer group `name` on `listener`, on the current CUDA device; see `open_gloo_group`.

    Raises TransportError where this process has no CUDA, or the listener was used before.
    """
    check_timeout(timeout_s)
    if world_size < 2:
        raise TransportError(f"transfer group {name!r} needs at least one worker (world size 2), got world size {world_size}")
    return NcclDial(listener, name, world_size, wire, _current_device(), timeout_s)


def _current_device() -> torch.device:
    if not torch.cuda.is_available():
        raise TransportError("an NCCL transfer group needs CUDA, and torch finds none here; CPU engines use the gloo back end")
    return torch.device("cuda", torch.cuda.current_device())


class NcclDial:
    """Waiting for the workers in a helper thread (a `Work`)."""

    def __init__(self, listener: Listener, name: str, world_size: int, wire: Wire, device: torch.device,
                 timeout_s: float) -> None:
        self._name, self._wire = name, wire
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        self._where = endpoint(listener.host, listener.port)
        self._given_up: Exception | None = None
        self._group: NcclTransferGroup | None = None
        self._meeting: Future[Any] = Future()
        arguments = (self._meeting, listener.take_socket(), listener.address, listener.port, world_size, device, timeout_s)
        threading.Thread(target=_meet, args=arguments, name=f"staged-sync dial {name}", daemon=True).start()
        listener.on_close = self.cancel

    def poll(self) -> bool:
        if self._given_up is None and not self._meeting.done() and time.monotonic() >= self._deadline_s:
            self._give_up(self._deadline_exceeded("they did not meet"))
        return self._given_up is not None or self._meeting.done()

    def result(self) -> NcclTransferGroup:
        if self._given_up is not None:
            raise self._given_up
        if self._group is None:
            try:
                communicator = self._meeting.result(timeout=0)
            except TransportError:
                raise
            except torch.distributed.DistStoreError as error:
                raise self._deadline_exceeded(str(error)) from error
            except Exception as error:
                raise TransportError(f"transfer group {self._name!r} could not be opened at {self._where}: "
                                     f"{type(error).__name__}: {error}") from error
            self._group = NcclTransferGroup(self._name, self._wire, communicator, self._timeout_s)
        return self._group

    def cancel(self) -> None:
        """End the dial. Does nothing where it has ended; workers wait on until their own timeout."""
        if self._given_up is None and not self._meeting.done():
            self._give_up(TransportError(f"dialling transfer group {self._name!r} was given up"))

    def _deadline_exceeded(self, detail: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"transfer group {self._name!r}: not all workers have joined over NCCL within {self._timeout_s:.1f} s ({detail}; the "
            f"source counts as one). They were told to dial {self._where}: can they reach it, are they alive, do the engine "
            f"sizes add up?")

    def _give_up(self, error: Exception) -> None:
        self._given_up = error
        self._meeting.add_done_callback(_destroy_late)


def _destroy_late(meeting: Future[Any]) -> None:
    if meeting.exception() is None:
        meeting.result().destroy()


def _meet(meeting: Future[Any], listening: socket.socket, host: str, port: int, world_size: int, device: torch.device,
          timeout_s: float) -> None:
    """Body of the helper thread: resolve `meeting` with a usable PyNcclCommunicator, or with what went wrong."""
    try:
        meeting.set_result(_connect(listening, host, port, world_size, device, timeout_s))
    except BaseException as error:  # everything belongs to whoever waits for the dial
        meeting.set_exception(error)


def _connect(listening: socket.socket, host: str, port: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device belongs to the thread
    # Not StatelessProcessGroup.create(listen_socket=): where the wait fails, 0.32 closes the descriptor a second time, and by
    # then it may be somebody else's.
    store = torch.distributed.TCPStore(host, port, world_size, True, timedelta(seconds=max(timeout_s, 0.001)),
                                       wait_for_workers=True, master_listen_fd=listening.detach(), use_libuv=False)
    group = StatelessProcessGroup(rank=0, world_size=world_size, store=store)
    with unpinned_nccl_env():
        communicator = PyNcclCommunicator(group, device=device)
    _check_usable(communicator, f"the communicator to {world_size - 1} workers at {endpoint(host, port)}")
    return communicator


def _check_usable(communicator: Any, what: str) -> None:
    """PyNcclCommunicator turns into one whose broadcast silently does nothing where it finds no NCCL, or was destroyed."""
    if communicator.disabled or not communicator.available:
        raise TransportError(f"{what} cannot move bytes: PyNcclCommunicator disabled itself (no CUDA, no NCCL library, or "
                             f"VLLM_DISABLE_PYNCCL is set), and its broadcast would do nothing and say nothing")


class CudaWork:
    """Ends when the device has passed `event` (a `Work`); holds what must live until then."""

    def __init__(self, event: Any, buffers: Sequence[torch.Tensor] = ()) -> None:
        self._event = event
        self._buffers: Sequence[torch.Tensor] = buffers

    def poll(self) -> bool:
        if not self._event.query():
            return False
        self._buffers = ()
        return True

    def result(self) -> None:
        self._event.synchronize()  # has passed; raises what the device reports


class NcclTransferGroup:
    """Rank 0 of {source} + {all workers of all engines} over NCCL. CUDA tensors of one device only. `enqueue_timeout_s`: how long
    NCCL may block a `send`."""

    def __init__(self, name: str, wire: Wire, communicator: Any, enqueue_timeout_s: float) -> None:
        self.name = name
        self._wire = wire
        self._enqueue_timeout_s = enqueue_timeout_s
        self._communicator: Any = communicator
        self._sends: list[CudaWork] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> CudaWork:
        """Enqueue the broadcast of one bucket on the current stream: tensor by tensor, or packed into chunks.

        Raises TransportError for tensors that are not contiguous or not on the group's device, for a packed bucket that
        stock vLLM cannot unpack, and where the group is closed or has become unusable; DeadlineExceeded where NCCL does not
        take the bucket in time, and then the group is gone.
        """
        communicator = self._usable()
        self._sends = [send for send in self._sends if not send.poll()]
        self._check_sendable(tensors, communicator.device)
        stream = torch.cuda.current_stream(communicator.device)
        buffers = pack(tensors, self._wire.packed_buffer_size_bytes) if self._wire.packed else iter(tensors)
        kept = []
        with self._watched(communicator):
            for buffer in buffers:
                communicator.broadcast(buffer, src=0, stream=stream)
                kept.append(buffer)
        self._sends.append(self._mark(stream, kept))
        return self._sends[-1]

    def synchronize(self) -> CudaWork:
        """Ends when everything sent so far has left this device."""
        return self._mark(torch.cuda.current_stream(self._usable().device), ())

    def close(self, *, timeout_s: float) -> None:
        """Abort the communicator. Idempotent. vLLM waits up to 5 s for the abort in a thread of its own, whatever `timeout_s`
        says (PyNcclCommunicator.destroy); stock receivers keep their end until their next init, and leak it then."""
        check_timeout(timeout_s)
        if self._communicator is not None:
            communicator, self._communicator = self._communicator, None
            communicator.destroy()
            self._sends = []

    @contextmanager
    def _watched(self, communicator: Any) -> Iterator[None]:
        """Abort the communicator, from another thread, where the block takes too long: nothing else ends a call of NCCL."""
        aborted = threading.Event()

        def abort() -> None:
            aborted.set()
            communicator.destroy()

        watchdog = threading.Timer(self._enqueue_timeout_s, abort)
        watchdog.daemon = True
        watchdog.start()
        cause: Exception | None = None
        try:
            yield
        except Exception as error:
            if not aborted.is_set():
                raise
            cause = error
        finally:
            watchdog.cancel()
        if aborted.is_set():
            raise DeadlineExceeded(
                f"transfer group {self.name!r}: NCCL did not take a bucket within {self._enqueue_timeout_s:.1f} s, so its "
                f"communicator was aborted. It blocks while it connects to a worker that does not answer: look at the engines' "
                f"logs, and at NCCL's with NCCL_DEBUG=INFO") from cause

    def _usable(self) -> Any:
        if self._communicator is None:
            raise TransportError(f"transfer group {self.name!r} is closed")
        _check_usable(self._communicator, f"transfer group {self.name!r}")
        return self._communicator

    def _mark(self, stream: Any, buffers: Sequence[torch.Tensor]) -> CudaWork:
        event = torch.cuda.Event()
        event.record(stream)
        return CudaWork(event, buffers)

    def _check_sendable(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.device != device:
                raise TransportError(f"transfer group {self.name!r} sends from {device}; tensor {index} of the bucket is on "
                                     f"{tensor.device}")
            if not tensor.is_contiguous():
                raise TransportError(f"transfer group {self.name!r} sends contiguous tensors; tensor {index} of the bucket has "
                                     f"shape {tuple(tensor.shape)} and stride {tensor.stride()}: NCCL would read past it")
        if self._wire.packed:
            specs = [(tensor.dtype, tensor.shape) for tensor in tensors]
            if bad := misaligned(specs, self._wire.packed_buffer_size_bytes):
                raise TransportError(
                    f"transfer group {self.name!r}: packed, tensor(s) {', '.join(map(str, bad))} of the bucket would begin at "
                    f"offsets that stock vLLM cannot view as {tensors[bad[0]].dtype}; it would die in unpack_tensor. Send "
                    f"unpacked (vllm_weight_sync_packed=False)")
