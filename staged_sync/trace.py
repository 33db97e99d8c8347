"""One ordered list of what happened: every layer appends, tests assert on it, people look at it as a timeline.

The event schema is frozen and written down in docs/seam.md. An operation that can wait appends one event when it begins
(`gather`) and one when it ends (`gather.done`, or `gather.failed`); everything else appends one event.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Position:
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
        if event.split(".")[0] not in EVENTS:
            raise ValueError(f"unknown trace event {event!r}; the schema is staged_sync.trace.EVENTS")
        at = self.position
        entry = Event(self._now(), self.rank, self.actor, event, at.phase, at.stage, at.bucket,
                      at.group if group is None else group, detail)
        self.events.append(entry)
        if self.on_event is not None:
            self.on_event(entry)

    @contextlib.contextmanager
    def at(self, **changes: Any) -> Iterator[None]:
        """Stand at another position inside the block; restored on every path. `position_of` an error that leaves the block
        remembers the innermost one."""
        before = self.position
        self.position = replace(before, **changes)
        try:
            yield
        except BaseException as error:
            if self._failed is None or self._failed[0] is not error:
                self._failed = (error, self.position)
            raise
        finally:
            self.position = before

    def position_of(self, error: BaseException) -> Position:
        """Where this rank stood when `error` was raised."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else self.position

    @contextlib.contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """Mark this rank as waiting for `what` inside the block; after an error the mark stays, for the hang report."""
        before = (self.waiting_for, self.since_s)
        self.waiting_for, self.since_s = what, self._now()
        yield
        self.waiting_for, self.since_s = before

    @contextlib.contextmanager
    def waiting(self, event: str, *, detail: str = "", group: str | None = None) -> Iterator[None]:
        """Record `event`, mark this rank as waiting for it, and record how it ended."""
        with self.waits_for(f"{event} {detail}".strip()):
            self.record(event, detail=detail, group=group)
            try:
                yield
            except BaseException:
                self.record(f"{event}.failed", detail=detail, group=group)
                raise
            self.record(f"{event}.done", detail=detail, group=group)

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self.events]
