"""Units of a raw export: which parameters are gathered and sent together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from staged_sync.exporter import Part
from staged_sync.megatron.families.common import Rule, layer_of
from staged_sync.megatron.gathering import Partition


@dataclass(frozen=True, slots=True)
class Piece:
    """One Megatron parameter, persistent buffer or expert of this stage; `name` has the global layer and local expert number."""

    name: str
    parameter: torch.Tensor
    rule: Rule
    partition: Partition

    @property
    def full_bytes(self) -> int:
        """Bytes of everything that is gathered of it: the full tensors of all expert parallel ranks."""
        return math.prod(self.partition.full_shape(self.parameter.shape)) * self.parameter.element_size() * self.partition.ep


@dataclass(frozen=True, slots=True)
class RawUnit:
    """What one `gather` brings together."""

    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        """The Megatron name of the first parameter, and how many follow."""
        more = len(self.pieces) - 1
        return self.pieces[0].name + (f" and {more} more" if more else "")


def units_of(pieces: Sequence[Piece], part: Part, limit_bytes: int) -> list[RawUnit]:
    """Dense: one parameter per unit. Expert: as many as fit into `limit_bytes`, since there are many small ones. What a rule
    keeps together stays together in both."""
    if part == "dense":
        return [RawUnit(tuple(group)) for group in _together(pieces)]
    units: list[list[Piece]] = []
    size = 0
    for group in _together(pieces):
        more = sum(piece.full_bytes for piece in group)
        if not units or size + more > limit_bytes:
            units.append([])
            size = 0
        units[-1] += group
        size += more
    return [RawUnit(tuple(unit)) for unit in units]


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that a rule keeps together, at the place of the first one; every other piece alone."""
    groups: dict[object, list[Piece]] = {}
    for index, piece in enumerate(pieces):
        stem = piece.name.partition("layers.")[0]
        key = (stem, layer_of(piece.name), piece.rule.together) if piece.rule.together else index
        groups.setdefault(key, []).append(piece)
    yield from groups.values()
