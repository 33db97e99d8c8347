"""torch.distributed, as far as a weight sync uses it: its functions answer for the simulated rank that calls them.

A collective meets where it is called, also with `async_op=True`: its handle is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.foreign.active import here
from harness.foreign.transfer import RENDEZVOUS_S, Event, Handle, Stream, TransferEnd, open_end, seconds, send, synchronize
from harness.recording.groups import Collective


class Group:
    """A process group of trainer ranks. `timeout_s`: None for that of the trainer's own groups (`Adapter.group_timeout_s`)."""

    def __init__(self, members: Sequence[int], name: str, *, timeout_s: float | None = None,
                 collective: Collective | None = None) -> None:
        self.members, self.name = tuple(members), name
        self._timeout_s, self._collective = timeout_s, collective

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.members.index(here().rank)

    def exchange(self, value: Any, operation: str, timeout: timedelta | float | None = None) -> list[Any]:
        """Everybody's value, by group rank; raises `RanksAbsent` at the time-out."""
        me = here()
        collective = self._collective or me.active.collective(self.members, self.name)
        limits_s = (seconds(timeout), self._timeout_s, me.active.group_timeout_s)
        return collective.exchange(me.rank, value, operation=operation, timeout_s=next(s for s in limits_s if s is not None))


def world_group() -> Group:
    return Group(_everybody(), "world")


def gloo_group() -> Group:
    """For an adapter: what the implementation's getter of its own gloo group returns."""
    return Group(_everybody(), "gloo")


def init_process_group(backend: Any = None, init_method: str = "", timeout: timedelta | None = None, world_size: int = -1,
                       rank: int = -1, store: Any = None, group_name: str = "", **ignored: Any) -> TransferEnd:
    """For an adapter: an implementation's own copy of `init_process_group` that makes a group beside the default one."""
    address, port = init_method.removeprefix("tcp://").rsplit(":", 1)
    timeout_s = RENDEZVOUS_S if timeout is None else timeout.total_seconds()
    return open_end(address.strip("[]"), int(port), world_size, group_name, timeout_s=timeout_s)


def _everybody() -> range:
    return range(here().world.layout.world_size)


class Done:
    """The handle of a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _handle(async_op: bool) -> Done | None:
    return Done() if async_op else None


# --- what torch.distributed is replaced by ------------------------------------------------------------------------------
def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: Any = None,
              **ignored: Any) -> Group | None:
    """All ranks of the world make the same groups in the same order, as with torch. None where this rank is no member."""
    me = here()
    me.active.new_groups[me.rank] += 1
    group = Group(_everybody() if ranks is None else ranks, f"group{me.active.new_groups[me.rank]}", timeout_s=seconds(timeout))
    if me.rank not in group.members:
        return None
    group.exchange(None, "new_group")
    return group


def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Done | None:
    _meet(group, "barrier")
    return _handle(async_op)


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    _meet(group, "monitored_barrier", timeout)


def _meet(group: Any, operation: str, timeout: timedelta | None = None) -> None:
    members = _trainer_group(group)
    here().record("barrier", detail=members.name)
    members.exchange(None, operation, timeout)


def all_gather(shards: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Done | None:
    for mine, theirs in zip(shards, _gather(tensor, group, "all_gather"), strict=True):
        mine.copy_(theirs)
    return _handle(async_op)


def all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any = None,
                           async_op: bool = False) -> Done | None:
    output.view(-1).copy_(torch.cat([shard.reshape(-1) for shard in _gather(tensor, group, "all_gather_into_tensor")]))
    return _handle(async_op)


_REDUCE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0), dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0)}


def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done | None:
    tensor.copy_(_REDUCE[op](torch.stack(_gather(tensor, group, "all_reduce"))))
    return _handle(async_op)


def all_gather_object(objects: list[Any], thing: Any, group: Any = None) -> None:
    members = _trainer_group(group)
    _record_gather(members)
    objects[:] = members.exchange(thing, "all_gather_object")


def _gather(tensor: torch.Tensor, group: Any, operation: str) -> list[torch.Tensor]:
    members = _trainer_group(group)
    _record_gather(members)
    found: list[torch.Tensor] = members.exchange(tensor.detach().clone(), operation)
    kinds = [(tuple(shard.shape), shard.dtype) for shard in found]
    if len(set(kinds)) > 1:
        here().world.kernel.note(f"mismatch: {operation} in {members.name}: {kinds}")
    return found


def _record_gather(members: Group) -> None:
    here().record("gather", group=members.name.split("[")[0])


def _trainer_group(group: Any) -> Group:
    if isinstance(group, TransferEnd):
        raise TypeError(f"transfer group {group.channel.name} moves broadcasts only")
    return group if isinstance(group, Group) else world_group()


def broadcast(tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False, **kwargs: Any) -> Handle | None:
    """Over a transfer group: enqueued on this rank's device."""
    me = here()
    if not isinstance(group, TransferEnd):
        raise TypeError(f"a broadcast inside the trainer is not simulated (group {group!r})")
    if src != 0:
        me.world.kernel.note(f"mismatch: over transfer group {group.channel.name}, rank {me.rank} broadcasts from root {src}, "
                             f"its workers receive from root 0")
    handle = Handle(send(me, group, [tensor]))
    if not async_op:
        handle.wait()
    return handle if async_op else None


def get_rank(group: Any = None) -> int:
    return group.rank() if isinstance(group, Group) else here().rank


def get_world_size(group: Any = None) -> int:
    return group.size() if isinstance(group, Group) else here().world.layout.world_size


def destroy_process_group(group: Any = None) -> None:
    if isinstance(group, TransferEnd):
        group.destroy()


REPLACED = {
    "new_group": new_group, "barrier": barrier, "monitored_barrier": monitored_barrier, "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor, "all_reduce": all_reduce, "all_gather_object": all_gather_object,
    "broadcast": broadcast, "get_rank": get_rank, "get_world_size": get_world_size, "is_initialized": lambda: True,
    "destroy_process_group": destroy_process_group, "get_process_group_ranks": lambda group: list(group.members),
}
CUDA = {"synchronize": synchronize, "current_stream": lambda *a: Stream(), "current_device": lambda: "cpu", "Event": Event}


@contextmanager
def replaced() -> Iterator[None]:
    """torch.distributed and torch.cuda's synchronisation speak to the simulation inside the block."""
    with ExitStack() as stack:
        for module, functions in ((dist, REPLACED), (torch.cuda, CUDA)):
            for name, function in functions.items():
                stack.enter_context(patch.object(module, name, function))
        yield
