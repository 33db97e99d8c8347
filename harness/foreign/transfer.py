"""Transfer groups and the device, as foreign code sees them: groups that are opened, broadcasts that are enqueued, and waits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from harness.foreign.active import Here, here
from harness.recording.kernel import Waiting
from harness.recording.network import Channel
from harness.recording.server import Reference
from harness.sim.streams import StreamWork
from staged_sync.errors import TransportError
from staged_sync.seam import Wire

RENDEZVOUS_S = 300.0
"""How long rank 0 waits for the workers of its group (vLLM's StatelessProcessGroup)."""


def seconds(timeout: timedelta | float | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


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


def open_end(address: str, port: int, world_size: int, name: str, *, packed: bool = False, buffer_bytes: int = 1 << 30,
             timeout_s: float = RENDEZVOUS_S) -> TransferEnd:
    """Rank 0 listens, and waits until every worker has joined (vLLM's `trainer_init`). Where it raises, nothing stays open."""
    me = here()
    world, kernel = me.world, me.world.kernel
    kernel.give_way()
    me.record("open", group=name, detail=f"world_size={world_size}")
    listener = world.network.bind(address, port)
    channel = world.network.open(listener, name, world_size, Wire("gloo", packed, buffer_bytes), me.rank)
    try:
        kernel.wait(lambda: channel.complete, Waiting("open", name, missing=channel.absent), deadline_s=kernel.now_s + timeout_s)
        kernel.touch((channel.thing, "members"), "await")
        if not channel.complete:
            raise RuntimeError(f"wait timeout: {channel.absent()} of {name} did not join within {timeout_s:g} s")
        me.record("open.done", group=name, detail=f"world_size={world_size}")
    except Exception:
        channel.leave(0)
        raise
    return TransferEnd(channel)


class Handle:
    """What an asynchronous broadcast returns, with NCCL's manners: `wait()` holds up the stream and not the caller."""

    def __init__(self, work: StreamWork) -> None:
        self._work = work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Without a time-out: whatever is written to the tensor from now on comes after the broadcast. With one: blocks, and
        raises RuntimeError when it is over."""
        timeout_s = seconds(timeout)
        if timeout_s is None:
            self._work.tensors = [tensor.clone() for tensor in self._work.tensors]
            return True
        if not wait_for([self._work], f"broadcast over {self._work.group_name}", timeout_s=timeout_s):
            raise RuntimeError(f"Timed out waiting {timeout_s:g} s for a broadcast: {self._work.label}")
        self._work.result()
        return True

    def is_completed(self) -> bool:
        return self._work.poll()


def send(me: Here, end: TransferEnd, tensors: Sequence[torch.Tensor]) -> StreamWork:
    """Put tensors into the device's queue."""
    if not end.channel.live:
        raise TransportError(f"transfer group {end.channel.name} is closed")
    me.world.kernel.give_way()
    return me.active.device(me.rank).send(end.channel, tensors)


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


# --- torch.cuda ---------------------------------------------------------------------------------------------------------
def synchronize(*_: Any) -> None:
    """The device has done everything it was given (torch.cuda.synchronize): a wait without a time-out."""
    last = _last()
    if last is not None:
        wait_for([last], "the device")


class Stream:
    def synchronize(self) -> None:
        synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """A mark in the device's queue; `query` is how a wait for the device gets a time-out."""

    def __init__(self, *ignored: Any, **options: Any) -> None:
        self._last: StreamWork | None = None

    def record(self, stream: Any = None) -> None:
        self._last = _last()

    def query(self) -> bool:
        return self._last is None or self._last.poll()

    def synchronize(self) -> None:
        if self._last is not None:
            wait_for([self._last], "the device")


def _last() -> StreamWork | None:
    me = here()
    return me.active.device(me.rank).last
