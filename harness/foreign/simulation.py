"""Foreign code in a simulated world: the stubs in place, one updater per rank, and schedules, rules and outcomes as for ours."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from harness.foreign import dist, model
from harness.foreign.active import Active, running
from harness.foreign.adapter import Adapter
from harness.foreign.stubs import installed
from harness.recording.args import make_args
from harness.recording.kernel import StepBound, Waiting
from harness.recording.model import differences, hf_metas
from harness.recording.world import RankContext, RecordingWorld, RunResult
from harness.sim.invariants import Facts, violations
from harness.sim.outcome import Findings
from harness.sim.scenario import Scenario
from harness.sim.schedulers.base import Explorer
from harness.sim.simulation import MAX_STEPS, Run, attempt, explored_by
from harness.sim.streams import Device

ALWAYS = (1, 4, 6, 9, 12)
"""Rules that any weight sync must keep."""


def load(path: str) -> Any:
    """`package.module:name`."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"must be package.module:name (got {path!r})")
    return getattr(importlib.import_module(module), name)


def rules_of(adapter: Adapter, pp: int) -> tuple[int, ...]:
    rules = list(ALWAYS)
    if adapter.receiver == "named groups":
        rules.remove(1)  # it may hold as many as it likes
    rules += [2] if "session" in adapter.capabilities else []
    rules += [11] if "deadlines" in adapter.capabilities else []
    return tuple(sorted(rules))


class ForeignSimulation:
    """Every schedule is connect and update, in a fresh world: foreign code keeps what it likes from one to the next."""

    def __init__(self, scenario: Scenario) -> None:
        self.spent = False
        self._scenario = scenario
        self._adapter: Adapter = load(scenario.adapter) if scenario.adapter else Adapter()
        receiver = Scenario(**{**_receiver_fields(scenario), "receiver": self._adapter.receiver})
        self.world = RecordingWorld(scenario.tp, scenario.pp, scenario.dp, scenario.cp, scenario.ep, scenario.etp,
                                    engines=receiver.engine_options(), model=hf_metas(scenario.table), max_steps=MAX_STEPS)
        self.world.kernel.stall_is_deadlock = True
        ranks = range(self.world.layout.world_size)
        self._active = Active(self.world, {rank: Device(self.world.kernel, rank) for rank in ranks})
        self.step = 1
        model.show(self.world, scenario.table, self)

    def close(self) -> None:
        model.forget(self.world)
        self.world.close()

    def run(self, explorer: Explorer) -> Run:
        world, self.spent = self.world, True
        world.begin_era("explored")
        with self._scope(), explored_by(explorer, world.kernel) as choices:
            make = self._maker()
            found, result = attempt(lambda: world.run(lambda context: self._live(context, make)))
        explorer.over(not isinstance(found.stopped, StepBound))
        facts = None if result is None else self._facts(result)
        return Run(self._judge(found, facts).outcome(), tuple(choices.made), choices.steps, list(world.events), facts)

    def _scope(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(running(self._active))
        stack.enter_context(installed({name: dict(contents) for name, contents in self._adapter.stubs.items()}))
        stack.enter_context(dist.replaced())
        stack.enter_context(patch.object(time, "sleep", self._sleep))
        return stack

    def _maker(self) -> Callable[[RankContext], Any]:
        """Import the implementation as it is, put the adapter's replacements in, and say how an updater is made."""
        cls = load(self._scenario.impl)
        for path, function in self._adapter.replace.items():
            module, _, name = path.rpartition(".")
            setattr(importlib.import_module(module), name, function)
        s = self._scenario
        args = make_args("no checkpoint", update_weight_buffer_size=s.bucket_bytes, vllm_weight_sync_packed=s.packed,
                         update_weight_packed_buffer_size=s.packed_buffer_bytes)
        if self._adapter.make is not None:
            make = self._adapter.make
            return lambda context: make(cls, args)
        return lambda context: cls(args, [], None, model_name="stub", quantization_config=None)

    def _live(self, context: RankContext, make: Callable[[RankContext], Any]) -> None:
        """What a trainer does on every rank; a rank meets the others between the two calls, as a training step would."""
        updater = make(context)
        world = self.world
        updater.connect_rollout_engines(world.handles, world.lock.handle, list(self._scenario.engines), None)
        dist.world_group().collective(dist.here()).exchange(context.rank, None, operation="training step", timeout_s=dist.LONG_S)
        updater.update_weights()

    def _sleep(self, seconds: float) -> None:
        kernel = self.world.kernel
        kernel.wait(lambda: False, Waiting("sleep", for_time=True), deadline_s=kernel.now_s + seconds)

    def _facts(self, result: RunResult) -> Facts:
        s = self._scenario
        wrong = [f"{worker.name}: {line}" for engine in self.world.engines for j, worker in enumerate(engine.workers)
                 for line in differences(engine.weights(j), hf_metas(s.table), self.step)]
        return Facts(layout=self.world.layout, engines=s.engines, names=s.names,
                     raised={rank: f"{type(e).__name__}: {e}" for rank, e in result.errors.items()}, died=tuple(result.died),
                     endless=tuple(self.world.kernel.endless), differences=tuple(wrong), publishes=False,
                     sends_are_named=False)

    def _judge(self, found: Findings, facts: Facts | None) -> Findings:
        ignored = ("rule 1:",) if self._adapter.receiver == "named groups" else ()
        noted = [text for text in self.world.violations if not text.startswith(ignored or ("\0",))]
        if "session" not in self._adapter.capabilities:
            noted = [text for text in noted if not text.startswith("rule 3:")]
        if facts is None:
            return Findings(found.stopped, noted)
        broken = violations(_one_update(self.world.events), facts, rules_of(self._adapter, self._scenario.pp))
        return Findings(found.stopped, noted, broken, raised=[f"rank {rank}: {text}" for rank, text in facts.raised.items()])


def _one_update(events: Any) -> Any:
    return [event for event in events if event.event not in ("open", "open.done", "close", "close.done")]


def _receiver_fields(scenario: Scenario) -> dict[str, Any]:
    return {"engines": scenario.engines, "packed_buffer_bytes": scenario.packed_buffer_bytes}
