"""Addresses, rendezvous and transfer groups with rendezvous (zero-buffer) broadcasts.

A transfer group is complete when its source and all workers are in it. A broadcast frame stays with the source until every
worker has taken it; a closed end fails whoever waits for it, as a closed gloo socket does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from harness.recording.kernel import Kernel, Waiting
from staged_sync.errors import DeadlineExceeded, TransportError
from staged_sync.seam import Wire

HOST = "10.0.0.1"
FIRST_PORT = 20000
Specs: TypeAlias = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of the tensors in one broadcast."""

WORKER_JOIN_S = 300.0
"""How long a stock vLLM worker waits in its rendezvous; not settable from outside."""


@dataclass(eq=False)
class RecordedListener:
    """A bound, listening socket of a source."""

    host: str
    port: int
    thing: str
    closed: bool = False
    channel: Channel | None = None

    def close(self) -> None:
        """Release the port and end a dial under way: workers that wait there fail. A group that came up stays."""
        self.closed = True
        if self.channel is not None and not self.channel.complete:
            self.channel.leave(0)


@dataclass(eq=False)
class Channel:
    """One transfer group: rank 0 is the source. `members` maps a group rank to the worker that joined with it."""

    name: str
    world_size: int
    wire: Wire
    source: int
    kernel: Kernel = field(repr=False)
    thing: str
    members: dict[int, str] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    broken: str = ""
    frames: list[torch.Tensor | None] = field(default_factory=list)
    specs: list[Specs] = field(default_factory=list)
    """What each broadcast is made of, as its sender has it."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of every broadcast so far, in order."""
    taken: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) == self.world_size - 1

    @property
    def live(self) -> bool:
        """The source has not closed its end."""
        return 0 not in self.closed

    def leave(self, rank: int) -> None:
        """One end is closed: whoever waits for it fails."""
        self.kernel.touch((self.thing, "source" if rank == 0 else "left"), "write" if rank == 0 else "add")
        self.closed.add(rank)

    def absent(self) -> str:
        missing = [rank for rank in range(1, self.world_size) if rank not in self.members]
        return f"group rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"

    def join(self, rank: int, world_size: int, worker: str) -> None:
        """A worker is in. A rank taken twice or another world size would hang a real rendezvous; here it says so."""
        if world_size != self.world_size:
            raise TransportError(f"{worker} joins {self.name} with world size {world_size}, its source has {self.world_size}")
        if rank in self.members or not 1 <= rank < world_size:
            holder = self.members.get(rank, "nobody: it is out of range")
            raise TransportError(f"{worker} joins {self.name} as rank {rank}, which belongs to {holder}")
        self.kernel.touch((self.thing, "members"), "add")
        self.members[rank] = worker
        self.taken[rank] = 0

    def post(self, frames: Sequence[torch.Tensor], specs: Sequence[Specs]) -> int:
        """Queue frames for all workers; returns how many a worker must have taken for this send to be over."""
        for i in range(len(frames)):
            self.kernel.touch((self.thing, "frame", len(self.frames) + i), "set")
        self.frames.extend(frames)
        self.specs.extend(specs)
        self.sizes.extend(frame.numel() for frame in frames)
        return len(self.frames)

    def over(self, upto: int) -> bool:
        late = [rank for rank, taken in self.taken.items() if taken < upto]
        return not late or bool(self.problem(upto))

    def problem(self, upto: int) -> str:
        """Why frames before `upto` will never all arrive; empty while they still can."""
        if self.broken:
            return self.broken
        late = [rank for rank, taken in self.taken.items() if taken < upto]
        if late and not self.live:
            return f"transfer group {self.name} was closed by its source, rank {self.source}"
        gone = [self.members[rank] for rank in late if rank in self.closed]
        return f"connection closed by peer: {', '.join(gone)} left transfer group {self.name}" if gone else ""

    def take(self, rank: int, nbytes: int, specs: Specs) -> torch.Tensor:
        """The next frame, copied out of the sender's memory at this moment. Ask `has_frame` first."""
        frame, sent = self.frames[self.taken[rank]], self.specs[self.taken[rank]]
        assert frame is not None
        if sent != specs:
            self.kernel.note(f"mismatch: over transfer group {self.name}, {self.members[rank]} receives {_shown(specs)}, "
                             f"rank {self.source} sends {_shown(sent)}")
        if frame.numel() != nbytes:
            self.broken = (f"transfer group {self.name}: {self.members[rank]} expects a broadcast of {nbytes} bytes, "
                           f"rank {self.source} sends {frame.numel()}")
            raise TransportError(self.broken)
        self.kernel.touch((self.thing, "frame", self.taken[rank]), "await")
        self.kernel.touch((self.thing, "taken", self.taken[rank]), "add")
        self.taken[rank] += 1
        copy = frame.clone()
        self._forget()
        return copy

    def has_frame(self, rank: int) -> bool:
        return self.taken[rank] < len(self.frames)

    def count_anew(self) -> None:
        """Between two updates, when everything sent has been taken: frames are counted from 0 again."""
        self.frames, self.specs, self.sizes, self.taken = [], [], [], dict.fromkeys(self.taken, 0)

    def waiting_for(self, upto: int) -> str:
        return ", ".join(self.members[rank] for rank, taken in self.taken.items() if taken < upto)

    def _forget(self) -> None:
        """Drop what every worker has: the group keeps tensors alive until they are sent, and not longer."""
        for i in range(min(self.taken.values())):
            self.frames[i] = None


class Network:
    """All addresses and transfer groups of one world."""

    def __init__(self, kernel: Kernel) -> None:
        self.channels: list[Channel] = []
        self._kernel = kernel
        self._listeners: dict[tuple[str, int], RecordedListener] = {}
        self._next_port = FIRST_PORT

    def forget(self) -> None:
        """Drop what is closed, and count ports as after a fresh start: the next update begins like the first."""
        self.channels = self.live()
        for channel in self.channels:
            channel.count_anew()
        self._listeners = {address: held for address, held in self._listeners.items() if not self._released(held)}
        self._next_port = max([port + 1 for _, port in self._listeners], default=FIRST_PORT)

    def live(self) -> list[Channel]:
        """Transfer groups whose source has not closed them, oldest first."""
        return [channel for channel in self.channels if channel.live]

    def listen(self, host: str, port_range: tuple[int, int] | None) -> RecordedListener:
        """Bind the next free port: deterministic, so that logs can be compared."""
        self._kernel.give_way()
        self._kernel.touch("ports", "write")
        port = self._free_port(host, port_range)
        listener = self._listeners[host, port] = RecordedListener(host, port, self._kernel.christen())
        return listener

    def bind(self, host: str, port: int) -> RecordedListener:
        """Listen at an address of the caller's choice. Raises OSError where somebody does already."""
        held = self._listeners.get((host, port))
        if held is not None and not self._released(held):
            raise OSError(f"[Errno 98] address already in use: {host}:{port}")
        listener = self._listeners[host, port] = RecordedListener(host, port, self._kernel.christen())
        return listener

    def next_port(self) -> int:
        self._kernel.touch("ports", "write")
        self._next_port += 1
        return self._next_port - 1

    def listens(self, address: tuple[str, int]) -> bool:
        listener = self._listeners.get(address)
        return listener is not None and not listener.closed

    def open(self, listener: RecordedListener, name: str, world_size: int, wire: Wire, source: int) -> Channel:
        if listener.closed or listener.channel is not None:
            raise TransportError(f"listener {listener.host}:{listener.port} is closed or already serves a group")
        self._kernel.touch(listener.thing, "set")
        listener.channel = Channel(name, world_size, wire, source, self._kernel, self._kernel.christen())
        self.channels.append(listener.channel)
        return listener.channel

    def join(self, address: tuple[str, int], rank: int, world_size: int, name: str, worker: str) -> Channel:
        """A worker's rendezvous: blocks until the whole group is there, as long as a stock worker would."""
        deadline_s = self._kernel.now_s + WORKER_JOIN_S
        waiting = Waiting("join", name, missing=lambda: f"a listener at {address[0]}:{address[1]}")
        self._kernel.wait(lambda: self._channel(address) is not None, waiting, deadline_s=deadline_s)
        channel = self._channel(address)
        if channel is None:
            raise DeadlineExceeded(f"{worker}: nobody listened at {address[0]}:{address[1]} within {WORKER_JOIN_S:g} s")
        self._kernel.touch(self._listeners[address].thing, "await")
        channel.join(rank, world_size, worker)
        waiting = Waiting("join", channel.name, missing=channel.absent)
        self._kernel.wait(lambda: channel.complete or not channel.live, waiting, deadline_s=deadline_s)
        self._kernel.touch((channel.thing, "members"), "await" if channel.complete else "read")
        self._kernel.touch((channel.thing, "source"), "read")
        if not channel.complete or not channel.live:
            channel.leave(rank)
            raise TransportError(f"{worker}: rendezvous of {channel.name} failed, missing {channel.absent()}")
        return channel

    def receive(self, channel: Channel, rank: int, nbytes: int, specs: Specs) -> torch.Tensor:
        """A worker's side of one broadcast from rank 0."""
        self._kernel.wait(lambda: channel.has_frame(rank) or not channel.live or bool(channel.broken),
                          Waiting("receive", channel.name, missing=lambda: f"rank {channel.source}"))
        self._kernel.touch((channel.thing, "source"), "read")
        if channel.broken:
            raise TransportError(channel.broken)
        if not channel.has_frame(rank) or not channel.live:
            raise TransportError(f"connection closed by peer: rank {channel.source} left transfer group {channel.name}")
        return channel.take(rank, nbytes, specs)

    def _channel(self, address: tuple[str, int]) -> Channel | None:
        listener = self._listeners.get(address)
        return None if listener is None else listener.channel

    def _free_port(self, host: str, port_range: tuple[int, int] | None) -> int:
        if port_range is None:
            self._next_port += 1
            return self._next_port - 1
        for port in range(port_range[0], port_range[1] + 1):
            if (held := self._listeners.get((host, port))) is None or self._released(held):
                return port
        raise TransportError(f"no free port on {host} in the configured range {port_range[0]}-{port_range[1]}")

    @staticmethod
    def _released(listener: RecordedListener) -> bool:
        return listener.closed if listener.channel is None else not listener.channel.live


def _shown(specs: Specs) -> str:
    return " + ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in specs)
