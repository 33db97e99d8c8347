"""What a person sees when a deadline is over: one table on the console, everything else in a file.

The table says who waits for what (rank or engine, phase, stage, bucket, group, waiting for, since); the file has the rank's
Python stacks and its last events.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from staged_sync.errors import DeadlineExceeded, RanksAbsent
from staged_sync.seam import Seam
from staged_sync.trace import Position, Trace

logger = logging.getLogger(__name__)

COLUMNS = ("who", "phase", "stage", "bucket", "group", "waiting for", "since")


@dataclass(frozen=True, slots=True)
class Row:
    """One party of a hang. `since_s`: how long it has been waiting, in seconds; None where nobody knows."""

    who: str
    position: Position
    waiting_for: str
    since_s: float | None

    def cells(self) -> tuple[str, ...]:
        at = self.position
        return (self.who, at.phase, _text(at.stage), _text(at.bucket), at.group, self.waiting_for,
                "" if self.since_s is None else f"{self.since_s:.1f} s")


def rows_of(error: DeadlineExceeded, trace: Trace, now_s: float) -> list[Row]:
    """This rank, and everybody it waits for that can be named."""
    at = trace.position_of(error)
    since_s = now_s - trace.since_s
    rows = [Row(trace.actor, at, trace.waiting_for or str(error), since_s)]
    rows += [Row(who, at, f"has not answered {what}", since_s) for who, what in error.owed_by]
    if isinstance(error, RanksAbsent):
        rows += [Row(f"rank{rank}", Position("?"), "did not come to the status barrier", None) for rank in error.absent or ()]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows under their headings, aligned."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def report(error: DeadlineExceeded, seam: Seam, trace: Trace, folder: str | None) -> Path | None:
    """Log the table, write the file and return its path; None where it cannot be written (never raises)."""
    shown = table(rows_of(error, trace, seam.now()))
    path = Path(folder or tempfile.gettempdir()) / f"staged-sync-hang-{os.getpid()}-rank{trace.rank}.txt"
    try:
        events = "\n".join(f"{event.time_s:12.3f} {event.actor} [{event.phase}] {event.text()}" for event in list(trace.events))
        path.write_text(f"{error}\n\n{shown}\n\n--- stacks of rank {trace.rank} ---\n{seam.stacks()}\n"
                        f"--- its last events ---\n{events}\n")
    except Exception as problem:  # a report must never hide what it is about
        logger.error("a deadline is over on rank %d:\n%s\n(the hang report could not be written: %s)", trace.rank, shown, problem)
        return None
    logger.error("a deadline is over on rank %d:\n%s\nstacks and last events: %s", trace.rank, shown, path)
    return path


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
