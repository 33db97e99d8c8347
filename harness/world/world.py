"""One live world, as a test sees it: run scenarios on its ranks, hurt them, and get a report instead of a hang."""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from harness.world.deadline import Deadline
from harness.world.files import WorldFiles
from harness.world.hang import hang_report
from harness.world.hub import Hub, Outcome, RunState
from harness.world.wire import End, Respawn, Signal, Topology

START_WITHIN_S = 30.0
END_WITHIN_S = 10.0
SNAPSHOTS_WITHIN_S = 8.0
ERROR_GRACE_S = 5.0
"""After the first rank's error the others get this long: what they say is evidence, waiting for them is not."""


class WorldError(RuntimeError):
    """A world could not be started."""


class WorldHung(RuntimeError):
    """A scenario did not end in time. The text is the hang table and the path of the full report; the world is gone."""


class ScenarioFailed(RuntimeError):
    """A scenario raised on some ranks. `outcomes` has every rank's."""

    def __init__(self, function: str, outcomes: dict[int, Outcome], topology: Topology) -> None:
        self.outcomes = outcomes
        lines = [f"scenario {function} failed in the world {topology.text()}:"]
        said: dict[str, str] = {}
        for rank, outcome in sorted(outcomes.items()):
            if outcome.problem is None:
                continue
            name, line = f"{topology.actor(rank)} (rank {rank})", outcome.problem.line()
            if line in said:
                lines.append(f"--- {name}: the same as {said[line]}")
            else:
                lines += [f"--- {name}: {line}", outcome.problem.traceback.rstrip()]
                said[line] = name
        super().__init__("\n".join(lines))


class Process(Protocol):
    """What a world's processes hang on: the host's launcher, or torchrun itself."""

    def wait(self, deadline: Deadline) -> bool:
        """True once the world's processes are gone."""

    def kill(self) -> None: ...


class World:
    """Made by `WorldPool.get` or by `harness.world.main`; owns the hub and the directory."""

    def __init__(self, topology: Topology, files: WorldFiles) -> None:
        self.topology = topology
        self.files = files
        self.hub = Hub(files, topology)
        self.process: Process | None = None
        self.closed = False
        self.clean = True
        self.memory: dict[str, Any] = {}
        """What controllers want to remember of this world from test to test; gone with it."""
        self._run_ids = itertools.count()

    # --- life ----------------------------------------------------------------------------------------------------------
    def wait_ready(self, deadline: Deadline) -> None:
        """Until every rank has said hello."""
        states = self.hub.ranks
        self.hub.pump(lambda: all(s.alive for s in states) or any(s.ended for s in states), deadline)
        missing = [s for s in states if not s.alive]
        if missing:
            text = "; ".join(f"rank {s.rank}: {s.ended or 'no word'}" for s in missing)
            self.close()
            raise WorldError(f"the world {self.topology.text()} did not start within {deadline.limit_s:g} s: {text}. "
                             f"The logs of its processes are in {self.files.directory}")

    @property
    def healthy(self) -> bool:
        """Every rank lives, and no scenario left it in an unknown state."""
        if not self.closed:
            self.hub.pump(lambda: False, Deadline.after(0))
        return not self.closed and self.clean and all(state.alive for state in self.hub.ranks)

    def responsive(self, deadline: Deadline) -> bool:
        """Healthy, and every rank answers: none is stopped or still sits in what the last test left behind."""
        if not self.healthy:
            return False
        state = RunState(next(self._run_ids), "harness.world.rank:ping", set(range(self.topology.world_size)))
        self.hub.start(state, {})
        return self.hub.pump(lambda: not state.pending, deadline) and not state.failed

    def close(self) -> None:
        """End all processes of this world, by the ids they were started with. Keeps the logs where it was not clean."""
        if self.closed:
            return
        self.closed = True
        self.hub.tell_supervisors(range(self.topology.world_size), End())
        if self.process is not None and not self.process.wait(Deadline.after(END_WITHIN_S)):
            self.process.kill()
        self.hub.close()
        if self.clean:
            shutil.rmtree(self.files.directory, ignore_errors=True)

    # --- scenarios -----------------------------------------------------------------------------------------------------
    def start(self, function: str | Callable[..., Any], *, on: Iterable[int], **kwargs: Any) -> Run:
        """Start `function(context, **kwargs)` on the ranks `on`. One scenario at a time."""
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        state = RunState(next(self._run_ids), name, set(on))
        self.hub.start(state, kwargs)
        return Run(self, state)

    def run(self, function: str | Callable[..., Any], *, on: Iterable[int], deadline: Deadline, **kwargs: Any) -> list[Any]:
        """Start and wait; the values by rank. Any rank's error raises `ScenarioFailed`, and the world is replaced."""
        outcomes = self.start(function, on=on, **kwargs).wait(deadline)
        if any(outcome.problem is not None for outcome in outcomes.values()):
            self.clean = False
            name = function if isinstance(function, str) else function.__name__
            raise ScenarioFailed(name, outcomes, self.topology)
        return [outcome.value for _, outcome in sorted(outcomes.items())]

    @property
    def trainer_ranks(self) -> range:
        return range(self.topology.trainers)

    @property
    def receiver_ranks(self) -> range:
        return range(self.topology.trainers, self.topology.world_size)

    # --- faults --------------------------------------------------------------------------------------------------------
    def kill(self, rank: int, deadline: Deadline) -> None:
        """SIGKILL the rank's process; returns when it is gone. torchrun does not notice."""
        self.hub.tell_supervisors([rank], Signal(signal.SIGKILL))
        if not self.hub.pump(lambda: bool(self.hub.ranks[rank].ended), deadline):
            raise WorldError(f"rank {rank} was still alive {deadline.limit_s:g} s after SIGKILL")

    def signal(self, rank: int, number: signal.Signals, deadline: Deadline) -> None:
        """For SIGSTOP and SIGCONT; returns when the kernel has done it."""
        self.hub.signalled.discard((rank, number))
        self.hub.tell_supervisors([rank], Signal(number))
        if not self.hub.pump(lambda: (rank, number) in self.hub.signalled, deadline):
            raise WorldError(f"the supervisor of rank {rank} did not confirm {number.name} within {deadline.limit_s:g} s")

    def respawn(self, rank: int, deadline: Deadline) -> None:
        """A new process in the place of this rank, as empty as at the start of the world."""
        self.hub.ranks[rank].starts_anew()
        self.hub.tell_supervisors([rank], Respawn())
        if not self.hub.pump(lambda: self.hub.ranks[rank].alive, deadline):
            raise WorldError(f"rank {rank} did not come back within {deadline.limit_s:g} s")


class Run:
    """A scenario under way."""

    def __init__(self, world: World, state: RunState) -> None:
        self._world = world
        self._state = state

    def wait(self, deadline: Deadline, *, error_grace_s: float = ERROR_GRACE_S) -> dict[int, Outcome]:
        """Every rank's outcome. Raises `WorldHung`, with the report written and the world killed, where one stays away."""
        hub, state = self._world.hub, self._state
        hub.pump(lambda: state.failed or not state.pending, deadline)
        if state.failed:
            deadline = deadline.at_most(error_grace_s)
            hub.pump(lambda: not state.pending, deadline)
        if state.pending:
            raise WorldHung(self._report(deadline)) from None
        return dict(state.outcomes)

    def wait_reached(self, rank: int, point: str, deadline: Deadline) -> None:
        """Until `rank` stands at the freeze point; raises `WorldHung` where it does not come."""
        state = self._state
        if not self._world.hub.pump(lambda: (rank, point) in state.reached or rank in state.outcomes, deadline):
            raise WorldHung(self._report(deadline)) from None
        if (rank, point) not in state.reached:
            raise ScenarioFailed(state.function, state.outcomes, self._world.topology)

    def go(self, rank: int, point: str) -> None:
        """Let `rank` leave the freeze point."""
        self._world.hub.go(rank, point)

    def _report(self, deadline: Deadline) -> str:
        """Collect first, then kill: the evidence is in the processes."""
        world, state = self._world, self._state
        world.clean = False
        snapshots = world.hub.collect_snapshots(Deadline.after(SNAPSHOTS_WITHIN_S))
        text = hang_report(world.topology, state, snapshots, limit_s=deadline.limit_s, directory=world.files.directory,
                           lock_held=world.hub.lock.held)
        world.close()
        return text


def make_files(topology: Topology, root: Path | None = None) -> WorldFiles:
    """A new world's own directory, in `root` or the system's temporary folder."""
    files = WorldFiles(Path(tempfile.mkdtemp(prefix="world-", dir=root)))
    files.write_topology(topology)
    return files
