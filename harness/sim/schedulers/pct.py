"""Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): random priorities, and `depth - 1` places where the
running task falls behind all others.

A bug that needs `depth` orderings is hit with a probability that depends on the number of tasks and steps, not on the number of
interleavings. Good at what random is bad at: one task that is late for very long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.recording.kernel import Task
from harness.sim.schedulers.base import Sampler


class Pct(Sampler):
    """`steps`: how many choices a schedule is expected to have; corrected by those that were seen."""

    def __init__(self, seed: int, depth: int, steps: int = 100) -> None:
        self.name = f"pct, depth {depth}, seed {seed}"
        self._seed, self._depth, self._steps = seed, depth, steps
        self._count = -1
        self._step = 0
        self._random = random.Random()
        self._priority: dict[str, float] = {}
        self._drops: dict[int, int] = {}

    def next(self) -> bool:
        self._count += 1
        self._steps = max(self._steps, self._step) if self._count else self._steps
        self._step = 0
        self._random.seed(f"{self._seed}/{self._depth}/{self._count}")
        self._priority = {}
        places = self._random.sample(range(self._steps), min(self._depth - 1, self._steps))
        self._drops = {place: -1 - i for i, place in enumerate(sorted(places))}
        return True

    def choose(self, candidates: Sequence[Task]) -> Task:
        chosen = max(candidates, key=self._priority_of)
        if (drop := self._drops.get(self._step)) is not None:
            self._priority[chosen.name] = drop
            chosen = max(candidates, key=self._priority_of)
        self._step += 1
        return chosen

    def _priority_of(self, task: Task) -> float:
        found = self._priority.get(task.name)
        if found is None:
            found = self._priority[task.name] = self._random.random()
        return found
