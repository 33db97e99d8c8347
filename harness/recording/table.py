"""The wait-for table: one row per blocked rank, engine or worker, with its position in the protocol."""

from __future__ import annotations

from collections.abc import Sequence

from harness.recording.kernel import Task
from staged_sync.trace import Event

COLUMNS = ("who", "waits in", "group", "phase", "stage", "bucket", "for", "since event")


def wait_table(tasks: Sequence[Task], events: Sequence[Event]) -> str:
    """Empty where nobody waits."""
    rows = [COLUMNS, *(_row(task, events) for task in tasks)]
    if len(rows) == 1:
        return "(nobody waits)"
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(task: Task, events: Sequence[Event]) -> tuple[str, ...]:
    index = next((i for i in range(len(events) - 1, -1, -1) if events[i].actor == task.name), None)
    last = None if index is None else events[index]
    group = task.waiting.group or (last.group if last else "")
    position = ("", "", "") if last is None else (last.phase, _number(last.stage), _number(last.bucket))
    since = "" if last is None else f"{index} {last.text()}"
    return (task.name, task.waiting.operation, group, *position, task.waiting.missing(), since)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
