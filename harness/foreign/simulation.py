"""Foreign code in a simulated world: schedules, rules and outcomes as for ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.faults import Faults
from harness.foreign.adapter import Adapter
from harness.foreign.failing import aftermath, rules_of_a_failure
from harness.foreign.job import ForeignJob
from harness.recording.kernel import StepBound
from harness.recording.world import RunResult
from harness.sim.faulty import Planted, cannot_recover, recovery
from harness.sim.invariants import Facts, violations
from harness.sim.outcome import Findings
from harness.sim.scenario import Scenario
from harness.sim.schedulers.base import Explorer
from harness.sim.simulation import Run, attempt, explored_by
from staged_sync.trace import Event

ALWAYS = (1, 4, 6, 9, 12)
"""Rules that any weight sync must keep."""


def rules_of(adapter: Adapter) -> tuple[int, ...]:
    rules = list(ALWAYS)
    if adapter.receiver == "named groups":
        rules.remove(1)  # it may hold as many as it likes
    rules += [2] if "session" in adapter.capabilities else []
    rules += [11] if "deadlines" in adapter.capabilities else []
    return tuple(sorted(rules))


class ForeignSimulation:
    """Every schedule is connect and update, in a fresh world: foreign code keeps what it likes from one to the next. With a
    planted fault: connect in peace, the update in which it strikes, and, where that is claimed, connect and update again."""

    def __init__(self, scenario: Scenario) -> None:
        self.spent = False
        self._scenario = scenario
        self._faults = Faults()
        self._job = ForeignJob(scenario, self._faults)
        self._adapter = self._job.adapter
        self._job.world.kernel.stall_is_deadlock = True

    def close(self) -> None:
        self._job.close()

    def run(self, explorer: Explorer) -> Run:
        job, world, self.spent = self._job, self._job.world, True
        if self._scenario.fault:
            return self._run_fault(explorer, Planted.read(self._scenario.fault))
        world.begin_era("explored")
        with job.scope(), explored_by(explorer, world.kernel) as choices:
            found, result = attempt(job.live)
        explorer.over(not isinstance(found.stopped, StepBound))
        facts = None if result is None else self._facts(result.died)
        return Run(self._judge(found, facts).outcome(), tuple(choices.made), choices.steps, list(world.events), facts)

    def _run_fault(self, explorer: Explorer, planted: Planted) -> Run:
        job, world = self._job, self._job.world
        with job.scope():
            found, _ = attempt(job.connect)
            if found.stopped or job.raised:
                explorer.over(True)
                return Run(replace(found, raised=job.raised_texts()).outcome(), (), 0, list(world.events))
            world.begin_era("explored")
            planted.plant(self._faults)
            self._set_patience()
            with explored_by(explorer, world.kernel) as choices:
                found, result = attempt(job.update)
                events = list(world.events)
                facts = self._facts(() if result is None else result.died)
                found = self._judge_failure(found, result, facts)
                if found.outcome().kind == "well" and result is not None and self._recovers(result):
                    self._set_patience()
                    again, troubles = attempt(lambda: recovery(job, planted, reconnects=True))
                    found = replace(again, unplanned=troubles or [])
        explorer.over(not isinstance(found.stopped, StepBound))
        return Run(found.outcome(), tuple(choices.made), choices.steps, events, facts)

    def _set_patience(self) -> None:
        """From now on every rank must be through in this time. Who promises none has time until the first rank raises."""
        kernel, patience_s = self._job.world.kernel, self._adapter.patience_s
        kernel.stall_is_deadlock = False
        if patience_s is not None:
            kernel.horizon_s = kernel.now_s + patience_s
        else:
            self._job.on_raise = lambda: setattr(kernel, "stall_is_deadlock", True)

    def _recovers(self, result: RunResult) -> bool:
        return "recovery" in self._adapter.capabilities and not cannot_recover(self._job, result)

    def _facts(self, died: Sequence[int]) -> Facts:
        s, job = self._scenario, self._job
        return Facts(layout=job.world.layout, engines=s.engines, names=s.names,
                     raised={rank: f"{type(e).__name__}: {e}" for rank, e in job.raised.items()}, died=tuple(died),
                     endless=tuple(job.world.kernel.endless), differences=tuple(job.differences()), publishes=False,
                     sends_are_named=False, export=s.export)

    def _judge(self, found: Findings, facts: Facts | None) -> Findings:
        noted, raised = self._job.asked(self._job.world.violations), self._job.raised_texts()
        if facts is None and raised:  # that others wait comes of it
            return Findings(noted=noted, raised=[*raised, f"the others: {found.stopped}"])
        if facts is None:
            return Findings(found.stopped, noted)
        broken = violations(_one_update(self._job.world.events), facts, rules_of(self._adapter))
        return Findings(found.stopped, noted, broken, raised=raised)

    def _judge_failure(self, found: Findings, result: RunResult | None, facts: Facts) -> Findings:
        seen = replace(aftermath(self._job, found, result), noted=self._job.asked(self._job.world.violations))
        if seen.stopped is not None:
            return seen
        return replace(seen, broken=violations(self._job.world.events, facts, rules_of_a_failure(self._adapter)))


def _one_update(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.event not in ("open", "open.done", "close", "close.done")]
