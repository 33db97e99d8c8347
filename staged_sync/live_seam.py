"""The real world: torch.distributed and Megatron for the trainer, Ray or any `.remote()` handle for engines, gloo or NCCL wires.

Trainer ranks meet on a gloo group of their own (live_control.py) on a prefix of the default store.
"""

from __future__ import annotations

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

from staged_sync.errors import GatherError
from staged_sync.live_control import VERDICT_S, GlooControlGroup, broken_key, store_is_gone
from staged_sync.seam import Coordinates, GatherGroup, TransferGroup, Wire, Work
from staged_sync.vllm import rendezvous, transport

logger = logging.getLogger(__name__)

POLL_FIRST_S, POLL_LAST_S = 50e-6, 5e-3
POLL_SHARE = 1 / 16
"""Polling starts eager and backs off by the time that was waited, so that an end is noticed late by at most a sixteenth of it:
a bucket takes 100 µs (a small one, gloo), 10 ms (512 MiB, NCCL) or seconds (an engine that loads)."""

_KEY = "staged-sync/control"
_SEAMS = itertools.count()


class LiveSeam:
    """The seam of one trainer rank. Needs `torch.distributed` and Megatron's `parallel_state` to be initialised."""

    def __init__(self, model: Sequence[torch.nn.Module], *, store: dist.Store | None = None) -> None:
        device = next((p.device.type for chunk in model for p in chunk.parameters()), None)
        # A stage may be empty, and its rank must name the same wire as the others: then the machine decides.
        on_cuda = torch.cuda.is_available() if device is None else device == "cuda"
        self.backend: Literal["gloo", "nccl"] = "nccl" if on_cuda else "gloo"
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

    def open_control_group(self, generation: int, *, timeout_s: float) -> GlooControlGroup:
        return GlooControlGroup(self._store, generation, self._rank, self._world_size, timeout_s)

    def broken_control_generation(self) -> int:
        generation = -1
        try:
            while self._store.check([broken_key(generation + 1)]):
                generation += 1
        except dist.DistError as error:
            raise store_is_gone(error) from error
        return generation

    def report_broken_control(self, generation: int, reason: str) -> str:
        """The lead's reason counts, since it names the absent; without the lead, that of whoever writes first."""
        key = broken_key(generation)
        if self._rank != 0:
            try:
                self._store.wait([key], timedelta(seconds=VERDICT_S))
            except dist.DistError:
                logger.warning("the lead did not say why control group %d broke; this rank does", generation)
        try:
            return self._store.compare_set(key, "", reason).decode()
        except dist.DistError as error:
            return f"{reason} (told to nobody: {store_is_gone(error)})"

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
