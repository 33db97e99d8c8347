"""One scenario, set up: the real `UpdateWeightFromDistributed` on every rank of a world whose scheduler is an explorer.

A world is connected once and then updated again and again, as in a training job: after an update that ended well, the next one
begins like any other. A world in which something went wrong is thrown away.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from harness.faults import Faults
from harness.recording.job import RecordingJob
from harness.recording.kernel import Deadlock, Kernel, StepBound, Task
from harness.recording.scheduler import round_robin
from harness.recording.world import RunResult
from harness.sim.exports import EXPORTERS
from harness.sim.faulty import Planted, aftermath, cannot_recover, recovery
from harness.sim.invariants import Facts, violations
from harness.sim.outcome import Findings, Outcome
from harness.sim.scenario import Scenario, checkpoint_folder
from harness.sim.schedule import Choices, in_turn
from harness.sim.schedulers.base import Explorer
from harness.sim.streams import Device
from staged_sync.trace import Event

MAX_STEPS = 60_000
"""Of one schedule: a pp=4 update of 16 ranks takes 3,000."""

SHORT = {"update_weight_call_timeout": 30.0, "update_weight_phase_timeout": 100.0, "update_weight_timeout": 600.0}


@dataclass(frozen=True)
class Run:
    """One schedule: how it ended, which choices it made, and what happened."""

    outcome: Outcome
    choices: Choices
    steps: int
    events: Sequence[Event]
    facts: Facts | None = None
    """None where it did not come to its end, and of plays."""


class Simulation:
    """`run(explorer)` runs one schedule. Use as a context manager: greenlets wait in it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.spent = False
        self.faults = Faults()
        self._mutant = ExitStack()
        self._mutant.enter_context(scenario.applied())
        self.job = make_job(scenario, self.faults)
        world = self.job.world
        if scenario.sends == "streams":
            world.devices.update({rank: Device(world.kernel, rank) for rank in range(world.layout.world_size)})
        self.connected = False
        self._names = scenario.names
        self.job.world.kernel.stall_is_deadlock = not scenario.ends_by_deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.job.close()
        self._mutant.close()

    def run(self, explorer: Explorer) -> Run:
        """One schedule, from its beginning. After anything but a good end the simulation is `spent`."""
        world, job = self.job.world, self.job
        if not self.connected and not self.scenario.connects:
            self._connect()
        world.begin_era("explored")
        job.step = 1 + job.step % 3
        if self.scenario.fault:
            return self._run_fault(explorer, Planted.read(self.scenario.fault))
        with explored_by(explorer, world.kernel) as choices:
            found, result = attempt(self._body)
        explorer.over(not isinstance(found.stopped, StepBound))
        facts = None if result is None else self._facts(result)
        outcome = self._judge(found, facts).outcome()
        self.spent = self.scenario.connects or outcome.kind != "well"
        return Run(outcome, tuple(choices.made), choices.steps, list(world.events), facts)

    def _run_fault(self, explorer: Explorer, planted: Planted) -> Run:
        """The update in which the fault strikes, and, where the trainer lives on, the next one."""
        self.spent, world, job = True, self.job.world, self.job
        planted.plant(self.faults)
        facts = None
        with explored_by(explorer, world.kernel) as choices:
            found, result = attempt(job.update)
            events = list(world.events)
            if result is not None:
                facts = self._facts(result)
                found = aftermath(job, result, facts)
                if found.outcome().kind == "well" and not cannot_recover(job, result):
                    again, troubles = attempt(lambda: recovery(job, planted))
                    found = replace(again, unplanned=troubles or [])
        explorer.over(not isinstance(found.stopped, StepBound))
        return Run(found.outcome(), tuple(choices.made), choices.steps, events, facts)

    def _connect(self) -> None:
        self.job.connect().check()
        self.connected = True

    def _body(self) -> RunResult:
        if not self.scenario.connects:
            return self.job.update()
        connect = self.job.connect()
        return self.job.update() if not connect.errors else connect

    def _facts(self, result: RunResult) -> Facts:
        job, scenario = self.job, self.scenario
        well = not result.errors and not result.died
        return Facts(
            layout=job.world.layout, engines=scenario.engines, names=self._names,
            raised={rank: f"{type(error).__name__}: {error}" for rank, error in result.errors.items()},
            died=tuple(result.died), endless=tuple(job.world.kernel.endless),
            differences=tuple(job.differences()) if well else (),
            publishes=not job.world.engines[0].options.plain_vime, export=scenario.export)

    def _judge(self, found: Findings, facts: Facts | None) -> Findings:
        world = self.job.world
        noted = tuple(world.violations)
        if facts is None:
            return replace(found, noted=noted)
        events = update_events(world.events) if self.scenario.connects else world.events
        raised = [f"rank {rank}: {text}" for rank, text in facts.raised.items()]
        kept = 1 if facts.keeps_its_group else 0
        leaked = [f"transfer group {channel.name} of rank {channel.source} is still open after the update"
                  for channel in world.network.live()[kept:]]
        return replace(found, noted=noted, broken=violations(events, facts), leaked=leaked, raised=raised)


def make_job(scenario: Scenario, faults: Faults) -> RecordingJob:
    table = scenario.table
    args: dict[str, Any] = {
        **SHORT, "update_weight_buffer_size": scenario.bucket_bytes, "vllm_weight_sync_packed": scenario.packed,
        "update_weight_packed_buffer_size": scenario.packed_buffer_bytes, "update_weight_report_folder": "no such folder"}
    folder = checkpoint_folder(scenario.stages or ((1, 0),) * scenario.pp, scenario.vpp)
    return RecordingJob(table=table, engines=scenario.engine_options(), args=args, faults=faults, folder=folder,
                        make_exporter=EXPORTERS[scenario.export], max_steps=MAX_STEPS, tp=scenario.tp, pp=scenario.pp,
                        dp=scenario.dp, cp=scenario.cp, ep=scenario.ep, etp=scenario.etp)


def update_events(events: Sequence[Event]) -> Sequence[Event]:
    """Without connect: from the first event of the update on."""
    first = next((i for i, event in enumerate(events) if event.phase == "pause"), len(events))
    return events[first:]


T = TypeVar("T")


def attempt(body: Callable[[], T]) -> tuple[Findings, T | None]:
    """Run `body`; where it stops for good, that is a finding."""
    try:
        return Findings(), body()
    except (Deadlock, StepBound) as stopped:
        return Findings(stopped=stopped), None


@dataclass
class Made:
    """The choices of one schedule, as it goes."""

    made: list[int]
    steps: int = 0


@contextmanager
def explored_by(explorer: Explorer, kernel: Kernel) -> Iterator[Made]:
    """Let `explorer` choose in `kernel` inside the block."""
    made = Made([])
    choose, note, listens = explorer.choose, made.made.append, explorer.listens
    now_s, steps = kernel.now_s, 0

    def schedule(runnable: Sequence[Task], previous: Task | None) -> Task:
        nonlocal now_s, steps
        steps += 1
        if listens and kernel.now_s != now_s:
            now_s = kernel.now_s
            explorer.clock_advanced()
        if len(runnable) == 1:
            return choose(runnable) if listens else runnable[0]
        candidates = in_turn(runnable, previous)
        chosen = choose(candidates)
        note(candidates.index(chosen))
        return chosen

    before = kernel.touch
    kernel.scheduler, kernel.preemptive, kernel.patient = schedule, True, explorer.patient
    if listens:
        kernel.touch = explorer.touch
    try:
        yield made
    finally:
        kernel.scheduler, kernel.preemptive, kernel.patient, kernel.touch = round_robin, False, False, before
        made.steps = steps


@contextmanager
def quietly() -> Iterator[None]:
    """Without logging, and without a garbage collector that walks through torch after every few schedules, or comes several
    times in each."""
    gc.freeze()
    thresholds, disabled = gc.get_threshold(), logging.root.manager.disable
    gc.set_threshold(50_000)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        gc.set_threshold(*thresholds)
        gc.collect()  # of what was made in here only; once unfrozen, worlds that are over would lie about for very long
        gc.unfreeze()


