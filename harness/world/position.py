"""Where a rank stands in the protocol, published so that its supervisor can read it without the rank's help.

One line of JSON per event, appended with a single `write`: what was written before a SIGKILL or SIGSTOP is still there.
The last line is the position; the last lines are the rank's own account of what led there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from staged_sync.trace import Event

KEEP = 40
"""Lines that a hang report shows of each rank."""


class Standing(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log: what a rank does, and what it waits for since when (seconds on the host-wide monotonic clock)."""

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
        self._waits: list[tuple[str, float]] = []

    def restart(self, scenario: str) -> None:
        """Forget the last scenario: a report shows one scenario only."""
        os.ftruncate(self._fd, 0)
        self._waits.clear()
        self.note("scenario", detail=scenario)

    def on_event(self, event: Event) -> None:
        """For `staged_sync.trace.Trace(on_event=…)`."""
        self.note(event.event, phase=event.phase, stage=event.stage, bucket=event.bucket, group=event.group,
                  detail=event.detail)

    def note(self, event: str, *, phase: str = "", stage: int | None = None, bucket: int | None = None, group: str = "",
             detail: str = "", waits: bool = False) -> None:
        """Append one line. An operation that waits ends with `<event>.done` or `<event>.failed`."""
        now = time.monotonic()
        base, _, ending = event.partition(".")
        text = f"{base} {detail}".strip()
        if ending:
            self._waits_over(base)
        elif waits or base in _WAITS:
            self._waits.append((text, now))
        waiting_for, since_s = self._waits[-1] if self._waits else ("", now)
        line = Standing(now, f"{event} {detail}".strip(), phase, stage, bucket, group, waiting_for, since_s)
        os.write(self._fd, msgspec.json.encode(line) + b"\n")

    def _waits_over(self, base: str) -> None:
        """Drop the innermost wait of this kind, and what an exception left open inside it."""
        for index in range(len(self._waits) - 1, -1, -1):
            if self._waits[index][0].split(" ")[0] == base:
                del self._waits[index:]
                return


_WAITS = frozenset({"rpc", "barrier", "gather", "listen", "open", "send", "synchronize", "close",
                    "handle", "join", "replace", "receive", "generate"})
"""Events of the schema that begin a wait (docs/seam.md): each ends with `.done` or `.failed`."""


def read_log(path: Path, keep: int = KEEP) -> list[Standing]:
    """The last `keep` lines, oldest first; a line that was being written is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Standing) for line in lines[-keep:]]


def as_dicts(standings: list[Standing]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(standing) for standing in standings]
