"""One ordered list of what happened: every layer appends, tests assert on it, people look at it as a timeline.

The event schema is frozen and written down in docs/seam.md. An operation that can wait appends one event when it begins
(`gather`) and one when it ends (`gather.done`, or `gather.failed`); everything else appends one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

EVENTS = frozenset({
    # trainer ranks
    "phase",        # detail: name of the phase that begins
    "rpc",          # detail: "<method> engine<i>" or "<method> lock"
    "barrier",      # detail: label of the status barrier
    "gather",       # group: tp | etp | ep; detail: Megatron name
    "listen",       # group: transfer group; detail: host:port
    "open",         # group: transfer group; detail: world size
    "send",         # group, stage, bucket; detail: HF names, space separated
    "synchronize",  # group, stage
    "close",        # group: transfer group
    "state",        # detail: "<attribute>=<value>": group name of the active source set and restored
    "error",        # detail: one line of text
    # engines (harness receivers and engine adapters)
    "handle",       # actor engine<i>: an RPC is taken up; detail: method
    "join",         # actor engine<i>/worker<j>: joins a transfer group
    "replace",      # actor engine<i>/worker<j>: drops the group it held
    "receive",      # actor engine<i>/worker<j>: group, bucket; detail: HF names
    "generate",     # actor engine<i>: serves a request with the weights it has
})
"""Names that may appear in `Event.event`, without the suffixes `.done` and `.failed`."""

_RECORDED = EVENTS | {f"{event}.{how}" for event in EVENTS for how in ("done", "failed")}


@dataclass(slots=True)  # not frozen, though nobody changes one: that would make it ten times as slow to make
class Event:
    """One thing that happened. `rank` is the trainer rank (None for an engine's own events)."""

    time_s: float
    rank: int | None
    actor: str
    event: str
    phase: str = ""
    stage: int | None = None
    bucket: int | None = None
    group: str = ""
    detail: str = ""

    def text(self) -> str:
        """The event as one word-like line, without rank and time: what call-order tests compare."""
        stage = "" if self.stage is None else f" stage={self.stage}"
        bucket = "" if self.bucket is None else f" bucket={self.bucket}"
        group = f" {self.group}" if self.group else ""
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.event}{group}{stage}{bucket}{detail}"


class Position(NamedTuple):
    """Where a rank stands in the protocol: goes into every event, every error and the hang report."""

    phase: str = "idle"
    stage: int | None = None
    bucket: int | None = None
    group: str = ""

    def text(self) -> str:
        parts = [f"phase {self.phase}"]
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.group:
            parts.append(f"group {self.group}")
        if self.bucket is not None:
            parts.append(f"bucket {self.bucket}")
        return ", ".join(parts)


class Trace:
    """Appends events for one trainer rank and keeps its position. `events` may be shared by several ranks (tests do).

    In production it is a ring of the last `keep` events: a hang report's last page, at no cost.
    `on_event` sees every event as it happens (the world harness publishes positions to its supervisor with it).
    """

    def __init__(self, rank: int, now: Callable[[], float], *, events: MutableSequence[Event] | None = None,
                 keep: int = 512, on_event: Callable[[Event], None] | None = None) -> None:
        self.rank = rank
        self.actor = f"rank{rank}"
        self.events: MutableSequence[Event] = deque(maxlen=keep) if events is None else events
        self.position = Position()
        self.waiting_for = ""
        self.since_s = now()
        self._now = now
        self.on_event = on_event
        self._failed: tuple[BaseException, Position] | None = None

    def record(self, event: str, *, detail: str = "", group: str | None = None) -> None:
        """Append one event at the current position. `group` overrides the position's transfer group."""
        if event not in _RECORDED:
            raise ValueError(f"unknown trace event {event!r}; the schema is staged_sync.trace.EVENTS")
        phase, stage, bucket, here = self.position
        entry = Event(self._now(), self.rank, self.actor, event, phase, stage, bucket, here if group is None else group, detail)
        self.events.append(entry)
        if self.on_event is not None:
            self.on_event(entry)

    def at(self, **changes: Any) -> AbstractContextManager[None]:
        """Stand at another position inside the block; restored on every path. `position_of` an error that leaves the block
        remembers the innermost one."""
        return _At(self, changes)

    def position_of(self, error: BaseException) -> Position:
        """Where this rank stood when `error` was raised."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else self.position

    def forget_error(self) -> None:
        """The call is over: its error belongs to the caller, and with it what its frames hold (a bucket, engine handles)."""
        self._failed = None

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        """Mark this rank as waiting for `what` inside the block; after an error the mark stays, for the hang report."""
        return _Waiting(self, what)

    def waiting(self, event: str, *, detail: str = "", group: str | None = None) -> AbstractContextManager[None]:
        """Record `event`, mark this rank as waiting for it, and record how it ended."""
        return _Waiting(self, f"{event} {detail}" if detail else event, event, detail, group)

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.events]


# Classes, because every barrier and every bucket enters a few of them: generators cost six times as much.

class _At:
    __slots__ = ("_before", "_changes", "_trace")

    def __init__(self, trace: Trace, changes: dict[str, Any]) -> None:
        self._trace = trace
        self._changes = changes

    def __enter__(self) -> None:
        trace = self._trace
        self._before = trace.position
        trace.position = self._before._replace(**self._changes)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        trace = self._trace
        if error is not None and (trace._failed is None or trace._failed[0] is not error):
            trace._failed = (error, trace.position)
        trace.position = self._before


class _Waiting:
    """Marks the rank as waiting for `what`; records `event`, and how it ended, unless it is empty."""

    __slots__ = ("_before", "_detail", "_event", "_group", "_trace", "_what")

    def __init__(self, trace: Trace, what: str, event: str = "", detail: str = "", group: str | None = None) -> None:
        self._trace = trace
        self._what = what
        self._event, self._detail, self._group = event, detail, group

    def __enter__(self) -> None:
        trace = self._trace
        self._before = (trace.waiting_for, trace.since_s)
        trace.waiting_for, trace.since_s = self._what, trace._now()
        if self._event:
            trace.record(self._event, detail=self._detail, group=self._group)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        trace = self._trace
        if self._event:
            ended = f"{self._event}.done" if error is None else f"{self._event}.failed"
            trace.record(ended, detail=self._detail, group=self._group)
        if error is None:
            trace.waiting_for, trace.since_s = self._before
