"""Round robin, as an explorer: one schedule, all zeros."""

from __future__ import annotations

from collections.abc import Sequence

from harness.recording.kernel import Task
from harness.sim.schedulers.base import Sampler


class Fair(Sampler):
    name = "round robin"

    def __init__(self) -> None:
        self._left = 1

    def next(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def choose(self, candidates: Sequence[Task]) -> Task:
        return candidates[0]
