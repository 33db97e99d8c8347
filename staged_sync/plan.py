"""Who sends what, when, with how many barriers; pure.

(topology, strategy) -> a tuple of frozen steps. The lifecycle executes it, the simulator explores it, tests compare it with
`==`. Nothing here talks to anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal, TypeAlias

from staged_sync.exporter import Part
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
        expert-data-parallel rank; they span DP and CP (megatron/core/parallel_state.py, expert rank generator).
        """
        c = self.coordinates[rank]
        if c.pp != stage:
            return Role.INACTIVE
        if is_source(c):
            return Role.SOURCE
        source = self.coordinates[self.sources[stage]]
        gathers = c.dp == source.dp if part == "dense" else c.edp == source.edp
        return Role.GATHER_PEER if gathers else Role.INACTIVE

    def check(self) -> None:
        """Raise `TopologyError` where ranks, sizes or sources do not fit together."""
        for rank, c in enumerate(self.coordinates):
            if c.rank != rank or c.pp_size != self.pp:
                raise TopologyError(f"rank {rank} reports itself as rank {c.rank} of {c.pp_size} stages; rank 0 sees "
                                    f"{self.pp} stages and {len(self.coordinates)} ranks")
        if self.pp == 1 and self.sources[0] != self.LEAD:
            raise TopologyError(f"the source of the only stage must be rank {self.LEAD}, got rank {self.sources[0]}")


def is_source(c: Coordinates) -> bool:
    return c.dp == 0 and c.tp == 0


# --- the steps ----------------------------------------------------------------------------------------------------------

LeadAction = Literal["pause", "flush", "start", "finish", "publish", "resume"]


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
    """The source and its gather peers export one part of `stage`; the source sends it."""

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


def plan_update(pp: int, *, empty_stages: Collection[int] = ()) -> tuple[Step, ...]:
    """One update with raw export, for all ranks (see `takes_part` for who does what).

    pp = 1 uses the persistent group opened at connect; pp > 1 is staged. Send-phase barriers: 2 for pp = 1, 4·pp staged; five
    more around it. A stage without tensors opens no group and joins every barrier.
    """
    send = _single_source() if pp == 1 else [step for s in range(pp) for step in _staged(s, s in empty_stages)]
    return (Lead("pause"), Lead("flush"), Barrier("paused"), Lead("start"), Barrier("started"), *send,
            Lead("finish"), Barrier("finished"), Lead("publish"), Barrier("published"), Lead("resume"), Barrier("resumed"))


def _single_source() -> list[Step]:
    # The device is synchronized after the last barrier, as in vime: the source is the lead, so it cannot finish earlier.
    return [Send(0, "dense"), Barrier("stage 0 dense", 0), Send(0, "expert"), Barrier("stage 0 expert", 0, reports=True),
            Synchronize(0)]


def _staged(stage: int, empty: bool) -> list[Step]:
    opened: list[Step] = [] if empty else [Open(stage)]
    closed: list[Step] = [] if empty else [Synchronize(stage), Close(stage)]
    return [*opened, Barrier(f"stage {stage} open", stage), Send(stage, "dense"), Barrier(f"stage {stage} dense", stage),
            Send(stage, "expert"), Barrier(f"stage {stage} expert", stage), *closed,
            Barrier(f"stage {stage} closed", stage, reports=True)]


def takes_part(step: Step, topology: Topology, rank: int) -> bool:
    """Whether `rank` does anything in `step`; a rank that does not touches neither weights nor engines."""
    match step:
        case Barrier():
            return True
        case Lead():
            return rank == topology.LEAD
        case Send(stage, part):
            return topology.role(rank, stage, part) is not Role.INACTIVE
        case Open(stage) | Synchronize(stage) | Close(stage):
            return rank == topology.sources[stage]


def rank_offsets(counts: Sequence[int]) -> list[int]:
    """First group rank of each engine: `1 + sum(counts[:i])`; rank 0 is the source."""
    offsets = [1]
    for count in counts[:-1]:
        offsets.append(offsets[-1] + count)
    return offsets


def group_name(stage: int) -> str:
    return f"vime-pp_{stage}"
