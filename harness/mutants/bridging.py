"""Defects of bridge export: who iterates, who sends, who waits for whom, what becomes of the tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import torch

from staged_sync import connect, stage, update_weight
from staged_sync.control import Control, Status
from staged_sync.exporter import Contract
from staged_sync.megatron.bridge_export import BridgeExporter
from staged_sync.plan import Barrier, Role, Step, Topology
from staged_sync.seam import Coordinates
from staged_sync.stage import Stage
from staged_sync.update import Update


def two_barriers() -> AbstractContextManager[Any]:
    """Ranks of stages that do not export meet twice after a stage's export, as after the two passes of a raw one."""
    real = Update._meet

    def meet(self: Update, step: Barrier) -> None:
        real(self, step)
        if step.label == "stage 0 exported" and self._rank.seam.coordinates().pp != 0:
            real(self, step)
    return patch.object(Update, "_meet", meet)


def stage_leaves_early() -> AbstractContextManager[Any]:
    """The last stage stops iterating when its own tensors have come by."""
    real = Stage._export

    def export(self: Stage, units: Any, sends: bool, *, in_step: bool) -> None:
        leaves = in_step and self._rank.seam.coordinates().pp == 1
        real(self, takewhile(lambda unit: not (leaves and unit.number > 2), units), sends, in_step=in_step)
    return patch.object(Stage, "_export", export)


def every_stage_sends() -> AbstractContextManager[Any]:
    """Each stage's source opens a group of its own and sends the whole model."""
    def everybody(self: Topology, rank: int, stage: int, part: str) -> Role:
        return Role.SOURCE if rank in self.sources else Role.GATHER_PEER

    def sends(c: Coordinates, contract: Contract) -> bool:
        return c.dp == 0 and c.tp == 0
    return _together(patch.object(Topology, "role", everybody), patch.object(update_weight, "sends", sends),
                     patch.object(connect, "sends", sends))


def nobody_waits_for_the_source() -> AbstractContextManager[Any]:
    """Ranks iterate on while the source is still sending."""
    return patch.object(Control, "keep_pace", lambda self, label, status, *, timeout_s: [Status(data=status.data)])


def inactive_stages_export() -> AbstractContextManager[Any]:
    """Every stage iterates its exporter in the turn of every other one."""
    def takes_part(step: Step, topology: Topology, rank: int) -> bool:
        return True if type(step).__name__ == "Send" else _takes_part(step, topology, rank)
    from staged_sync import update
    _takes_part = update.takes_part
    return patch.object(update, "takes_part", takes_part)


def views_are_kept() -> AbstractContextManager[Any]:
    """What the exporter yields goes into the bucket as it is."""
    def keep(self: BridgeExporter, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
    return patch.object(BridgeExporter, "_own_copy", keep)


def not_drained() -> AbstractContextManager[Any]:
    """A rank that has failed stops iterating."""
    real = stage.Stage._gather

    def gather(self: Stage, unit: Any) -> Any:
        if self._failure:
            raise stage.GatherError(f"{unit.label}: gave up")
        return real(self, unit)
    return patch.object(stage.Stage, "_gather", gather)


class _together:
    """Several patches as one."""

    def __init__(self, *patches: Any) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for one in self._patches:
            one.__enter__()

    def __exit__(self, *exception: object) -> None:
        for one in reversed(self._patches):
            one.__exit__(*exception)
