"""How long the simulator takes for a schedule: one whole weight update of one world, in one order, checked against every rule.

A world is set up and connected once, as `harness.sim.explore` does it, and then updated again and again. Every round measures a
number of schedules of every world in turn, so that a busy second hits all of them alike; figures are medians over the rounds.

  random, PCT   samplers; every schedule is another one
  reduced       the complete search, which has one schedule in these worlds: it also looks for steps that race
  CPU           of this process; says most where others use the machine, too
  wall          on the clock, of the random schedules
  steps         how often somebody was chosen to run in a random schedule

The first world, pp 2 and one engine of one worker, is the one with a promise: less than 2 ms a schedule.

    python -m benchmarks.simulator
    python -m benchmarks.simulator --rounds 21 --only pp2 --only "MoE of 16 ranks"
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.measure import Machine, options, show, write_json
from harness.sim import Scenario
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from harness.sim.simulation import Simulation, quietly

WORLDS = {
    "pp2": Scenario(pp=2),
    "pp2, 6 buckets": Scenario(pp=2, stages=((3, 1), (2, 0))),
    "pp2, two engines": Scenario(pp=2, engines=(1, 2)),
    "pp2, bridge export": Scenario(pp=2, stages=((2, 0), (2, 0)), export="bridge"),
    "pp3, two engines": Scenario(pp=3, stages=((2, 0), (1, 0), (2, 0)), engines=(1, 1)),
    "MoE of 16 ranks": Scenario(tp=2, dp=4, ep=4, etp=1, pp=2, stages=((2, 2), (2, 2)), engines=(1, 2)),
}
EXPLORERS: dict[str, Callable[[], Explorer]] = {"random": lambda: Uniform(1), "PCT": lambda: Pct(1, 3), "reduced": Reduced}


@dataclass
class Contestant:
    """One world under one explorer. Lists: a figure for each round, in milliseconds a schedule."""

    simulation: Simulation
    make: Callable[[], Explorer]
    explorer: Explorer
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def schedule(self) -> None:
        """The next one; a search that has seen everything begins anew. Raises AssertionError where it does not end well."""
        if not self.explorer.next():
            self.explorer = self.make()
            self.explorer.next()
        run = self.simulation.run(self.explorer)
        assert run.outcome.kind == "well", run.outcome.text
        self.steps.append(run.steps)

    def round(self, schedules: int) -> None:
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        for _ in range(schedules):
            self.schedule()
        self.cpu_ms.append(1e3 * (time.process_time() - cpu_began_s) / schedules)
        self.wall_ms.append(1e3 * (time.perf_counter() - began_s) / schedules)


def measure(worlds: Sequence[str], rounds: int, least_ms: float) -> dict[str, dict[str, Contestant]]:
    """Every world under every explorer, for at least `least_ms` in each round."""
    with ExitStack() as stack:
        stack.enter_context(quietly())
        found = {world: {how: Contestant(stack.enter_context(Simulation(WORLDS[world])), make, make())
                         for how, make in EXPLORERS.items()} for world in worlds}
        contestants = [contestant for of_world in found.values() for contestant in of_world.values()]
        for contestant in contestants:
            contestant.schedule()  # connects
            contestant.round(3)
        sizes = [max(1, int(least_ms / contestant.cpu_ms.pop())) for contestant in contestants]
        for contestant in contestants:
            contestant.wall_ms.clear()
            contestant.steps.clear()
        for _ in range(rounds):
            for contestant, size in zip(contestants, sizes, strict=True):
                contestant.round(size)
    return found


def rows(found: dict[str, dict[str, Contestant]]) -> list[list[str]]:
    return [[world, *(f"{statistics.median(c.cpu_ms):.2f}" for c in contestants.values()),
             f"{statistics.median(contestants['random'].wall_ms):.2f}", f"{statistics.mean(contestants['random'].steps):.0f}",
             str(WORLDS[world].layout.world_size)] for world, contestants in found.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options("simulator", __doc__ or "", rounds=9)
    parser.add_argument("--only", action="append", choices=list(WORLDS), metavar="WORLD",
                        help=f"this world only; repeatable. There are: {'; '.join(WORLDS)}")
    used = parser.parse_args(arguments)
    machine = Machine.look()
    found = measure(used.only or list(WORLDS), 1 if used.small else used.rounds, 10 if used.small else 150)
    show("ms a schedule", ["world", *(f"{how}, CPU" for how in EXPLORERS), "random, wall", "steps", "ranks"], rows(found),
         machine.caption())
    write_json(used.json, "simulator", machine, used, {
        world: {how: {"cpu_ms": c.cpu_ms, "wall_ms": c.wall_ms} for how, c in contestants.items()}
        for world, contestants in found.items()})


if __name__ == "__main__":
    main()
