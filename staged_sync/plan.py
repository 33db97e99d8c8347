"""Who sends what, when, with how many barriers; pure.

(topology, contract of the exporter) -> a tuple of frozen steps. The lifecycle executes it, the simulator explores it, tests
compare it with `==`. Nothing here talks to anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, TypeAlias

from staged_sync.exporter import RAW_PASSES, Contract, Part
from staged_sync.seam import Coordinates


class Role(Enum):
    SOURCE = "source"
    GATHER_PEER = "gather peer"
    INACTIVE = "inactive"


class TopologyError(ValueError):
    """The ranks' coordinates do not describe a legal Megatron layout."""


@dataclass(frozen=True)
class Topology:
    """The coordinates of every trainer rank, by rank."""

    coordinates: tuple[Coordinates, ...]

    LEAD = 0
    """Global rank 0 does the session's RPCs."""

    @cached_property
    def pp(self) -> int:
        return self.coordinates[0].pp_size

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The source of every stage: data parallel (with context parallel) rank 0 and tensor parallel rank 0."""
        found: list[list[int]] = [[] for _ in range(self.pp)]
        for c in self.coordinates:
            if is_source(c):
                found[c.pp].append(c.rank)
        for stage, ranks in enumerate(found):
            if len(ranks) != 1:
                raise TopologyError(f"stage {stage} must have exactly one source (DP with CP = 0, TP = 0), got ranks {ranks}")
        return tuple(ranks[0] for ranks in found)

    def role(self, rank: int, stage: int, part: Part) -> Role:
        """What `rank` does while `stage` sends `part`.

        Dense: the source's TP group. Expert: its expert-TP and EP groups, that is, every rank of the stage that shares its
        expert-data-parallel rank; they span DP and CP (megatron/core/parallel_state.py, expert rank generator). Stage: every
        rank of it, since nobody knows in which groups a foreign exporter gathers. Model: every rank there is.
        """
        c, source = self.coordinates[rank], self.coordinates[self.sources[stage]]
        if rank == source.rank:
            return Role.SOURCE
        if part == "model":
            return Role.GATHER_PEER
        joins = {"dense": c.dp == source.dp, "expert": c.edp == source.edp, "stage": True}[part]
        return Role.GATHER_PEER if c.pp == stage and joins else Role.INACTIVE

    def check(self) -> None:
        """Raise `TopologyError` where ranks, sizes or sources do not fit together."""
        for rank, c in enumerate(self.coordinates):
            if c.rank != rank or c.pp_size != self.pp:
                raise TopologyError(f"rank {rank} reports itself as rank {c.rank} of {c.pp_size} stages; rank 0 sees "
                                    f"{self.pp} stages and {len(self.coordinates)} ranks")
        if self.sources[0] != self.LEAD:
            raise TopologyError(f"the source of stage 0 must be rank {self.LEAD}, got rank {self.sources[0]}")


def is_source(c: Coordinates) -> bool:
    return c.dp == 0 and c.tp == 0


def sends(c: Coordinates, contract: Contract) -> bool:
    """Whether this rank sends at all: every stage's source, or that of stage 0 alone where all ranks export together."""
    return is_source(c) and (contract == "stage_local" or c.pp == 0)


def keeps_its_group(pp: int, contract: Contract) -> bool:
    """Whether one source sends everything, over a transfer group that is opened at connect and kept."""
    return pp == 1 or contract == "pipeline_collective"


# --- the steps ----------------------------------------------------------------------------------------------------------

LeadAction = Literal["pause", "flush", "restore", "start", "finish", "post_process", "publish", "resume"]


@dataclass(frozen=True, slots=True)
class Lead:
    """The lead asks every engine."""

    action: LeadAction


@dataclass(frozen=True, slots=True)
class Barrier:
    """All ranks meet and exchange status; `stage` inside the send phase. Where `reports`, its source says what it sent."""

    label: str
    stage: int | None = None
    reports: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """The source of `stage` opens vime-pp_{stage}."""

    stage: int


@dataclass(frozen=True, slots=True)
class Send:
    """The source of `stage` and its gather peers export one part together; the source sends it."""

    stage: int
    part: Part


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The source waits until everything it sent has left its device."""

    stage: int


@dataclass(frozen=True, slots=True)
class Close:
    """The source closes vime-pp_{stage}."""

    stage: int


Step: TypeAlias = Lead | Barrier | Open | Send | Synchronize | Close


def plan_update(pp: int, *, contract: Contract = "stage_local", passes: Sequence[Part] = RAW_PASSES,
                empty_stages: Collection[int] = (), post_process: bool = False) -> tuple[Step, ...]:
    """One update, for all ranks (see `takes_part` for who does what).

    pp = 1 and pipeline-collective exports use the persistent group opened at connect; else stages take turns. Send-phase
    barriers: one after each pass, and two more a stage where stages take turns: raw 2 (pp = 1) or 4·pp, bridge 1 (pp = 1 or
    collective) or 3·pp. Five more around it. A stage without tensors opens no group and joins every barrier. `post_process`:
    engines restore the checkpoint's layout before the session and leave it after.
    """
    send = _single_source(passes) if keeps_its_group(pp, contract) else \
        [step for stage in range(pp) for step in _staged(stage, passes, stage in empty_stages)]
    before, after = ((Lead("restore"),), (Lead("post_process"),)) if post_process else ((), ())
    return (Lead("pause"), Lead("flush"), Barrier("paused"), *before, Lead("start"), Barrier("started"), *send,
            Lead("finish"), Barrier("finished"), *after, Lead("publish"), Barrier("published"), Lead("resume"),
            Barrier("resumed"))


@dataclass(frozen=True, slots=True)
class Phase:
    """What a deadline of its own bounds, and what is timed: `name` with all its steps. `send` is a phase of each stage."""

    name: str
    stage: int | None = None


def phases_of(plan: Sequence[Step]) -> list[tuple[Phase, list[Step]]]:
    """The plan, cut where another phase begins."""
    phases: list[tuple[Phase, list[Step]]] = []
    for step in plan:
        begun = _phase_begun_by(step)
        if begun is not None and (not phases or begun != phases[-1][0]):
            phases.append((begun, []))
        phases[-1][1].append(step)
    return phases


def _phase_begun_by(step: Step) -> Phase | None:
    """None for what belongs to whatever phase it comes in."""
    match step:
        case Barrier(stage=None):
            return None
        case Lead("flush"):
            return Phase("pause")
        case Lead("restore"):
            return Phase("start")
        case Lead("post_process"):
            return Phase("publish")
        case Lead(action):
            return Phase(action)
        case Barrier(stage=stage) | Open(stage) | Send(stage) | Synchronize(stage) | Close(stage):
            return Phase("send", stage)


def _single_source(passes: Sequence[Part]) -> list[Step]:
    # The device is synchronized after the last barrier, as in vime: the source is the lead, so it cannot finish earlier.
    return [*_passes(0, passes, reports=True), Synchronize(0)]


def _staged(stage: int, passes: Sequence[Part], empty: bool) -> list[Step]:
    opened: list[Step] = [] if empty else [Open(stage)]
    closed: list[Step] = [] if empty else [Synchronize(stage), Close(stage)]
    return [*opened, Barrier(f"stage {stage} open", stage), *_passes(stage, passes, reports=False), *closed,
            Barrier(f"stage {stage} closed", stage, reports=True)]


def _passes(stage: int, passes: Sequence[Part], *, reports: bool) -> list[Step]:
    """Each pass and the barrier after it; the last one carries the report where `reports`."""
    return [step for i, part in enumerate(passes)
            for step in (Send(stage, part), Barrier(_met_after(stage, part), stage, reports=reports and i == len(passes) - 1))]


def _met_after(stage: int, part: Part) -> str:
    return {"model": "model exported", "stage": f"stage {stage} exported"}.get(part, f"stage {stage} {part}")


def takes_part(step: Step, topology: Topology, rank: int) -> bool:
    """Whether `rank` does anything in `step`; a rank that does not touches neither weights nor engines."""
    if isinstance(step, Barrier):
        return True
    if isinstance(step, Lead):
        return rank == topology.LEAD
    if isinstance(step, Send):
        return topology.role(rank, step.stage, step.part) is not Role.INACTIVE
    return rank == topology.sources[step.stage]


def rank_offsets(counts: Sequence[int]) -> list[int]:
    """First group rank of each engine: `1 + sum(counts[:i])`; rank 0 is the source."""
    offsets = [1]
    for count in counts[:-1]:
        offsets.append(offsets[-1] + count)
    return offsets


def group_name(stage: int) -> str:
    return f"vime-pp_{stage}"
