"""Every fault of a scenario, one at a time: at every operation of an update, whatever can be planted there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.sim.explore import Failure, ScheduleFailed, run_once
from harness.sim.faulty import SORTS, Place, Planted, places
from harness.sim.scenario import Scenario
from harness.sim.schedule import encode
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.fair import Fair


@dataclass(frozen=True)
class Struck:
    """How many faults were planted, and those after which something was not as it must be."""

    faults: int
    failures: Sequence[Failure]

    def text(self) -> str:
        """Empty where all ended well; else the first five, with the calls that replay them."""
        if not self.failures:
            return ""
        shown = [failure.text() for failure in self.failures[:5]]
        return "\n\n".join([*shown, f"… {len(self.failures)} of {self.faults} faults"])


def all_places(scenario: Scenario) -> list[Place]:
    """From a run in peace. Raises `ScheduleFailed` where that does not end well: nobody would learn from its faults."""
    run = run_once(scenario, Fair())
    if run.outcome.kind != "well":
        raise ScheduleFailed(Failure(scenario, run.outcome, encode(run.choices), 1, "round robin, without a fault"))
    return list(places(run.events))


def strike_everywhere(world: Scenario, explorer: Callable[[int], Explorer], *, sorts: Sequence[str] = SORTS) -> Struck:
    """`explorer(n)` chooses the schedule of the n-th fault. `sorts`: only these, of `harness.sim.faulty.SORTS`."""
    faults = [(place, fault) for place in all_places(world) for fault in place.faults() if Planted.read(fault).sort in sorts]
    found: list[Failure] = []
    for number, (place, fault) in enumerate(faults):
        scenario, how = replace(world, fault=fault), explorer(number)
        run = run_once(scenario, how)
        if run.outcome.kind != "well":
            found.append(Failure(scenario, run.outcome, encode(run.choices), number, f"{how.name}, at '{place.text}'"))
    return Struck(len(faults), found)
