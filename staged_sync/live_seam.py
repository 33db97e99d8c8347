"""The real world: torch.distributed and Megatron for the trainer, Ray or any `.remote()` handle for engines, gloo or NCCL wires.

Trainer ranks meet on a gloo group of their own (`ProcessGroupGloo` on a prefix of the default store, by generation): it is
not in torch's registry, is never split from the default group, and can be replaced after a failure.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from staged_sync.errors import GatherError, RanksAbsent
from staged_sync.seam import Coordinates, GatherGroup, TransferGroup, Wire, Work
from staged_sync.vllm import rendezvous, transport

logger = logging.getLogger(__name__)

POLL_FIRST_S, POLL_LAST_S = 50e-6, 5e-3
POLL_SHARE = 1 / 16
"""Polling starts eager and backs off by the time that was waited, so that an end is noticed late by at most a sixteenth of it:
a bucket takes 100 µs (a small one, gloo), 10 ms (512 MiB, NCCL) or seconds (an engine that loads)."""

VERDICT_S = 2.0
"""How long ranks wait for the lead to say who was absent, after a status barrier has failed on all of them."""

INLINE_BYTES = 4096
"""What of a status everybody gets at once; enough for any failure and any rank's introduction."""

LOOK_S = 1.0
"""How often a rank that waits in a status barrier asks the store whether the barrier is lost."""

_KEY = "staged-sync/control"
_SEAMS = itertools.count()


def _broken(generation: int) -> str:
    return f"broken/{generation}"


class LiveSeam:
    """The seam of one trainer rank. Needs `torch.distributed` and Megatron's `parallel_state` to be initialised."""

    def __init__(self, model: Sequence[torch.nn.Module], *, store: dist.Store | None = None) -> None:
        device = next((p.device for chunk in model for p in chunk.parameters()), torch.device("cpu"))
        self.backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        self._given_store = store

    @functools.cached_property
    def _store(self) -> dist.Store:
        """The corner of the default store that this seam's control groups meet at; the store outlives any rank under torchrun
        (the agent hosts it).

        Every seam has a corner of its own: a second updater in the same job must not find the first one's rendezvous. Counted
        when ranks first meet, which all of them do in the same order; a seam that never meets anybody takes no number.
        """
        store = self._given_store if self._given_store is not None else dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"{_KEY}/{next(_SEAMS)}", store)

    @functools.cached_property
    def _rank(self) -> int:
        return dist.get_rank()

    @functools.cached_property
    def _world_size(self) -> int:
        return dist.get_world_size()

    @functools.cached_property
    def _coordinates(self) -> Coordinates:
        return _megatron_coordinates()

    def coordinates(self) -> Coordinates:
        return self._coordinates

    # --- the clock ------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_any(self, works: Sequence[Work[Any]], *, timeout_s: float) -> bool:
        began, limit = self.now(), rendezvous.check_timeout(timeout_s)
        while not any(work.poll() for work in works):
            waited = self.now() - began
            if waited >= limit:
                return False
            time.sleep(min(max(waited * POLL_SHARE, POLL_FIRST_S), POLL_LAST_S, limit - waited))
        return True

    # --- the trainer's own groups -----------------------------------------------------------------------------------------

    def all_gather(self, tensor: torch.Tensor, group: GatherGroup, *, timeout_s: float) -> list[torch.Tensor]:
        members = _megatron_group(group)
        shards = [torch.empty_like(tensor) for _ in range(members.size())]
        try:
            work = dist.all_gather(shards, tensor, group=members, async_op=True)
            if self.backend == "gloo":
                work.wait(timedelta(seconds=timeout_s))
            else:
                work.wait()  # NCCL: orders the stream; the group's own watchdog bounds it
        except RuntimeError as error:
            raise GatherError(f"the all-gather of {tuple(tensor.shape)} {tensor.dtype} in the {group} group (ranks "
                              f"{dist.get_process_group_ranks(members)}) failed on rank {self._rank}: {error}") from error
        return shards

    def open_control_group(self, generation: int, *, timeout_s: float) -> _GlooControlGroup:
        return _GlooControlGroup(self._store, generation, self._rank, self._world_size, timeout_s)

    def broken_control_generation(self) -> int:
        generation = -1
        try:
            while self._store.check([_broken(generation + 1)]):
                generation += 1
        except dist.DistError as error:
            raise _store_is_gone(error) from error
        return generation

    def report_broken_control(self, generation: int, reason: str) -> str:
        """The lead's reason counts, since it names the absent; without the lead, that of whoever writes first."""
        key = _broken(generation)
        if self._rank != 0:
            try:
                self._store.wait([key], timedelta(seconds=VERDICT_S))
            except dist.DistError:
                logger.warning("the lead did not say why control group %d broke; this rank does", generation)
        try:
            return self._store.compare_set(key, "", reason).decode()
        except dist.DistError as error:
            return f"{reason} (told to nobody: {_store_is_gone(error)})"

    # --- engines ----------------------------------------------------------------------------------------------------------

    def call(self, target: Any, method: str, /, **kwargs: Any) -> Work[Any]:
        return as_work(getattr(target, method).remote(**kwargs))

    def identity(self, target: Any) -> str:
        for name in ("_actor_id", "_ray_actor_id"):  # Ray 2.50 and later, and before
            if (actor := getattr(target, name, None)) is not None and hasattr(actor, "hex"):
                return str(actor.hex())
        own = getattr(target, "identity", "")
        return own if isinstance(own, str) else ""

    def has_method(self, target: Any, method: str) -> bool:
        return hasattr(target, method)

    # --- transfer groups ----------------------------------------------------------------------------------------------------

    def listen(self, *, address: str | None, port_range: tuple[int, int] | None) -> rendezvous.Listener:
        # The way to where all ranks met is the way to other hosts; the engines' own addresses are not known here.
        peers = [os.environ["MASTER_ADDR"]] if os.environ.get("MASTER_ADDR") else []
        return rendezvous.listen(address or _ray_node_address(), port_range, peers)

    def open_transfer_group(self, listener: rendezvous.Listener, *, name: str, world_size: int, wire: Wire,
                            timeout_s: float) -> Work[TransferGroup]:
        opener = transport.open_nccl_group if wire.backend == "nccl" else transport.open_gloo_group
        return opener(listener, name=name, world_size=world_size, wire=wire, timeout_s=timeout_s)

    def stacks(self) -> str:
        with tempfile.TemporaryFile() as file:  # faulthandler writes to a file descriptor only
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode(errors="replace")


# --- references ---------------------------------------------------------------------------------------------------------

class FutureWork:
    """A `concurrent.futures.Future` as work."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def poll(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        return self._future.result(timeout=0)


def as_work(reference: Any) -> Work[Any]:
    """What `.remote()` returned, as work. Raises TypeError for what cannot be watched without blocking."""
    if callable(getattr(reference, "poll", None)) and callable(getattr(reference, "result", None)):
        return reference
    if isinstance(reference, Future):
        return FutureWork(reference)
    if callable(getattr(reference, "future", None)):  # Ray: looking at a future costs nothing, asking Ray a round trip
        return FutureWork(reference.future())
    raise TypeError(f"an engine handle's .remote() must return a Ray reference, a concurrent.futures.Future or an object with "
                    f"poll() and result(), got {type(reference).__name__}")


# --- Megatron -----------------------------------------------------------------------------------------------------------

def _megatron_coordinates() -> Coordinates:
    """This rank's place (megatron/core/parallel_state.py). DP counts context parallel."""
    from megatron.core import parallel_state as mpu
    return Coordinates(
        rank=dist.get_rank(), tp=mpu.get_tensor_model_parallel_rank(), pp=mpu.get_pipeline_model_parallel_rank(),
        dp=mpu.get_data_parallel_rank(with_context_parallel=True), etp=mpu.get_expert_tensor_parallel_rank(),
        ep=mpu.get_expert_model_parallel_rank(), edp=mpu.get_expert_data_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(), pp_size=mpu.get_pipeline_model_parallel_world_size(),
        dp_size=mpu.get_data_parallel_world_size(with_context_parallel=True),
        etp_size=mpu.get_expert_tensor_parallel_world_size(), ep_size=mpu.get_expert_model_parallel_world_size(),
        edp_size=mpu.get_expert_data_parallel_world_size())


def _megatron_group(kind: GatherGroup) -> dist.ProcessGroup:
    from megatron.core import parallel_state as mpu
    getters: dict[GatherGroup, Callable[[], dist.ProcessGroup]] = {
        "tp": mpu.get_tensor_model_parallel_group, "etp": mpu.get_expert_tensor_parallel_group,
        "ep": mpu.get_expert_model_parallel_group}
    return getters[kind]()


def _ray_node_address() -> str | None:
    """The address that other Ray nodes reach this one at; None outside a Ray worker."""
    import sys
    ray = sys.modules.get("ray")  # a process that is a Ray worker has imported it
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.util.get_node_ip_address())


# --- the control group --------------------------------------------------------------------------------------------------

class _GlooControlGroup:
    """One generation of the control group: `ProcessGroupGloo` over all trainer ranks."""

    def __init__(self, store: dist.Store, generation: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._all_generations, self._generation = store, generation
        self._store = dist.PrefixStore(f"generation-{generation}", store)
        self._rank, self._world_size = rank, world_size
        self._exchanges = 0
        timeout = timedelta(seconds=rendezvous.check_timeout(timeout_s))
        try:
            self._group = dist.ProcessGroupGloo(self._store, rank, world_size, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise self._absent(timeout_s, error) from error

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """One all-reduce of the longest length (log n steps); the payloads follow only where there are any."""
        timeout = timedelta(seconds=rendezvous.check_timeout(timeout_s))
        self._exchanges += 1
        try:
            longest = torch.tensor([len(payload)])
            reduce = dist.AllreduceOptions()
            reduce.reduceOp, reduce.timeout = dist.ReduceOp.MAX, timeout
            self._wait(self._group.allreduce([longest], reduce))
            if longest.item() == 0:
                return [b""] * self._world_size
            return self._all_payloads(payload, int(longest.item()), timeout)
        except RuntimeError as error:
            raise self._absent(timeout_s, error) from error

    def close(self) -> None:
        del self._group

    def _wait(self, work: Any) -> None:
        """Wait for gloo, whose own time-out ends the work, and now and then look whether a rank has said it will not come."""
        pause, look_s = POLL_FIRST_S, time.monotonic() + LOOK_S
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, POLL_LAST_S)
            if time.monotonic() > look_s:
                look_s += LOOK_S
                if self._all_generations.check([_broken(self._generation)]):
                    raise RuntimeError("another rank reported this control group broken")
        work.wait()  # raises what gloo met

    def _all_payloads(self, payload: bytes, longest: int, timeout: timedelta) -> list[bytes]:
        """The beginnings of all payloads at once; the rest of long ones from their own ranks, one after the other.

        At connect a few sources list thousands of tensors: gathering everything at the longest payload's size would cost that
        size times the number of ranks, on every rank.
        """
        inline = min(longest, INLINE_BYTES)
        beginning = _tensor(len(payload).to_bytes(8, "little") + payload[:inline].ljust(inline, b"\0"))
        everybody = [torch.empty_like(beginning) for _ in range(self._world_size)]
        gather = AllgatherOptions()
        gather.timeout = timeout
        self._wait(self._group.allgather([everybody], [beginning], gather))
        payloads = []
        for rank, framed in enumerate(map(_bytes, everybody)):
            length = int.from_bytes(framed[:8], "little")
            rest = b"" if length <= inline else self._broadcast(payload[inline:], length - inline, rank, timeout)
            payloads.append(framed[8:8 + min(length, inline)] + rest)
        return payloads

    def _broadcast(self, mine: bytes, length: int, source: int, timeout: timedelta) -> bytes:
        tensor = _tensor(mine) if source == self._rank else torch.empty(length, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timeout
        self._wait(self._group.broadcast([tensor], options))
        return _bytes(tensor)

    def _absent(self, timeout_s: float, error: Exception) -> RanksAbsent:
        """Find out who is missing: every rank that is still there signs for the exchange that failed."""
        try:
            missing = self._missing()
        except dist.DistError as gone:
            return _store_is_gone(gone)
        who = f"trainer ranks {missing} did not come" if missing else "all ranks are there, but the group broke"
        return RanksAbsent(f"{who} (waited at most {timeout_s:g} s; gloo says: {_first_line(error)}). Look for an error or a "
                           f"stack of these ranks", tuple(missing))


    def _missing(self) -> list[int]:
        sign = f"failed/{self._exchanges}"
        self._store.set(f"{sign}/{self._rank}", "here")
        missing = [r for r in range(self._world_size) if r != self._rank]
        end = time.monotonic() + VERDICT_S / 2
        while missing and time.monotonic() < end:
            missing = [r for r in missing if not self._store.check([f"{sign}/{r}"])]
            time.sleep(POLL_LAST_S)
        return missing


def _store_is_gone(error: Exception) -> RanksAbsent:
    return RanksAbsent(f"the store that all trainer ranks meet at does not answer ({_first_line(error)}). Without torchrun the "
                       f"first rank hosts it: look for an error or a stack of rank 0", None)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())  # without numpy, which torch may come without


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
