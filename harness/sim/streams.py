"""Asynchronous sends: a broadcast goes into the queue of the rank's device and returns at once; the device reads the buffer when
it gets there, and goes on when every worker has the frame. When that is, the explorer decides.

One queue per device, over all of its groups, as collectives on one GPU are: what two ranks enqueue in different orders meets
nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.recording.framing import frames, refuse_strided, specs
from harness.recording.kernel import IDLE, Kernel, Waiting
from harness.recording.network import Channel
from staged_sync.errors import TransportError


@dataclass(eq=False)
class StreamWork:
    """One broadcast in a device's queue; over when every worker has it, or never will."""

    channel: Channel
    tensors: Sequence[torch.Tensor]
    thing: str
    done: bool = False
    upto: int = 0
    expires_s: float = math.inf

    @property
    def group_name(self) -> str:
        return self.channel.name

    @property
    def label(self) -> str:
        what = f"{self.channel.waiting_for(self.upto)} to receive" if self.upto else "the device to get to it"
        return f"{self.channel.name}: {what}"

    def ended(self) -> bool:
        return self.done

    def failed(self) -> bool:
        return self.done and bool(self._problem())

    def poll(self) -> bool:
        self.channel.kernel.touch(self.thing, "await" if self.done else "peek")
        return self.done

    def result(self) -> None:
        if problem := self._problem():
            raise TransportError(problem)

    def _problem(self) -> str:
        if self.upto:
            return self.channel.problem(self.upto)
        return f"transfer group {self.channel.name} was closed before it was sent"


class Device:
    """The queue of one trainer rank's device."""

    def __init__(self, kernel: Kernel, rank: int) -> None:
        self._kernel = kernel
        self._name = f"rank{rank}/device"
        self._queue: deque[StreamWork] = deque()
        self.last: StreamWork | None = None
        kernel.spawn(self._name, self._serve, daemon=True)

    def send(self, channel: Channel, tensors: Sequence[torch.Tensor]) -> StreamWork:
        refuse_strided(tensors)
        work = self.last = StreamWork(channel, tensors, self._kernel.christen())
        self._kernel.touch((work.thing, "queued"), "set")
        self._queue.append(work)
        return work

    def synchronize(self, channel: Channel) -> StreamWork:
        """Everything enqueued so far."""
        return self.last or StreamWork(channel, (), self._kernel.christen(), done=True, upto=len(channel.frames))

    def _serve(self) -> None:
        while True:
            self._kernel.wait(self._queue.__len__, IDLE)
            work = self._queue.popleft()
            self._kernel.touch((work.thing, "queued"), "await")
            self._perform(work)
            self._kernel.touch(work.thing, "fail" if work.failed() else "set")
            work.done = True

    def _perform(self, work: StreamWork) -> None:
        channel = work.channel
        if not channel.live:
            return
        read = [frame.clone() for frame in frames(work.tensors, channel.wire)]  # only now
        upto = work.upto = channel.post(read, specs(work.tensors, channel.wire))
        self._kernel.wait(lambda: channel.over(upto),
                          Waiting("broadcast", channel.name, missing=lambda: channel.waiting_for(upto)))
