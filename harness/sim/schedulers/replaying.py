"""One given schedule again; zeros after its end."""

from __future__ import annotations

from collections.abc import Sequence

from harness.recording.kernel import Task
from harness.sim.schedule import encode
from harness.sim.schedulers.base import Sampler


class Replaying(Sampler):
    """A number that is too large for its place takes the last candidate: shrinking makes such schedules, replaying does not."""

    def __init__(self, choices: Sequence[int], patient: bool = False) -> None:
        self.name = f"replay of {encode(choices, patient)}"
        self.patient = patient
        self._choices = choices
        self._at = 0
        self._left = 1

    def next(self) -> bool:
        self._at = 0
        self._left -= 1
        return self._left >= 0

    def choose(self, candidates: Sequence[Task]) -> Task:
        wanted = self._choices[self._at] if self._at < len(self._choices) else 0
        self._at += 1
        return candidates[min(wanted, len(candidates) - 1)]
