"""One planted fault, an update that must fail well, and the next one, which must be exact.

A fault is written as `engine1 raises update_weights_from_distributed#2` (its third call), `engine1 dies flush_cache#0`,
`engine0 silent finish_weight_update#0`, `rank0 raises send#1` (its second `send` event) or `rank3 dies barrier.done#4`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.faults import Faults
from harness.recording.bridge import GROUP_TIMEOUT_S
from harness.recording.engines import StubEngine
from harness.recording.job import RecordingJob
from harness.recording.world import RunResult
from harness.sim.invariants import Facts, violations
from harness.sim.outcome import Findings
from staged_sync.config import Timeouts
from staged_sync.errors import UpdateFailed
from staged_sync.trace import Event

_TEXT = re.compile(r"(engine|rank)(\d+) (raises|silent|dies) ([\w.]+)#(\d+)")

RULES_OF_A_FAILURE = (4, 5, 9, 11, 14)
"""Those that hold on every path; the others speak of an update that went well, or are judged here."""


@dataclass(frozen=True)
class Place:
    """One operation of an update, as a fault can name it. `text` is its event, for reports."""

    kind: str
    index: int
    what: str
    nth: int
    text: str

    def faults(self) -> list[str]:
        actions = ("raises", "silent", "dies") if self.kind == "engine" else ("raises", "dies")
        return [f"{self.kind}{self.index} {action} {self.what}#{self.nth}" for action in actions]


def places(events: Sequence[Event]) -> Iterator[Place]:
    """Every operation of the update that `events` tell of: each RPC taken up by an engine, each event of a rank."""
    seen: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.rank is not None:
            kind, index, what = "rank", event.rank, event.event
        elif event.event == "handle":
            kind, index, what = "engine", int(event.actor.removeprefix("engine")), event.detail
        else:
            continue
        nth = seen[event.actor, what]
        seen[event.actor, what] += 1
        yield Place(kind, index, what, nth, event.text())


@dataclass(frozen=True)
class Planted:
    """A fault, read from its text."""

    kind: str
    index: int
    action: str
    what: str
    nth: int

    @classmethod
    def read(cls, text: str) -> Planted:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a fault: {text!r}; it must look like 'engine1 raises finish_weight_update#0' or "
                             f"'rank0 dies send.done#1'")
        return cls(match[1], int(match[2]), match[3], match[4], int(match[5]))

    def plant(self, faults: Faults) -> None:
        if self.kind == "rank":
            plant = faults.fail_at if self.action == "raises" else faults.rank_dies
            plant(rank=self.index, event=self.what, nth=self.nth)
            return
        {"raises": faults.engine_error, "silent": faults.never_answers, "dies": faults.engine_dies}[self.action](
            engine=self.index, method=self.what, nth=self.nth)

    def lost_engine(self) -> int | None:
        return self.index if self.kind == "engine" and self.action != "raises" else None


def limit_s(timeouts: Timeouts, facts: Facts) -> float:
    """What the slowest wait may take: one call, or a collective inside a bridge, then a barrier, then clearing up."""
    longest_s = timeouts.call_s if facts.export == "raw" else max(timeouts.call_s, GROUP_TIMEOUT_S)
    return longest_s + timeouts.phase_s + 3 * timeouts.grace_s


def aftermath(job: RecordingJob, result: RunResult, facts: Facts) -> Findings:
    """Everything that is not as it must be after the update in which the fault struck.

    Either every rank that lives hears of it, or there is nothing to hear: the update is complete on every engine (the fault came
    after the last agreement, or was made good).
    """
    world, timeouts = job.world, job.timeouts
    unplanned = _not_fired(world.faults)
    if not _is_complete(job):
        alive = [rank for rank in range(world.layout.world_size) if rank not in result.died]
        unplanned += [f"rule 8: rank {rank} went on as if nothing had happened" for rank in alive if rank not in result.errors]
        unplanned += [f"rule 9: {engine.name} serves after a failed update" for engine in _touched(job)
                      if not engine.paused and engine.version is None]
    unplanned += [f"rule 8: rank {rank} raised {type(e).__name__}: {e}" for rank, e in result.errors.items()
                  if not isinstance(e, UpdateFailed)]
    if result.elapsed_s > (limit := limit_s(timeouts, facts)):
        unplanned.append(f"rule 11: the update took {result.elapsed_s:g} s, its deadlines add up to {limit:g} s")
    leaked = [] if result.died else _left_behind(job, facts)
    return Findings(noted=list(world.violations), broken=violations(world.events, facts, RULES_OF_A_FAILURE), leaked=leaked,
                    unplanned=unplanned + _versions(job))


def _left_behind(job: RecordingJob, facts: Facts) -> list[str]:
    kept = 1 if facts.keeps_its_group else 0
    live = job.world.network.live()[kept:]
    return [*(f"transfer group {c.name} of rank {c.source} is still open" for c in live),
            *(["the rollout engine lock is still held"] if job.world.lock.held else [])]


def _not_fired(faults: Faults) -> list[str]:
    try:
        faults.assert_all_fired()
    except AssertionError as error:
        return [str(error).replace("\n", " ")]
    return []


def _is_complete(job: RecordingJob) -> bool:
    return not job.differences() and all(e.version is not None and not e.paused and not e.dead for e in job.world.engines)


def _touched(job: RecordingJob) -> list[StubEngine]:
    """Engines that live and were in a session."""
    return [engine for engine in job.world.engines if not engine.dead and engine.workers[0].sessions]


def _versions(job: RecordingJob) -> list[str]:
    """Where a version is published, its weights are all there."""
    wrong = job.differences()
    return [f"rule 9: {engine.name} publishes version {engine.version} with other weights: {line}" for engine in job.world.engines
            if engine.version is not None and not engine.dead for line in wrong if line.startswith(f"{engine.name}/")]


def recovery(job: RecordingJob, planted: Planted) -> list[str]:
    """Rule 10: the next update, without a restart, must be exact on every healthy engine. A lost engine is replaced."""
    job.step += 1
    lost = planted.lost_engine()
    if lost is not None:
        fresh = job.world.add_engine(job.world.engines[lost].options)
        handles = [fresh.handle if i == lost else e.handle for i, e in enumerate(job.world.engines[:-1])]
        connected = job.connect(handles=handles, counts=job.counts[:-1])
        if connected.errors:
            return [f"rule 10: reconnecting fails: {error}" for error in connected.errors.values()][:1]
    result = job.update()
    found = [f"rule 10: the next update fails on rank {rank}: {error}" for rank, error in result.errors.items()]
    found += [f"rule 10: in the next update: {text}" for text in result.violations]
    healthy = [line for line in job.differences() if not line.startswith(f"engine{lost}/")]
    return found or [f"rule 10: after the next update: {line}" for line in healthy]


def cannot_recover(job: RecordingJob, result: RunResult) -> bool:
    """A rank is gone, or a gather that one member left has lost Megatron's own group: nothing of ours can bring it back."""
    return bool(result.died) or job.world.lost_a_gather_group
