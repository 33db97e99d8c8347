"""What travels between controller, supervisors and ranks: msgpack by msgspec, never pickle."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

_DTYPE = 1
"""msgpack extension code of a torch.dtype: its name without "torch."."""


class Topology(msgspec.Struct, frozen=True):
    """Ranks [0, trainers) are Megatron's, the next `engines` ranks are receivers with one vLLM engine each.

    `vpp`: model chunks per rank (1: no virtual pipeline). `ep` and `etp` divide the ranks of a stage anew for experts.
    `workers`: per engine, how many workers share its weights (its tensor parallel size); empty: one each, in the receiver's
    own process.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    engines: int = 1
    device: str = "cpu"
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    workers: tuple[int, ...] = ()

    @property
    def trainers(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def world_size(self) -> int:
        return self.trainers + self.engines

    @property
    def engine_workers(self) -> tuple[int, ...]:
        return self.workers or (1,) * self.engines

    @property
    def gpus(self) -> int:
        """How many it takes: one per trainer rank and engine worker."""
        return self.trainers + sum(self.engine_workers)

    def gpus_of(self, engine: int) -> range:
        """Behind the trainer ranks', one engine after the other."""
        first = self.trainers + sum(self.engine_workers[:engine])
        return range(first, first + self.engine_workers[engine])

    def actor(self, rank: int) -> str:
        """How a rank is called in events and tables."""
        return f"rank{rank}" if rank < self.trainers else f"engine{rank - self.trainers}"

    def short(self) -> str:
        more = {name: getattr(self, name) for name in ("dp", "cp", "vpp", "ep", "etp")}
        return "·".join([f"tp{self.tp}", f"pp{self.pp}", *(f"{name}{size}" for name, size in more.items() if size > 1)])

    def text(self) -> str:
        sizes = f" of {', '.join(map(str, self.workers))} workers" if self.workers else ""
        return f"{self.short()} + {self.engines} engine{'s' if self.engines != 1 else ''}{sizes} on {self.device}"


class Problem(msgspec.Struct, frozen=True):
    """An exception that happened in another process."""

    kind: str
    text: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def line(self) -> str:
        return f"{self.kind}: {self.text}"


# --- controller -> rank ------------------------------------------------------------------------------------------------
class Start(msgspec.Struct, tag=True, frozen=True):
    """Run `function` ("module:function") with the rank's context and `kwargs`."""

    run: int
    function: str
    kwargs: dict[str, Any]


class Go(msgspec.Struct, tag=True, frozen=True):
    """Leave a freeze point."""

    point: str


# --- rank -> controller ------------------------------------------------------------------------------------------------
class RankReady(msgspec.Struct, tag=True, frozen=True):
    rank: int
    pid: int


class Reached(msgspec.Struct, tag=True, frozen=True):
    """The rank stands at a freeze point and waits for `Go`."""

    run: int
    rank: int
    point: str


class Done(msgspec.Struct, tag=True, frozen=True):
    run: int
    rank: int
    value: Any = None
    problem: Problem | None = None


# --- controller -> supervisor ------------------------------------------------------------------------------------------
class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to the child."""

    number: int


class TakeSnapshot(msgspec.Struct, tag=True, frozen=True):
    pass


class Respawn(msgspec.Struct, tag=True, frozen=True):
    """Fork a new child in the place of one that has ended."""


class End(msgspec.Struct, tag=True, frozen=True):
    """Kill the child, if it lives, and leave."""


# --- supervisor -> controller ------------------------------------------------------------------------------------------
class Supervising(msgspec.Struct, tag=True, frozen=True):
    rank: int
    pid: int
    child_pid: int


class Signalled(msgspec.Struct, tag=True, frozen=True):
    """The signal has had its effect: `state` is the kernel's word for what the child does now."""

    rank: int
    number: int
    state: str


class ChildEnded(msgspec.Struct, tag=True, frozen=True):
    rank: int
    child_pid: int
    how: str
    log_tail: str


class Snapshot(msgspec.Struct, tag=True, frozen=True):
    """Where a rank stands, taken without its help."""

    rank: int
    child_pid: int
    state: str
    stacks: str
    positions: list[dict[str, Any]]
    log_tail: str


# --- remote calls ------------------------------------------------------------------------------------------------------
class Request(msgspec.Struct, tag=True, frozen=True):
    id: int
    method: str
    kwargs: dict[str, Any]


class Reply(msgspec.Struct, tag=True, frozen=True):
    id: int
    value: Any = None
    problem: Problem | None = None


Message = (Start | Go | RankReady | Reached | Done | Signal | TakeSnapshot | Respawn | End | Supervising | Signalled
           | ChildEnded | Snapshot | Request | Reply)


def _pack(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(_DTYPE, str(value).removeprefix("torch.").encode())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not travel between processes; send numbers, text, lists or dicts")


def _unpack(code: int, data: memoryview) -> Any:
    if code != _DTYPE:
        raise ValueError(f"unknown msgpack extension {code} on the world's control plane; expected {_DTYPE} (torch.dtype)")
    return getattr(torch, bytes(data).decode())


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, ext_hook=_unpack)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    return _decoder.decode(frame)
