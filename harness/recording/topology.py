"""Megatron's rank order (`tp-cp-ep-dp-pp`), written a second time, so that the library's idea of it is not its own judge.

A dense rank counts tp fastest, then cp, dp, pp; the same rank counted for experts is etp fastest, then ep, edp, pp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from staged_sync.seam import Coordinates, GatherGroup


@dataclass(frozen=True)
class Layout:
    """Sizes as given to `initialize_model_parallel`; `dp` is data parallel *without* context parallel."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        if self.world_size % (self.expert_tp * self.ep * self.pp):
            raise ValueError(f"not a Megatron layout: {self.world_size} ranks cannot be cut into etp {self.expert_tp} x "
                             f"ep {self.ep} x pp {self.pp}")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @cached_property
    def ranks(self) -> tuple[Coordinates, ...]:
        """The coordinates of every rank."""
        return tuple(self._coordinates(rank) for rank in range(self.world_size))

    @cached_property
    def sources(self) -> dict[int, Coordinates]:
        """Who sends for each stage: data parallel (with context parallel) and tensor parallel rank 0 of it."""
        return {c.pp: c for c in self.ranks if c.dp == 0 and c.tp == 0}

    def members(self, rank: int, group: GatherGroup | Literal["pp"]) -> tuple[int, ...]:
        """The ranks of `rank`'s own gather group, or of its pipeline, by group rank."""
        mine = _outside(self.ranks[rank], group)
        return tuple(c.rank for c in self.ranks if _outside(c, group) == mine)

    def _coordinates(self, rank: int) -> Coordinates:
        per_stage = self.world_size // self.pp
        edp_size = per_stage // (self.expert_tp * self.ep)
        within = rank % per_stage
        return Coordinates(
            rank=rank, pp=rank // per_stage, pp_size=self.pp,
            tp=within % self.tp, tp_size=self.tp, dp=within // self.tp, dp_size=self.cp * self.dp,
            etp=within % self.expert_tp, etp_size=self.expert_tp,
            ep=within // self.expert_tp % self.ep, ep_size=self.ep,
            edp=within // (self.expert_tp * self.ep), edp_size=edp_size,
        )


def _outside(at: Coordinates, group: str) -> tuple[int, ...]:
    """The coordinates that all members of `group` share."""
    if group == "tp":
        return (at.pp, at.dp)
    if group == "pp":
        return (at.tp, at.dp)
    if group == "etp":
        return (at.pp, at.edp, at.ep)
    if group == "ep":
        return (at.pp, at.edp, at.etp)
    raise ValueError(f"no such gather group: {group!r}; it must be tp, etp, ep or pp")
