"""torch.distributed, as far as a weight sync uses it: its functions answer for the simulated rank that calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.foreign.active import Here, here
from harness.recording.groups import Collective
from harness.recording.kernel import Waiting
from harness.recording.network import Channel
from harness.recording.server import Reference
from harness.sim.streams import StreamWork
from staged_sync.errors import TransportError
from staged_sync.seam import Wire

LONG_S = 1800.0
"""torch's default time-out of a collective."""


class Group:
    """A process group of trainer ranks."""

    def __init__(self, members: Sequence[int], name: str) -> None:
        self.members, self.name = tuple(members), name

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.members.index(here().rank)

    def collective(self, me: Here) -> Collective:
        return me.active.collective(self.members, self.name)


class TransferEnd:
    """Rank 0 of a transfer group: what foreign code gets instead of a communicator."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def destroy(self) -> None:
        me = here()
        self.channel.kernel.give_way()
        me.record("close", group=self.channel.name)
        self.channel.leave(0)
        me.record("close.done", group=self.channel.name)


def world_group() -> Group:
    return Group(range(here().world.layout.world_size), "world")


def gloo_group() -> Group:
    """For an adapter: what the implementation's getter of its own gloo group returns."""
    return Group(range(here().world.layout.world_size), "gloo")


def open_end(address: str, port: int, world_size: int, name: str, *, packed: bool = False, buffer_bytes: int = 1 << 30,
             timeout_s: float = 300.0) -> TransferEnd:
    """Rank 0 listens, and waits until every worker has joined: what vLLM's `trainer_init` and an `init_process_group` do."""
    me = here()
    world, kernel = me.world, me.world.kernel
    kernel.give_way()
    listener = world.network.bind(address, port)
    channel = world.network.open(listener, name, world_size, Wire("gloo", packed, buffer_bytes), me.rank)
    me.record("open", group=name, detail=f"world_size={world_size}")
    kernel.wait(lambda: channel.complete, Waiting("open", name, missing=channel.absent), deadline_s=kernel.now_s + timeout_s)
    kernel.touch((channel.thing, "members"), "await")
    if not channel.complete:
        channel.leave(0)
        raise RuntimeError(f"wait timeout: {channel.absent()} of {name} did not join within {timeout_s:g} s")
    me.record("open.done", group=name, detail=f"world_size={world_size}")
    return TransferEnd(channel)


def init_process_group(backend: Any = None, init_method: str = "", world_size: int = -1, rank: int = -1, group_name: str = "",
                       **ignored: Any) -> TransferEnd:
    """For an adapter: an implementation's own copy of `init_process_group` that makes a group beside the default one."""
    address, port = init_method.removeprefix("tcp://").rsplit(":", 1)
    return open_end(address.strip("[]"), int(port), world_size, group_name)


class Handle:
    """What an asynchronous broadcast returns."""

    def __init__(self, work: StreamWork) -> None:
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        wait_for([self._work], f"broadcast over {self._work.group_name}")
        self._work.result()
        return True

    def is_completed(self) -> bool:
        return self._work.poll()


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


def send(me: Here, end: TransferEnd, tensors: Sequence[torch.Tensor]) -> StreamWork:
    """Put tensors into the device's queue."""
    if not end.channel.live:
        raise TransportError(f"transfer group {end.channel.name} is closed")
    me.world.kernel.give_way()
    return me.active.device(me.rank).send(end.channel, tensors)


def synchronize(*_: Any) -> None:
    """The device has done everything it was given (torch.cuda.synchronize)."""
    me = here()
    last = me.active.device(me.rank).last
    if last is not None:
        wait_for([last], "the device")


def wait_for(works: Sequence[StreamWork | Reference], what: str, *, timeout_s: float | None = None,
             need: int | None = None) -> bool:
    """Block until `need` of `works` (default: all) have ended, or one has failed. False at the time-out."""
    kernel = here().world.kernel
    wanted = len(works) if need is None else need

    def clear() -> bool:
        return sum(work.ended() for work in works) >= wanted or any(work.failed() for work in works)

    def missing() -> str:
        return "; ".join(work.label for work in works if not work.ended())

    until = {} if timeout_s is None else {"deadline_s": kernel.now_s + timeout_s}
    groups = ", ".join(dict.fromkeys(name for work in works if (name := getattr(work, "group_name", ""))))
    done = kernel.wait(clear, Waiting(what, groups, missing=missing), **until)
    for work in works:
        work.poll()
    return done


# --- what torch.distributed is replaced by ------------------------------------------------------------------------------
def barrier(group: Any = None, *args: Any, **kwargs: Any) -> None:
    me, members = here(), group if isinstance(group, Group) else world_group()
    me.record("barrier", detail=members.name)
    members.collective(me).exchange(me.rank, None, operation="barrier", timeout_s=LONG_S)


def all_gather(shards: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Handle | None:
    me, members = here(), group if isinstance(group, Group) else world_group()
    me.record("gather", group=members.name.split("[")[0])
    found = members.collective(me).exchange(me.rank, tensor.detach().clone(), operation="all_gather", timeout_s=LONG_S)
    if len({(tuple(shard.shape), shard.dtype) for shard in found}) > 1:
        me.world.kernel.note(f"mismatch: all_gather in {members.name}: "
                             f"{[(tuple(shard.shape), shard.dtype) for shard in found]}")
    for mine, theirs in zip(shards, found, strict=True):
        mine.copy_(theirs)
    return None


def all_gather_object(objects: list[Any], thing: Any, group: Any = None) -> None:
    me, members = here(), group if isinstance(group, Group) else world_group()
    objects[:] = members.collective(me).exchange(me.rank, thing, operation="all_gather_object", timeout_s=LONG_S)


def get_rank(group: Any = None) -> int:
    return group.rank() if isinstance(group, Group) else here().rank


def get_world_size(group: Any = None) -> int:
    return group.size() if isinstance(group, Group) else here().world.layout.world_size


def destroy_process_group(group: Any = None) -> None:
    if isinstance(group, TransferEnd):
        group.destroy()


REPLACED = {
    "barrier": barrier, "all_gather": all_gather, "all_gather_object": all_gather_object, "broadcast": broadcast,
    "get_rank": get_rank, "get_world_size": get_world_size, "is_initialized": lambda: True,
    "destroy_process_group": destroy_process_group, "get_process_group_ranks": lambda group: list(group.members),
}


@contextmanager
def replaced() -> Iterator[None]:
    """torch.distributed and torch.cuda's synchronisation speak to the simulation inside the block."""
    with ExitStack() as stack:
        for name, function in REPLACED.items():
            stack.enter_context(patch.object(dist, name, function))
        stack.enter_context(patch.object(torch.cuda, "synchronize", synchronize))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda *a: _Stream()))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: "cpu"))
        yield


class _Stream:
    def synchronize(self) -> None:
        synchronize()


