"""Where a rank stands in the protocol, published so that its supervisor can read it without the rank's help.

One line of JSON per event, appended with a single `write`: what was written before a SIGKILL or SIGSTOP is still there.
The last line is the position; the last lines are the rank's own account of what led there.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from staged_sync.trace import Event, Trace

KEEP = 40
"""Lines that a hang report shows of each rank."""


class Standing(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log. Times are seconds on the clock that all processes of this host share."""

    time_s: float
    event: str
    phase: str = ""
    stage: int | None = None
    bucket: int | None = None
    group: str = ""
    waiting_for: str = ""
    since_s: float = 0.0


class PositionLog:
    """The writer's end, in the rank."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def restart(self, scenario: str) -> None:
        """Forget the last scenario: a report shows one scenario only."""
        os.ftruncate(self._fd, 0)
        self.note(f"scenario {scenario}")

    def note(self, event: str, *, waiting_for: str = "", group: str = "", bucket: int | None = None) -> None:
        """Append a line about something outside the library: a scenario, a remote call, a harness' own wait."""
        now = time.monotonic()
        self._append(Standing(now, event, group=group, bucket=bucket, waiting_for=waiting_for, since_s=now))

    def record(self, event: Event, trace: Trace) -> None:
        """Append a line about an event of the library's trace."""
        base, _, ending = event.event.partition(".")
        waiting_for = "" if ending and trace.waiting_for.startswith(base) else trace.waiting_for
        self._append(Standing(event.time_s, f"{event.event} {event.detail}".strip(), event.phase, event.stage, event.bucket,
                              event.group, waiting_for, trace.since_s))

    def _append(self, standing: Standing) -> None:
        os.write(self._fd, msgspec.json.encode(standing) + b"\n")


class PublishedEvents(deque[Event]):
    """A trace's ring of events that also writes each one to the position log, before the rank does what it announces.

    `then` sees every event after that, and may raise in the rank's name (planted faults).
    """

    def __init__(self, trace: Trace, log: PositionLog, *, then: Callable[[Event], None] | None = None, keep: int = 4096) -> None:
        super().__init__(maxlen=keep)
        self._trace = trace
        self._log = log
        self._then = then

    def append(self, event: Event) -> None:
        super().append(event)
        self._log.record(event, self._trace)
        if self._then is not None:
            self._then(event)


def read_log(path: Path, keep: int = KEEP) -> list[Standing]:
    """The last `keep` lines, oldest first; a line that was being written is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Standing) for line in lines[-keep:]]


def as_dicts(standings: list[Standing]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(standing) for standing in standings]
