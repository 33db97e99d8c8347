"""Depth first, every interleaving, nothing left out: for the smallest worlds, and to judge the reduced search by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from harness.recording.access import Access
from harness.recording.kernel import Task


class Exhaustive:
    name = "exhaustive, unreduced"
    patient = listens = False

    def __init__(self) -> None:
        self.complete = False
        self._path: list[list[int]] = []
        """By choice: what was taken, and how many there were."""
        self._at = 0
        self._begun = self._cut = False

    def next(self) -> bool:
        if self._begun:
            while self._path and self._path[-1][0] + 1 >= self._path[-1][1]:
                self._path.pop()
            if not self._path:
                self.complete = not self._cut
                return False
            self._path[-1][0] += 1
        self._begun, self._at = True, 0
        return True

    def choose(self, candidates: Sequence[Task]) -> Task:
        if self._at == len(self._path):
            self._path.append([0, len(candidates)])
        taken, of = self._path[self._at]
        if of != len(candidates):
            raise AssertionError(f"not deterministic: choice {self._at} had {of} candidates, now {[t.name for t in candidates]}")
        self._at += 1
        return candidates[taken]

    def touch(self, thing: Hashable, access: Access) -> None:
        """Not asked for."""

    def clock_advanced(self) -> None:
        """Time passes only where nobody can run: not a choice."""

    def over(self, ended: bool) -> None:
        self._cut = self._cut or not ended
