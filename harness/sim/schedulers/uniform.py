"""Seeded random: every candidate is as likely as every other, at every point."""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.recording.kernel import Task
from harness.sim.schedulers.base import Sampler


class Uniform(Sampler):
    """The n-th schedule of a seed is the same in every run, whatever the other schedules did."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = -1
        self._random = random.Random()
        self.name = f"random, seed {seed}"

    def next(self) -> bool:
        self._count += 1
        self._random.seed(f"{self._seed}/{self._count}")
        return True

    def choose(self, candidates: Sequence[Task]) -> Task:
        return candidates[int(self._random.random() * len(candidates))]
