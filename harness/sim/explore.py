"""Many schedules of one scenario, and what came of them; a failure comes with the call that replays it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from harness.sim.outcome import Outcome
from harness.sim.schedule import decode, encode
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.replaying import Replaying
from harness.sim.schedulers.uniform import Uniform
from harness.sim.simulation import Run, quietly


class Simulated(Protocol):
    """A set-up world that runs one schedule after the other, until it is `spent`."""

    spent: bool

    def run(self, explorer: Explorer) -> Run: ...

    def close(self) -> None: ...


class Simulable(Protocol):
    """What can be explored. `repr` must make it again."""

    def simulate(self) -> Simulated: ...


@dataclass(frozen=True)
class Failure:
    """The first schedule that ended like this, and the `number` of schedules that were run until then."""

    scenario: Simulable
    outcome: Outcome
    schedule: str
    number: int
    explorer: str

    @property
    def replay(self) -> str:
        return f"harness.sim.replay({self.scenario!r}, {self.schedule!r})"

    def text(self) -> str:
        return (f"{self.outcome.kind} in schedule {self.number} ({self.explorer})\n{self.outcome.text}\n"
                f"replay it with: {self.replay}")


@dataclass
class Exploration:
    """`complete`: every order that can matter was run. Never true once a bound was hit."""

    explorer: str
    schedules: int = 0
    complete: bool = False
    redundant: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Summaries, with how often each was seen."""
    failures: list[Failure] = field(default_factory=list)
    """One per summary."""
    steps: int = 0
    seconds: float = 0.0

    def check(self) -> Self:
        """Every schedule ended well. Raises `ScheduleFailed` with the first that did not."""
        if self.failures:
            raise ScheduleFailed(self.failures[0])
        return self

    def text(self) -> str:
        search, count = "complete" if self.complete else "not complete", max(1, self.schedules)
        return (f"{self.explorer}: {self.schedules} schedules, {1e3 * self.seconds / count:.2f} ms CPU and "
                f"{self.steps / count:.0f} steps each, search {search}; {dict(self.outcomes)}")


class ScheduleFailed(AssertionError):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.text())


def explore(scenario: Simulable, explorer: Explorer, *, schedules: int, stop_at_first: bool = False,
            until: Callable[[Failure], bool] = lambda failure: False) -> Exploration:
    """Run up to `schedules` schedules; fewer where one fails and `stop_at_first`, or where a failure is what `until` wants."""
    result = Exploration(explorer.name)
    began = time.process_time()
    with quietly():
        _run(result, scenario, explorer, lambda: result.schedules >= schedules or _stops(result, stop_at_first, until))
        exhausted = result.schedules < schedules or not explorer.next()
    result.complete = exhausted and explorer.complete
    result.redundant = getattr(explorer, "redundant", 0)
    result.seconds = time.process_time() - began
    return result


def check_random(scenario: Simulable, *, schedules: int = 100, seed: int = 0) -> Exploration:
    return explore(scenario, Uniform(seed), schedules=schedules, stop_at_first=True).check()


def check_pct(scenario: Simulable, *, schedules: int = 100, depth: int = 3, seed: int = 0) -> Exploration:
    return explore(scenario, Pct(seed, depth), schedules=schedules, stop_at_first=True).check()


def check_all(scenario: Simulable, *, limit: int = 10_000) -> Exploration:
    """Every order that can matter, up to `limit` schedules; look at `.complete`."""
    return explore(scenario, Reduced(), schedules=limit, stop_at_first=True).check()


def replay(scenario: Simulable, schedule: str) -> Run:
    """One schedule again, in a fresh world."""
    return run_once(scenario, Replaying(*decode(schedule)))


def run_once(scenario: Simulable, explorer: Explorer) -> Run:
    with quietly():
        return _first(scenario, explorer)


def _first(scenario: Simulable, explorer: Explorer) -> Run:
    explorer.next()
    simulated = scenario.simulate()
    try:
        return simulated.run(explorer)
    finally:
        simulated.close()


def shrink(failure: Failure, *, tries: int = 200) -> Failure:
    """A schedule that ends in the same way with fewer and smaller choices: zeros where they do, from the longest stretch down."""
    choices, patient = decode(failure.schedule)
    best = list(choices)
    left = tries
    stretch = len(best)
    while stretch and left > 0:
        for at in range(0, len(best), stretch):
            candidate = [*best[:at], *[0] * len(best[at:at + stretch]), *best[at + stretch:]]
            if candidate == best or left <= 0:
                continue
            left -= 1
            if _ends_alike(failure, candidate, patient):
                best = candidate
        stretch //= 2
    outcome = run_once(failure.scenario, Replaying(best, patient)).outcome
    return Failure(failure.scenario, outcome, encode(best, patient), failure.number, f"{failure.explorer}, shrunk")


def _ends_alike(failure: Failure, choices: Sequence[int], patient: bool) -> bool:
    return run_once(failure.scenario, Replaying(choices, patient)).outcome.summary == failure.outcome.summary


def _run(result: Exploration, scenario: Simulable, explorer: Explorer, enough: Callable[[], bool]) -> None:
    simulated: Simulated | None = None
    try:
        while not enough() and explorer.next():
            if simulated is None or simulated.spent:
                simulated = _fresh(scenario, simulated)
            _add(result, scenario, explorer, simulated.run(explorer))
    finally:
        if simulated is not None:
            simulated.close()


def _stops(result: Exploration, stop_at_first: bool, until: Callable[[Failure], bool]) -> bool:
    return bool(result.failures) and (stop_at_first or until(result.failures[-1]))


def _fresh(scenario: Simulable, old: Simulated | None) -> Simulated:
    if old is not None:
        old.close()
    return scenario.simulate()


def _add(result: Exploration, scenario: Simulable, explorer: Explorer, run: Run) -> None:
    result.schedules += 1
    result.steps += run.steps
    outcome = run.outcome
    if outcome.kind != "well" and outcome.summary not in result.outcomes:
        result.failures.append(Failure(scenario, outcome, encode(run.choices, explorer.patient), result.schedules,
                                       result.explorer))
    result.outcomes[outcome.summary] += 1


