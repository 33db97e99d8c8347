"""What must hold after any failed update, whatever failed (design.md section 4, rules 8 to 11 and 14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.faults import Faults
from harness.recording.job import RecordingJob
from harness.recording.model import small_table
from harness.recording.world import RunResult
from staged_sync.errors import UpdateFailed

CALL_S, PHASE_S, GRACE_S = 30.0, 100.0, 5.0

DEADLINES: Mapping[str, Any] = {
    "update_weight_call_timeout": CALL_S, "update_weight_phase_timeout": PHASE_S, "update_weight_timeout": 600.0}


def failing_job(faults: Faults, *, expert: int = 1, **options: Any) -> RecordingJob:
    """Two dense tensors in two buckets, one expert tensor in a third, per stage."""
    args = {**DEADLINES, "update_weight_buffer_size": 70}
    table = small_table(options.get("pp", 1), dense=2, expert=expert)
    return RecordingJob(table=table, args=args, faults=faults, **options)


def assert_none(problems: list[str]) -> None:
    """Fails with one problem a line."""
    if problems:
        raise AssertionError("\n".join(["not as it must be:", *problems]))


def problems_after(run: RecordingJob, result: RunResult, cause: str, *, limit_s: float) -> list[str]:
    """Everything that is not as it must be after a failed update; empty if all is well."""
    found = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in result.errors.items()
             if not isinstance(error, UpdateFailed) or cause not in str(error)]
    found += [f"rank {rank} went on as if nothing had happened" for rank in result.results]
    found += [f"violation: {violation}" for violation in result.violations]
    if result.elapsed_s > limit_s:
        found.append(f"took {result.elapsed_s} s of {limit_s} s")
    found += problems_left_behind(run, result)
    return found


def problems_left_behind(run: RecordingJob, result: RunResult) -> list[str]:
    """State that a failed update must not leave on the trainer side. A dead rank leaves what it held."""
    found = []
    if not result.died:
        found += [f"transfer group {channel.name} of rank {channel.source} is still open"
                  for channel in run.world.network.live()]
        found += ["the lock is held"] if run.world.lock.held else []
    one_source = run.world.layout.pp == 1 or run.exporters[0].contract == "pipeline_collective"
    usual = "vime-pp_0" if one_source else None
    found += [f"rank {context.rank} keeps group name {run.updaters[context.rank].group_name}" for context in run.world.contexts
              if context.rank not in result.died and run.updaters[context.rank].group_name not in (usual, None)]
    published = {engine.version for engine in run.world.engines if not engine.dead}
    found += [f"rank {rank} counts version {run.updaters[rank].weight_version}, engines publish {published}"
              for rank in result.errors if run.updaters[rank].weight_version != 0 and published != {"1"}]
    counted = {run.updaters[rank].weight_version for rank in result.errors}
    return found + ([f"ranks count different versions: {counted}"] if len(counted) > 1 else [])


def problems_of_engines_at_rest(run: RecordingJob) -> list[str]:
    """After a failure once weights were touched: paused, on the old version, no session open."""
    found = []
    for engine in run.world.engines:
        if engine.dead:
            continue
        found += [] if engine.paused else [f"{engine.name} serves"]
        found += [f"{engine.name} publishes version {engine.version}"] if engine.version is not None else []
    return found


def problems_of_recovery(run: RecordingJob) -> list[str]:
    """The next update, without a restart, must be exact."""
    run.step = 2
    result = run.update()
    found = [f"recovery: rank {rank}: {error}" for rank, error in result.errors.items()]
    found += [f"recovery: {violation}" for violation in result.violations]
    return found or [f"recovery: {difference}" for difference in run.differences()]
