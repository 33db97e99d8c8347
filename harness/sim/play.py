"""A play: one function on every rank of a bare world. For what is smaller than an update, and for testing the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.recording.engines import EngineOptions
from harness.recording.kernel import StepBound
from harness.recording.world import RankContext, RecordingWorld, RunResult
from harness.sim.outcome import Findings, Outcome
from harness.sim.schedulers.base import Explorer
from harness.sim.simulation import Run, attempt, explored_by
from staged_sync.exporter import TensorMeta


@dataclass(frozen=True)
class Play:
    """`function(context)` on `ranks` trainer ranks; a schedule that ends well is told by what the ranks returned."""

    function: Callable[[RankContext], Any]
    ranks: int = 1
    engines: tuple[int | EngineOptions, ...] = ()
    model: Mapping[str, TensorMeta] | None = None
    max_steps: int = 5_000
    stall_is_deadlock: bool = True

    def __repr__(self) -> str:
        return f"Play({self.function.__module__}.{self.function.__qualname__}, ranks={self.ranks}, engines={self.engines})"

    def simulate(self) -> Stage:
        return Stage(self)


class Stage:
    """A fresh world for one performance."""

    def __init__(self, play: Play) -> None:
        self.spent = False
        self._play = play
        self._world = RecordingWorld(tp=play.ranks, engines=play.engines, model=play.model, max_steps=play.max_steps)
        self._world.kernel.stall_is_deadlock = play.stall_is_deadlock

    def run(self, explorer: Explorer) -> Run:
        world, self.spent = self._world, True
        world.begin_era("explored")
        with explored_by(explorer, world.kernel) as choices:
            found, result = attempt(lambda: world.run(self._play.function))
        explorer.over(not isinstance(found.stopped, StepBound))
        noted = Findings(found.stopped, noted=tuple(world.violations), raised=_raised(result))
        outcome = noted.outcome()
        if outcome.kind == "well" and result is not None:
            outcome = Outcome("well", repr(dict(result.results)))
        return Run(outcome, tuple(choices.made), choices.steps, list(world.events))

    def close(self) -> None:
        self._world.close()


def _raised(result: RunResult | None) -> list[str]:
    return [] if result is None else [f"rank {rank}: {type(e).__name__}: {e}" for rank, e in result.errors.items()]
