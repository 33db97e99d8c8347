"""One task is late for everything: it runs only where nobody else can. One schedule.

How far the others get without it is as far as they get in any order that differs from this one by steps that commute. So where
the reduced search has one class of schedules, what this one shows of running ahead of the task is all there is to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.recording.kernel import Task
from harness.sim.schedulers.base import Sampler


class Late(Sampler):
    def __init__(self, task: str) -> None:
        self.name = f"{task} is late"
        self._task = task
        self._left = 1

    def next(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def choose(self, candidates: Sequence[Task]) -> Task:
        return next((task for task in candidates if task.name != self._task), candidates[0])
