"""The seam of one recorded trainer rank: every method of `staged_sync.seam.Seam` on the world's kernel, groups and network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from harness.recording.framing import frames, specs
from harness.recording.groups import RecordedControlGroup, finite
from harness.recording.kernel import Waiting
from harness.recording.network import HOST, Channel, RecordedListener
from harness.recording.server import Handle
from staged_sync.errors import DeadlineExceeded, GatherError, RanksAbsent, TransportError
from staged_sync.seam import Coordinates, GatherGroup, Listener, Wire, Work

if TYPE_CHECKING:
    from harness.recording.world import RecordingWorld, SendsLater


class RecordingSeam:
    backend: Literal["gloo", "nccl"] = "gloo"

    def __init__(self, world: RecordingWorld, rank: int) -> None:
        self._world = world
        self._kernel = world.kernel
        self._rank = rank

    @property
    def device(self) -> SendsLater | None:
        return self._world.devices.get(self._rank)

    # --- who am I -------------------------------------------------------------------------------------------------
    def coordinates(self) -> Coordinates:
        return self._world.layout.ranks[self._rank]

    # --- the clock ------------------------------------------------------------------------------------------------
    def now(self) -> float:
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        self._world.kernel.wait(_never, Waiting("sleep", for_time=True), deadline_s=self.now() + finite(seconds))

    def wait_any(self, works: Sequence[Work[Any]], *, timeout_s: float) -> bool:
        if not works:
            raise ValueError("wait_any needs at least one work: nothing would ever end the wait but the time-out")
        kernel = self._kernel
        wake_s = kernel.now_s + finite(timeout_s)
        for work in works:
            wake_s = min(wake_s, getattr(work, "expires_s", math.inf))
        waiting = Waiting("wait_any", _groups(works), lambda: "; ".join(_label(w) for w in works if not _ended(w)))
        begun = _begun_to_end(works)
        kernel.wait(_clear(works) if kernel.patient else begun, waiting, deadline_s=wake_s)
        return begun()

    # --- the trainer's own groups ---------------------------------------------------------------------------------
    def all_gather(self, tensor: torch.Tensor, group: GatherGroup, *, timeout_s: float) -> list[torch.Tensor]:
        collective = self._world.gather_group(self._rank, group)
        try:
            shards = collective.exchange(self._rank, tensor.detach().clone(), operation="gather", timeout_s=finite(timeout_s))
        except RanksAbsent as error:
            raise DeadlineExceeded(str(error)) from None
        kinds = {(tuple(shard.shape), shard.dtype) for shard in shards}
        if len(kinds) > 1:
            raise GatherError(f"gather in group {collective.name}: members brought different tensors: "
                              f"{[(tuple(s.shape), s.dtype) for s in shards]}")
        return [shard.clone() for shard in shards]

    def open_control_group(self, generation: int, *, timeout_s: float) -> RecordedControlGroup:
        collective = self._world.control_group(generation)
        collective.exchange(self._rank, b"", operation="open control group", timeout_s=finite(timeout_s))
        return RecordedControlGroup(collective, self._rank)

    def broken_control_generation(self) -> int:
        self._world.kernel.touch("broken control groups", "read")
        return max(self._world.broken_control, default=-1)

    def report_broken_control(self, generation: int, reason: str) -> str:
        self._world.kernel.touch("broken control groups", "write")
        return self._world.broken_control.setdefault(generation, reason)

    # --- engines --------------------------------------------------------------------------------------------------
    def call(self, target: Any, method: str, /, **kwargs: Any) -> Work[Any]:
        work: Work[Any] = getattr(target, method).remote(**kwargs)
        return work

    def identity(self, target: Any) -> str:
        return target._server.name if isinstance(target, Handle) else ""

    def has_method(self, target: Any, method: str) -> bool:
        return hasattr(target, method)

    # --- transfer groups ------------------------------------------------------------------------------------------
    def listen(self, *, address: str | None, port_range: tuple[int, int] | None) -> RecordedListener:
        return self._world.network.listen(address or HOST, port_range)

    def open_transfer_group(self, listener: Listener, *, name: str, world_size: int, wire: Wire,
                            timeout_s: float) -> Work[RecordedTransferGroup]:
        if not isinstance(listener, RecordedListener):
            raise TypeError(f"not a listener of this seam: {listener!r}")
        self._world.kernel.give_way()
        channel = self._world.network.open(listener, name, world_size, wire, self._rank)
        return DialWork(self, channel, self.now() + finite(timeout_s))

    # --- hang reports ---------------------------------------------------------------------------------------------
    def stacks(self) -> str:
        return self._world.wait_table()


class DialWork:
    """Rank 0 of a transfer group, waiting for its workers. A dial that runs over leaves nothing open."""

    def __init__(self, seam: RecordingSeam, channel: Channel, expires_s: float) -> None:
        self.expires_s = expires_s
        self.label = f"{channel.name} to be complete, missing {channel.absent()}"
        self._seam = seam
        self._channel = channel
        self.group_name = channel.name

    def ended(self) -> bool:
        return self._channel.complete or self.failed()

    def failed(self) -> bool:
        return not self._channel.complete and self._seam.now() >= self.expires_s

    def poll(self) -> bool:
        self._channel.kernel.touch((self._channel.thing, "members"), "await" if self._channel.complete else "peek")
        return self.ended()

    def result(self) -> RecordedTransferGroup:
        if self._channel.complete:
            return RecordedTransferGroup(self._channel, self._seam.device)
        self._channel.leave(0)
        raise DeadlineExceeded(f"transfer group {self._channel.name}: {self._channel.absent()} did not join in time")


class SendWork:
    """A broadcast, or several: over when every worker has taken every frame, or never will."""

    expires_s = math.inf

    def __init__(self, channel: Channel, upto: int) -> None:
        self.group_name = channel.name
        self._channel = channel
        self._upto = upto

    @property
    def label(self) -> str:
        return f"{self._channel.name}: {self._channel.waiting_for(self._upto)} to receive"

    def ended(self) -> bool:
        return self._channel.over(self._upto)

    def failed(self) -> bool:
        return bool(self._channel.problem(self._upto))

    def poll(self) -> bool:
        over, touch = self.ended(), self._channel.kernel.touch
        touch((self._channel.thing, "taken", self._upto - 1), "await" if over else "peek")
        touch((self._channel.thing, "left"), "read")
        return over

    def result(self) -> None:
        if problem := self._channel.problem(self._upto):
            raise TransportError(problem)


class RecordedTransferGroup:
    """The source's end of one transfer group."""

    def __init__(self, channel: Channel, device: SendsLater | None = None) -> None:
        self._channel = channel
        self._device = device

    def send(self, tensors: Sequence[torch.Tensor]) -> Work[None]:
        if not self._channel.live:
            raise TransportError(f"transfer group {self._channel.name} is closed: it cannot move bytes")
        self._channel.kernel.give_way()
        if self._device is not None:
            return self._device.send(self._channel, tensors)
        wire = self._channel.wire
        return SendWork(self._channel, self._channel.post(frames(tensors, wire), specs(tensors, wire)))

    def synchronize(self) -> Work[None]:
        if self._device is not None:
            return self._device.synchronize(self._channel)
        return SendWork(self._channel, len(self._channel.frames))

    def close(self, *, timeout_s: float) -> None:
        finite(timeout_s)
        self._channel.kernel.give_way()
        self._channel.leave(0)


def _groups(works: Sequence[Work[Any]]) -> str:
    return ", ".join(dict.fromkeys(name for work in works if (name := getattr(work, "group_name", ""))))


def _begun_to_end(works: Sequence[Work[Any]]) -> Callable[[], bool]:
    """Whether any has ended. Asked after every step of anybody, so it is quick."""
    asks = [getattr(work, "ended", work.poll) for work in works]
    if len(asks) == 1:
        return asks[0]

    def ready() -> bool:
        for ask in asks:  # noqa: SIM110 (a generator costs more than all the rest)
            if ask():
                return True
        return False

    return ready


def _clear(works: Sequence[Work[Any]]) -> Callable[[], bool]:
    """Whether all have ended, or one has failed. Waking before, a caller that needs all of them would only wait again."""
    if len(works) == 1:
        return _begun_to_end(works)

    def ready() -> bool:
        over = [work for work in works if _ended(work)]
        return len(over) == len(works) or any(_failed(work) for work in over)

    return ready


def _ended(work: Work[Any]) -> bool:
    """`poll`, asked by the kernel: no task has looked."""
    ask: Callable[[], bool] = getattr(work, "ended", work.poll)
    return ask()


def _failed(work: Work[Any]) -> bool:
    ask: Callable[[], bool] | None = getattr(work, "failed", None)
    return ask is not None and ask()


def _label(work: Work[Any]) -> str:
    return str(getattr(work, "label", type(work).__name__))


def _never() -> bool:
    return False
