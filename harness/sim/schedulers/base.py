"""What a way of exploring is: it makes one schedule after the other and says whether it has seen all there are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from harness.recording.access import Access
from harness.recording.kernel import Task


class Explorer(Protocol):
    name: str
    """With its seed or bound, for headers and failures."""
    patient: bool
    """Whether a wait for several works is woken only when its outcome is clear."""
    listens: bool
    """Whether it wants to see every step and every touch, also where there is nothing to choose."""
    complete: bool
    """Every schedule that can matter has been run. False before the end, and for ever where a bound was hit."""

    def next(self) -> bool:
        """Get ready for one more schedule; False where there is none left."""

    def choose(self, candidates: Sequence[Task]) -> Task:
        """Who runs, of `candidates` in round robin's order."""

    def touch(self, thing: Hashable, access: Access) -> None:
        """The step that runs touches a shared thing."""

    def clock_advanced(self) -> None:
        """Time has passed: what comes next could not have come before."""

    def over(self, ended: bool) -> None:
        """The schedule is at its end; `ended` is False where a bound cut it off."""


class Sampler:
    """Base of explorers that draw schedules: they never know that they have seen all."""

    patient: bool = False
    listens = complete = False

    def touch(self, thing: Hashable, access: Access) -> None:
        """Not asked for."""

    def clock_advanced(self) -> None:
        """Nothing to do."""

    def over(self, ended: bool) -> None:
        """Nothing to do."""
