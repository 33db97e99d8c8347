"""Somebody else's class on every rank of a world: what `harness.recording.job.RecordingJob` is for ours."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.faults import Faults
from harness.foreign import dist, model
from harness.foreign.active import Active, running
from harness.foreign.adapter import Adapter
from harness.foreign.stubs import ActorHandle, installed
from harness.recording.args import make_args
from harness.recording.kernel import Waiting
from harness.recording.model import differences, hf_metas
from harness.recording.world import RankContext, RecordingWorld, RunResult
from harness.sim.faulty import UPDATE_BEGINS
from harness.sim.scenario import Scenario
from harness.sim.simulation import MAX_STEPS
from harness.sim.streams import Device
from staged_sync.trace import Event


def load(path: str) -> Any:
    """`package.module:name`."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"must be package.module:name (got {path!r})")
    return getattr(importlib.import_module(module), name)


class ForeignJob:
    """One updater per rank, made when it first connects. Everything that runs it does so inside `scope()`, which puts the stubs
    in place. `raised`: what each rank raised in the last run, also where that run had no end; `on_raise` is called with each."""

    def __init__(self, scenario: Scenario, faults: Faults | None = None) -> None:
        self.scenario = scenario
        self.adapter: Adapter = load(scenario.adapter) if scenario.adapter else Adapter()
        self.step = 1
        self.raised: dict[int, Exception] = {}
        self.on_raise: Callable[[], None] = lambda: None
        self.table = scenario.table
        receivers = Scenario(engines=scenario.engines, packed_buffer_bytes=scenario.packed_buffer_bytes,
                             receiver=self.adapter.receiver)
        self.world = RecordingWorld(scenario.tp, scenario.pp, scenario.dp, scenario.cp, scenario.ep, scenario.etp,
                                    engines=receivers.engine_options(), model=hf_metas(self.table), max_steps=MAX_STEPS,
                                    faults=faults)
        devices = {rank: Device(self.world.kernel, rank) for rank in range(self.world.layout.world_size)}
        self._active = Active(self.world, self.table, lambda: self.step, self.adapter.group_timeout_s, devices)
        self._updaters: dict[int, Any] = {}

    def close(self) -> None:
        self.world.close()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Stubs, virtual time, and the adapter's replacements are in place inside the block."""
        with ExitStack() as stack:
            stack.enter_context(running(self._active))
            stack.enter_context(installed({name: dict(contents) for name, contents in self.adapter.stubs.items()}))
            stack.enter_context(dist.replaced())
            stack.enter_context(patch.object(time, "sleep", self._sleep))
            for clock in ("time", "monotonic", "perf_counter"):
                stack.enter_context(patch.object(time, clock, lambda: self.world.kernel.now_s))
            for path, function in self.adapter.replace.items():
                stack.enter_context(_replaced(path, function))
            yield

    def live(self) -> RunResult:
        """What a trainer does: connect, train, update. Ranks meet in between, as in a training step."""
        def body(context: RankContext) -> None:
            self._connect(context, self.world.handles, list(self.scenario.engines))
            dist.world_group().exchange(None, "training step")
            self.world.events.append(Event(self.world.kernel.now_s, None, "trainer", UPDATE_BEGINS))
            self._updaters[context.rank].update_weights()

        return self._run(body)

    def connect(self, *, handles: list[Any] | None = None, counts: list[int] | None = None) -> RunResult:
        """`connect_rollout_engines` on every rank: all engines of the world, unless told otherwise."""
        chosen = self.world.handles if handles is None else handles
        workers = list(self.scenario.engines) if counts is None else counts
        return self._run(lambda context: self._connect(context, chosen, workers))

    def update(self) -> RunResult:
        """`update_weights` on every rank, with the weights of `step`."""
        return self._run(lambda context: self._updaters[context.rank].update_weights())

    def differences(self) -> list[str]:
        """Where any worker of any engine holds other bytes than those of `step`."""
        return [f"{worker.name}: {line}" for engine in self.world.engines for j, worker in enumerate(engine.workers)
                for line in differences(engine.weights(j), hf_metas(self.table), self.step)]

    def asked(self, noted: Sequence[str]) -> tuple[str, ...]:
        """Of what engines and groups noted, what is asked of this receiver and these capabilities."""
        adapter = self.adapter
        not_asked = {"rule 1:": adapter.receiver == "named groups", "rule 3:": "session" not in adapter.capabilities}
        return tuple(text for text in noted if not not_asked.get(text[:7]))

    def raised_texts(self) -> list[str]:
        """What each rank raised, and the last line of the implementation's own source tree on the way there."""
        return [f"rank {rank}: {type(error).__name__}: {error}{self._where(error)}"
                for rank, error in sorted(self.raised.items())]

    # --- inside -----------------------------------------------------------------------------------------------------------
    def _where(self, error: Exception) -> str:
        module = sys.modules.get(self.scenario.impl.partition(":")[0])
        home = Path(str(module.__file__)).parent if module is not None else Path()
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(home)]
        return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno} in {lines[-1].name})" if lines else ""

    def _run(self, body: Callable[[RankContext], None]) -> RunResult:
        self.raised = {}

        def noted(context: RankContext) -> None:
            try:
                body(context)
            except Exception as error:
                self.raised[context.rank] = error
                self.on_raise()
                raise

        result = self.world.run(noted)
        return replace(result, violations=self.asked(result.violations))

    def _connect(self, context: RankContext, handles: list[Any], counts: list[int]) -> None:
        if context.rank not in self._updaters:
            self._updaters[context.rank] = self._make()
        actors = [ActorHandle(handle._server) for handle in handles]
        self._updaters[context.rank].connect_rollout_engines(actors, ActorHandle(self.world.lock), counts, None)

    def _make(self) -> Any:
        """One rank's updater, of the implementation as it is."""
        s, cls = self.scenario, load(self.scenario.impl)
        args = make_args("no checkpoint", update_weight_buffer_size=s.bucket_bytes, vllm_weight_sync_packed=s.packed,
                         update_weight_packed_buffer_size=s.packed_buffer_bytes, megatron_to_hf_mode=s.export)
        if self.adapter.make is not None:
            return self.adapter.make(cls, args)
        return cls(args, [], model.local_weights, model_name="stub", quantization_config=None)

    def _sleep(self, seconds: float) -> None:
        kernel = self.world.kernel
        kernel.wait(lambda: False, Waiting("sleep", for_time=True), deadline_s=kernel.now_s + seconds)


def _replaced(path: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    owner, _, name = path.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    if not hasattr(holder, name):
        raise AttributeError(f"the adapter replaces {path}, but {owner} has no {name!r}: it must be the path of the name in the "
                             f"module that uses it")
    return patch.object(holder, name, function)
