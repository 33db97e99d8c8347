"""Whether the gather peers of every pass would gather the same things: compared at connect, before a byte moves; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from staged_sync.exporter import Part
from staged_sync.plan import Role, Topology

SHOWN = 5
"""How many differing lines of one rank are quoted."""


def gather_problems(topology: Topology, gathers: Sequence[Mapping[Part, Sequence[str]]]) -> list[str]:
    """What each rank would bring into its gathers (`Exporter.gathers`), by rank, against its stage's source. One sentence per
    stage, pass and kind of difference, naming the ranks and what differs; empty if all agree."""
    problems = []
    for stage, source in enumerate(topology.sources):
        for part in gathers[source]:
            if part == "model" and stage > 0:
                continue  # one pass of all ranks, counted as stage 0's
            expected = tuple(gathers[source].get(part, ()))
            others: dict[tuple[str, ...], list[int]] = {}
            for rank, lines in enumerate(gathers):
                mine = tuple(lines.get(part, ()))
                if topology.role(rank, stage, part) is Role.GATHER_PEER and mine != expected:
                    others.setdefault(mine, []).append(rank)
            problems += [f"stage {stage}, {part} pass: rank {source} (the source) and {_ranks(ranks)} would gather different "
                         f"things. Only on rank {source}: {_only(expected, mine)}; only on {_ranks(ranks)}: "
                         f"{_only(mine, expected)}" for mine, ranks in others.items()]
    return problems


def _only(mine: Sequence[str], others: Sequence[str]) -> str:
    lines = [line for line in mine if line not in others]
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return (", ".join(lines[:SHOWN]) or "nothing") + more


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
