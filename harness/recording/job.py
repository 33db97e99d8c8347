"""A whole trainer job on a recording world: args, an HF header, exporters, and one updater per rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from harness.faults import Faults
from harness.recording.args import make_args
from harness.recording.bridge import StubBridge
from harness.recording.engines import EngineOptions
from harness.recording.exporter import StubExporter
from harness.recording.kernel import MAX_STEPS
from harness.recording.model import Table, differences, hf_metas, small_table, write_checkpoint
from harness.recording.scheduler import Scheduler, round_robin
from harness.recording.world import RankContext, RecordingWorld, RunResult
from staged_sync.config import Timeouts, read_settings
from staged_sync.exporter import Exporter
from staged_sync.update_weight import UpdateWeightFromDistributed

MakeExporter = Callable[[RankContext, "RecordingJob"], Exporter]


class RecordingJob:
    """`layout` is what `RecordingWorld` takes (`tp=2, pp=2, …`); `args` overrides fields of the trainer's args.

        with RecordingJob(tp=2, pp=2) as job:
            job.connect().check()
            update = job.update().check()
            calls(update.events, rank=3)

    `folder`: a checkpoint directory written before, for those who make many jobs of one table.
    """

    def __init__(self, *, table: Table | None = None, engines: Sequence[int | EngineOptions] = (1,),
                 args: Mapping[str, Any] | None = None, faults: Faults | None = None,
                 scheduler: Scheduler = round_robin, max_steps: int = MAX_STEPS, make_exporter: MakeExporter | None = None,
                 engine_handles: Callable[[RankContext, list[Any]], list[Any]] | None = None,
                 checkpoint: Table | None = None, folder: Path | None = None,
                 quantization_config: Mapping[str, Any] | None = None, **layout: Any) -> None:
        self._quantization_config = quantization_config
        self.table = table or small_table(layout.get("pp", 1))
        self.metas = hf_metas(self.table)
        self.step = 1
        self._folder = None if folder else tempfile.TemporaryDirectory(prefix="recording-")
        if self._folder is not None:
            folder = write_checkpoint(Path(self._folder.name), hf_metas(checkpoint or self.table).values())
        folders = {"hf_checkpoint": str(folder), "update_weight_report_folder": str(folder)}
        self.args = make_args(**{**folders, **(args or {})})
        self.world = RecordingWorld(engines=engines, model=self.metas, faults=faults, scheduler=scheduler,
                                    max_steps=max_steps, **layout)
        self._handles = engine_handles or (lambda context, handles: handles)
        self.exporters = [(make_exporter or _stub)(context, self) for context in self.world.contexts]
        self.updaters = [self._updater(context) for context in self.world.contexts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.world.close()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def counts(self) -> list[int]:
        """Workers per engine."""
        return [len(engine.workers) for engine in self.world.engines]

    @property
    def timeouts(self) -> Timeouts:
        """The deadlines that the args ask for."""
        return read_settings(self.args)[0].timeouts

    def connect(self, *, handles: list[Any] | None = None, lock: Any = None, counts: list[int] | None = None,
                **placement: Any) -> RunResult:
        """`connect_rollout_engines` on every rank: all engines of the world and its lock, unless told otherwise."""
        chosen = self.world.handles if handles is None else handles
        counts = self.counts if counts is None else counts
        lock = lock or self.world.lock.handle
        return self.world.run(lambda context: self.updaters[context.rank].connect_rollout_engines(
            self._handles(context, chosen), lock, counts, **placement))

    def update(self) -> RunResult:
        """`update_weights` on every rank, with the weights of `step`."""
        return self.world.run(lambda context: self.updaters[context.rank].update_weights())

    def differences(self, step: int | None = None) -> list[str]:
        """Where any worker of any engine holds other bytes than those of `step` (default: the current one)."""
        step = self.step if step is None else step
        return [f"{worker.name}: {difference}" for engine in self.world.engines for j, worker in enumerate(engine.workers)
                for difference in differences(engine.weights(j), self.metas, step)]

    def _updater(self, context: RankContext) -> UpdateWeightFromDistributed:
        exporter = self.exporters[context.rank]
        updater = UpdateWeightFromDistributed(
            self.args, [], None, model_name="stub", quantization_config=self._quantization_config, seam=context.seam,
            exporter=exporter)
        self.world.follow(updater.trace)
        if isinstance(exporter, (StubExporter, StubBridge)):
            exporter.follow(updater.trace)
        return updater


def _stub(context: RankContext, job: RecordingJob) -> Exporter:
    return StubExporter(context.seam, context.trace, job.table, step=lambda: job.step)
