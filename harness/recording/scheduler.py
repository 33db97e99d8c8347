"""Who runs next. The kernel asks this one function, so that another exploration is another function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from harness.recording.kernel import Task

Scheduler: TypeAlias = "Callable[[Sequence[Task], Task | None], Task]"
"""(runnable tasks in the order they were spawned, the task that ran last) -> the task that runs next."""


def round_robin(runnable: Sequence[Task], previous: Task | None) -> Task:
    """The first runnable task after the one that ran last: fair, and the same in every run."""
    if previous is None:
        return runnable[0]
    return next((task for task in runnable if task.index > previous.index), runnable[0])
