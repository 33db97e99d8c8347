"""Defects of who does what: sources, gather peers, ranks of engines in the transfer group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from staged_sync import connect, plan, transfer_group
from staged_sync.exporter import Part
from staged_sync.plan import Role, Topology
from staged_sync.rank import Rank
from staged_sync.seam import Coordinates


@contextmanager
def _sources_are(predicate: Callable[[Coordinates], bool]) -> Any:
    with ExitStack() as stack:
        for module in (plan, connect):
            stack.enter_context(patch.object(module, "is_source", predicate))
        yield


def source_without_context_parallel() -> AbstractContextManager[Any]:
    """The data-parallel rank is taken without context parallel, which the source predicate then forgets."""
    half = 2  # the context-parallel size of the scenario
    return _sources_are(lambda c: c.dp // half == 0 and c.tp == 0)


def source_by_tensor_rank_alone() -> AbstractContextManager[Any]:
    """Every data-parallel replica thinks that it is the source."""
    return _sources_are(lambda c: c.tp == 0)


def expert_peers_of_one_replica_only() -> AbstractContextManager[Any]:
    """Gather peers are looked for in the source's own replica, but expert groups span data parallel."""
    real = Topology.role

    def role(self: Topology, rank: int, stage: int, part: Part) -> Role:
        if part == "expert" and self.coordinates[rank].dp != 0:
            return Role.INACTIVE
        return real(self, rank, stage, part)
    return patch.object(Topology, "role", role)


def every_replica_gathers() -> AbstractContextManager[Any]:
    """Ranks that nobody needs take part in the dense pass of their stage."""
    real = Topology.role

    def role(self: Topology, rank: int, stage: int, part: Part) -> Role:
        found = real(self, rank, stage, part)
        replica = found is Role.INACTIVE and part == "dense" and self.coordinates[rank].pp == stage
        return Role.GATHER_PEER if replica else found
    return patch.object(Topology, "role", role)


def offsets_from_one_engine_size() -> AbstractContextManager[Any]:
    """Every engine is as large as the first one."""
    def offsets(counts: Sequence[int]) -> list[int]:
        return [1 + i * counts[0] for i in range(len(counts))]
    return patch.object(transfer_group, "rank_offsets", offsets)


def offsets_without_the_source() -> AbstractContextManager[Any]:
    """Rank 0 is given to the first worker: the source is forgotten."""
    real = plan.rank_offsets
    return patch.object(transfer_group, "rank_offsets", lambda counts: [offset - 1 for offset in real(counts)])


def group_name_never_given_back() -> AbstractContextManager[Any]:
    """The active source keeps its group name after its turn."""
    real = Rank.set_group_name

    def set_group_name(self: Rank, name: str | None) -> None:
        if name is not None:
            real(self, name)
    return patch.object(Rank, "set_group_name", set_group_name)
