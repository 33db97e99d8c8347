"""One world: trainer ranks and engines in one process, one event log, one virtual clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch

from harness.faults import Faults, InjectedFailure
from harness.recording.engines import EngineOptions, StubEngine
from harness.recording.groups import Collective
from harness.recording.kernel import MAX_STEPS, Kernel, Task
from harness.recording.lock import StubLock
from harness.recording.network import Channel, Network
from harness.recording.scheduler import Scheduler, round_robin
from harness.recording.seam import RecordingSeam
from harness.recording.table import wait_table
from harness.recording.topology import Layout
from staged_sync.exporter import TensorMeta
from staged_sync.seam import Coordinates, GatherGroup, Work
from staged_sync.trace import Event, Trace


class SendsLater(Protocol):
    """A device that takes a broadcast into its queue and reads the tensors when it gets to it."""

    def send(self, channel: Channel, tensors: Sequence[torch.Tensor]) -> Work[None]: ...

    def synchronize(self, channel: Channel) -> Work[None]: ...


@dataclass(frozen=True)
class RankContext:
    """What one trainer rank's function gets."""

    rank: int
    coordinates: Coordinates
    seam: RecordingSeam
    trace: Trace
    world: RecordingWorld


@dataclass(frozen=True)
class RunResult:
    """How one run ended. `stalls` are wait-for tables from each time when only the clock could go on."""

    results: Mapping[int, Any]
    errors: Mapping[int, BaseException]
    events: Sequence[Event]
    stalls: Sequence[str]
    violations: Sequence[str]
    died: Sequence[int]
    elapsed_s: float

    def check(self) -> Self:
        """Nothing went wrong: no error, no violated rule, no wait for time to pass."""
        wrong = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in self.errors.items()]
        wrong += [f"violation: {violation}" for violation in self.violations]
        wrong += [f"rank {rank} died" for rank in self.died]
        wrong += [f"stall, nobody could go on:\n{table}" for table in self.stalls]
        if wrong:
            raise AssertionError("\n".join(["the run was not clean:", *wrong]))
        return self


class RecordingWorld:
    """`engines` lists workers per engine, or `EngineOptions`. `model` maps HF name to what the engines' model holds.

    Use as a context manager, or call `close()`: engines are greenlets that wait for the next call.
    """

    def __init__(self, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, *,
                 engines: Sequence[int | EngineOptions] = (1,), model: Mapping[str, TensorMeta] | None = None,
                 faults: Faults | None = None, scheduler: Scheduler = round_robin, max_steps: int = MAX_STEPS) -> None:
        self.layout = Layout(tp, pp, dp, cp, ep, etp)
        self.faults = Faults() if faults is None else faults
        self.events: list[Event] = []
        """The one log: what everybody appends to."""
        self._traces: list[Trace] = []
        self.violations: list[str] = []
        self.kernel = Kernel(scheduler, max_steps=max_steps, table=lambda tasks: wait_table(tasks, self.events))
        self.kernel.note = self._note
        self.network = Network(self.kernel)
        self.broken_control: dict[int, str] = {}
        self.devices: dict[int, SendsLater] = {}
        """Ranks whose sends go through the queue of a device (harness/sim/streams.py); the others' are rendezvous."""
        self._control: dict[int, Collective] = {}
        self._gather_of: dict[tuple[int, str], Collective] = {}
        """The group that a rank gathers in, by rank and kind."""
        self._model = model or {}
        self.lock = StubLock(self.kernel)
        self.engines: list[StubEngine] = []
        for options in engines:
            self.add_engine(options)
        self.contexts = [self._context(c) for c in self.layout.ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unwind every greenlet that has not ended."""
        self._unwind(list(self.kernel.tasks))
        self.kernel.let_go()

    @property
    def handles(self) -> list[Any]:
        return [engine.handle for engine in self.engines]

    def add_engine(self, options: int | EngineOptions = 1) -> StubEngine:
        """One more engine, also in the life of a world (a replacement with the weights it was born with)."""
        options = EngineOptions(workers=options) if isinstance(options, int) else options
        engine = StubEngine(self.kernel, self.network, self.events, len(self.engines), self._model, options,
                            faults=self.faults, violation=self._note)
        self.engines.append(engine)
        return engine

    def run(self, function: Callable[[RankContext], Any], *, ranks: Sequence[int] | None = None) -> RunResult:
        """Run `function` on every rank (or on `ranks`) until all have returned or raised, and the engines are idle.

        Raises `Deadlock` when nobody can go on and no deadline is pending.
        """
        chosen = range(self.layout.world_size) if ranks is None else ranks
        tasks = {rank: self.kernel.spawn(f"rank{rank}", functools.partial(function, self.contexts[rank])) for rank in chosen}
        first_event, first_violation, began_s = len(self.events), len(self.violations), self.kernel.now_s
        self.kernel.stalls.clear()
        for trace in self._traces if self.faults else ():
            trace.on_event = self._strike
        try:
            self.kernel.run()
        finally:
            self._unwind(list(tasks.values()))
        return RunResult(
            results={rank: task.result for rank, task in tasks.items() if task.error is None and not task.died},
            errors={rank: task.error for rank, task in tasks.items() if task.error is not None},
            events=list(self.events[first_event:]), stalls=tuple(self.kernel.stalls),
            violations=tuple(self.violations[first_violation:]),
            died=[rank for rank, task in tasks.items() if task.died], elapsed_s=self.kernel.now_s - began_s)

    def gather_group(self, rank: int, group: GatherGroup | Literal["pp"]) -> Collective:
        found = self._gather_of.get((rank, group))
        if found is None:
            members = self.layout.members(rank, group)
            found = Collective(self.kernel, f"{group}[{','.join(map(str, members))}]", members)
            self._gather_of.update({(member, group): found for member in members})
        return found

    @property
    def lost_a_gather_group(self) -> bool:
        return any(group.absent for group in self._gather_of.values())

    def control_group(self, generation: int) -> Collective:
        everybody = range(self.layout.world_size)
        return self._control.setdefault(generation, Collective(self.kernel, f"control{generation}", everybody))

    def begin_era(self, era: str) -> None:
        """Between two runs: forget what is over, so that the next one begins like any other of this era."""
        self.kernel.begin_era(era)
        self.network.forget()
        for collective in [*self._control.values(), *self._gather_of.values()]:
            collective.count_anew()
        self.events.clear()
        self.violations.clear()
        self.kernel.endless.clear()

    def wait_table(self) -> str:
        """Who waits for what at this moment."""
        return wait_table(self.kernel.blocked(), self.events)

    def _context(self, coordinates: Coordinates) -> RankContext:
        rank = coordinates.rank
        seam = RecordingSeam(self, rank)
        return RankContext(rank, coordinates, seam, self.follow(Trace(rank, seam.now)), self)

    def follow(self, trace: Trace) -> Trace:
        """Let `trace` write into the log, and the faults strike the rank that writes."""
        trace.events = self.events
        self._traces.append(trace)
        return trace

    def _strike(self, event: Event) -> None:
        fault = self.faults.on_event(event)
        if fault is not None and fault.action == "dies":
            self.kernel.die()
        if fault is not None:
            raise InjectedFailure(fault.text())

    def _note(self, violation: str) -> None:
        last = f" (after event {len(self.events) - 1}: {self.events[-1].text()})" if self.events else ""
        self.violations.append(violation + last)

    def _unwind(self, tasks: Sequence[Task]) -> None:
        """End what has not ended; what their `finally` blocks would log did not happen in this world."""
        happened = len(self.events)
        for trace in self._traces if self.faults else ():
            trace.on_event = None
        self.kernel.kill(tasks)
        del self.events[happened:]
