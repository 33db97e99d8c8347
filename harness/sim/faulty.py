"""One planted fault, an update that must fail well, and the next one, which must be exact: ours, and in parts other people's.

A fault is written as `engine1 raises update_weights_from_distributed#2` (its third call), `engine1 dies flush_cache#0`,
`engine0 silent finish_weight_update#0`, `rank0 raises send#1` (its second `send` event) or `rank3 dies barrier.done#4`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.faults import Faults
from harness.recording.bridge import GROUP_TIMEOUT_S
from harness.recording.engines import StubEngine
from harness.recording.job import RecordingJob
from harness.recording.world import RecordingWorld, RunResult
from harness.sim.invariants import Facts, violations
from harness.sim.outcome import Findings
from staged_sync.config import Timeouts
from staged_sync.errors import UpdateFailed
from staged_sync.trace import Event

_TEXT = re.compile(r"(engine|rank)(\d+) (raises|silent|dies) ([\w.]+)#(\d+)")

SORTS = ("engine raises", "engine silent", "engine dies", "rank raises", "rank dies")
"""What can be planted at a place: an engine answers with an error, never, or is gone; a trainer rank raises, or is gone."""

UPDATE_BEGINS = "update begins"
"""Where a trace tells of connecting too: an event of nobody, after which faults can strike."""

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
    begins = next((i for i, event in enumerate(events) if event.event == UPDATE_BEGINS), 0)
    for event in events[begins:]:
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

    @property
    def sort(self) -> str:
        """One of `SORTS`."""
        return f"{self.kind} {self.action}"

    def lost_engine(self) -> int | None:
        return self.index if self.kind == "engine" and self.action != "raises" else None


class Job(Protocol):
    """A trainer job on a world, whatever class it runs."""

    step: int

    @property
    def world(self) -> RecordingWorld: ...

    def connect(self, *, handles: list[Any] | None = None, counts: list[int] | None = None) -> RunResult: ...

    def update(self) -> RunResult: ...

    def differences(self) -> list[str]: ...


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
    unplanned = not_fired(world.faults)
    published = all(engine.version is not None for engine in world.engines)
    if not (is_complete(job) and published):
        unplanned += not_heard(job, result.errors, result.died)
        unplanned += [f"rule 9: {engine.name} serves after a failed update" for engine in _touched(job)
                      if not engine.paused and engine.version is None]
    unplanned += [f"rule 8: rank {rank} raised {type(e).__name__}: {e}" for rank, e in result.errors.items()
                  if not isinstance(e, UpdateFailed)]
    if result.elapsed_s > (limit := limit_s(timeouts, facts)):
        unplanned.append(f"rule 11: the update took {result.elapsed_s:g} s, its deadlines add up to {limit:g} s")
    leaked = [] if result.died else _left_behind(job, facts)
    return Findings(noted=list(world.violations), broken=violations(world.events, facts, RULES_OF_A_FAILURE), leaked=leaked,
                    unplanned=unplanned + wrong_versions(job))


def _left_behind(job: RecordingJob, facts: Facts) -> list[str]:
    kept = 1 if facts.keeps_its_group else 0
    live = job.world.network.live()[kept:]
    return [*(f"transfer group {c.name} of rank {c.source} is still open" for c in live),
            *(["the rollout engine lock is still held"] if job.world.lock.held else [])]


def _touched(job: RecordingJob) -> list[StubEngine]:
    """Engines that live and were in a session."""
    return [engine for engine in job.world.engines if not engine.dead and engine.workers[0].sessions]


# --- what can be seen after a fault, whatever class the job runs ----------------------------------------------------------
def not_fired(faults: Faults) -> list[str]:
    try:
        faults.assert_all_fired()
    except AssertionError as error:
        return [str(error).replace("\n", " ")]
    return []


def not_heard(job: Job, raised: Mapping[int, object], died: Sequence[int]) -> list[str]:
    """Ranks that live and did not raise."""
    return [f"rule 8: rank {rank} went on as if nothing had happened" for rank in range(job.world.layout.world_size)
            if rank not in died and rank not in raised]


def is_complete(job: Job) -> bool:
    """Every engine lives, serves, and holds the weights of this step: nothing to hear of."""
    return not job.differences() and all(not engine.paused and not engine.dead for engine in job.world.engines)


def serving_mixtures(job: Job) -> list[str]:
    """Engines that live and serve with some weights of this step, and not all."""
    wrong = job.differences()
    return [f"rule 9: {engine.name} serves a mixture: {lines[0]} ({len(lines)} in all)" for engine in job.world.engines
            if not engine.dead and not engine.paused and _received(engine)
            and (lines := [line for line in wrong if line.startswith(f"{engine.name}/")])]


def _received(engine: StubEngine) -> bool:
    return any(tensor is not None for j in range(len(engine.workers)) for tensor in engine.weights(j).values())


def wrong_versions(job: Job) -> list[str]:
    """Where a version is published, its weights are all there."""
    wrong = job.differences()
    return [f"rule 9: {engine.name} publishes version {engine.version} with other weights: {line}" for engine in job.world.engines
            if engine.version is not None and not engine.dead for line in wrong if line.startswith(f"{engine.name}/")]


def recovery(job: Job, planted: Planted, *, reconnects: bool = False) -> list[str]:
    """Rule 10: the next update, without a restart, must be exact on every healthy engine. A lost engine is replaced, and
    announced by connecting again; with `reconnects`, that is done in any case."""
    job.step += 1
    lost, engines = planted.lost_engine(), list(job.world.engines)
    if lost is not None:
        engines[lost] = job.world.add_engine(engines[lost].options)
    if lost is not None or reconnects:
        connected = job.connect(handles=[e.handle for e in engines], counts=[len(e.workers) for e in engines])
        if connected.errors:
            return [f"rule 10: reconnecting fails: {error}" for error in connected.errors.values()][:1]
    result = job.update()
    found = [f"rule 10: the next update fails on rank {rank}: {error}" for rank, error in result.errors.items()]
    found += [f"rule 10: in the next update: {text}" for text in result.violations]
    healthy = [line for line in job.differences() if not line.startswith(f"engine{lost}/")]
    return found or [f"rule 10: after the next update: {line}" for line in healthy]


def cannot_recover(job: Job, result: RunResult) -> bool:
    """A rank is gone, or a gather that one member left has lost Megatron's own group: no weight sync can bring it back."""
    return bool(result.died) or job.world.lost_a_gather_group
