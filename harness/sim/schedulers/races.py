"""Which steps of one run could have come in the other order, by vector clocks; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.recording.access import Access, Relations

Touches: TypeAlias = list[tuple[Hashable, Access]]

Touched: TypeAlias = defaultdict[Hashable, dict[Access, dict[str, list[int]]]]
"""How each thing has been touched so far, and by whom: access, task, numbers of its steps."""


@dataclass(slots=True)
class Step:
    """What one task did in one go. `before_clock`: nobody could run after it, and time passed."""

    task: str
    touches: Touches
    before_clock: bool = False


@dataclass(frozen=True)
class Race:
    """Step number `first`, and a later one of task `by`, in an order that nothing enforced. `leads_there`: tasks with a step in
    between that the later one needed, soonest first."""

    first: int
    by: str
    leads_there: tuple[str, ...]


@dataclass
class _Clocks:
    """For every step: the last step of each task that must have come before it."""

    of_step: list[dict[str, int]] = field(default_factory=list)
    of_task: dict[str, dict[str, int]] = field(default_factory=dict)
    of_all: dict[str, int] = field(default_factory=dict)

    def begin(self, task: str) -> dict[str, int]:
        return {**self.of_all, **self.of_task.get(task, {})} if self.of_all else dict(self.of_task.get(task, {}))

    def end(self, number: int, task: str, clock: dict[str, int], before_clock: bool) -> None:
        clock[task] = number
        self.of_step.append(clock)
        self.of_task[task] = clock
        if before_clock:
            for seen in self.of_task.values():
                _join(self.of_all, seen)
            self.of_task = {name: {**self.of_all, **seen} for name, seen in self.of_task.items()}


def races_of(steps: Sequence[Step], relations: Relations) -> list[Race]:
    """Pairs of steps of different tasks that race, with no third step that orders them."""
    clocks = _Clocks()
    touched: Touched = defaultdict(dict)
    races: list[Race] = []
    for number, step in enumerate(steps):
        clock = clocks.begin(step.task)
        found = []
        for earlier, race in _met(step, clock, touched, relations):
            if clock.get(steps[earlier].task, -1) >= earlier:
                continue  # ordered by something in between
            if race:
                found.append(earlier)
            _join(clock, clocks.of_step[earlier])
        clocks.end(number, step.task, clock, step.before_clock)
        races += [Race(first, step.task, tuple(_between(steps, first, clock))) for first in found]
        for thing, access in step.touches:
            touched[thing].setdefault(access, {}).setdefault(step.task, []).append(number)
    return races


def _met(step: Step, clock: dict[str, int], touched: Touched, relations: Relations) -> list[tuple[int, bool]]:
    """Earlier steps of others that this one does not commute with and is not known to come after, latest first, and whether
    they race."""
    met: dict[int, bool] = {}
    for thing, access in step.touches:
        for before, by_task in touched[thing].items():
            if (relation := relations[before, access]) == "commutes":
                continue
            for task, numbers in by_task.items():
                if task == step.task or clock.get(task, -1) >= numbers[-1]:
                    continue
                for number in numbers:
                    met[number] = met.get(number, False) or relation == "races"
    return sorted(met.items(), reverse=True) if met else []


def _between(steps: Sequence[Step], first: int, clock: dict[str, int]) -> Iterator[str]:
    """Tasks with a step after `first` that is part of `clock`'s past."""
    seen = set()
    for number in range(first + 1, len(steps)):
        task = steps[number].task
        if task not in seen and clock.get(task, -1) >= number:
            seen.add(task)
            yield task


def _join(into: dict[str, int], other: dict[str, int]) -> None:
    for task, number in other.items():
        if into.get(task, -1) < number:
            into[task] = number
