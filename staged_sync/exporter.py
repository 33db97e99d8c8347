"""What an exporter is: the part that turns a stage's Megatron parameters into HF-named full tensors.

The lifecycle (update_weight.py) drives it unit by unit and keeps collectives apart from what may fail locally:

    for unit in exporter.units("dense"):
        gathered = exporter.gather(unit, timeout_s=…)      # a collective: every gather peer of the pass calls it
        if this rank is the source and nothing has failed:
            bucket, send: exporter.convert(unit, gathered)  # local: may raise without breaking a peer

so that after a failure a source can *drain*: go on gathering, converting and sending nothing, until the next status barrier.
An exporter whose export is an iterator has one unit per item: to gather it is to take the next item.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

Contract = Literal["stage_local", "pipeline_collective"]
"""`stage_local`: a stage can export alone. `pipeline_collective`: every PP rank must iterate, or the others hang."""

Part = Literal["dense", "expert", "stage", "model"]
"""What one pass covers, and who joins it.

dense, expert   the two passes of a raw export: dense gathers in the TP group; expert in the expert-TP and EP groups
stage           all of a stage in one pass, joined by every rank of the stage
model           everything in one pass, joined by every trainer rank; the source of stage 0 sends
"""

RAW_PASSES: tuple[Part, ...] = ("dense", "expert")
ITERATED_PASS: dict[Contract, tuple[Part, ...]] = {"stage_local": ("stage",), "pipeline_collective": ("model",)}
"""The one pass of an export that is an iterator, by contract."""

NamedTensor: TypeAlias = tuple[str, torch.Tensor]
"""HF name and full (unsharded) tensor."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and full shape of one HF tensor, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Unit(Protocol):
    """One step of an export: what is gathered and converted together and never split over two buckets."""

    @property
    def label(self) -> str:
        """The Megatron name (global layer number), for traces and errors."""


class Exporter(Protocol):
    contract: Contract
    passes: tuple[Part, ...]
    """The passes of a stage, in order; `("model",)` if and only if the contract is `pipeline_collective`."""

    def problems(self) -> list[str]:
        """Everything in this rank's model that cannot be exported, as full sentences; empty if none. Local, no communication."""

    def describe(self) -> list[TensorMeta]:
        """What this rank's stage will send, in sending order, from parameter metadata alone: no communication, no bytes.

        Called on ranks that will send only. dtype and shape are exactly those of the tensors that `convert` will return.
        """

    def units(self, part: Part) -> Iterable[Unit]:
        """The steps of one pass: same labels, order and number on every gather peer of the pass. Local.

        Where the number is not known before (an iterator), a generator that ends with the export. It is closed by whoever
        drives it, also in the middle.
        """

    def gathers(self, part: Part) -> list[str]:
        """What this rank brings into the gathers of one pass, in few lines: equal on all gather peers of the pass, or they would
        hang, or mix up what they gather. Compared at connect. Local, from parameter metadata."""

    def optional(self, name: str) -> bool:
        """The family's rule for HF names that the checkpoint may have and nobody sends, or the other way round (a tied
        lm_head, rotary buffers)."""

    def gather(self, unit: Any, *, timeout_s: float) -> Any:
        """Join the collective(s) of `unit`; returns what `convert` needs. In a `model` pass that has `nbytes`, the same on
        every rank: ranks keep pace with the source by it.

        Raises `GatherError` once the collective has been entered and failed: the group is lost for this update. Any other
        exception means that the collective was *not* entered; the lifecycle then calls `gather` for the same unit again to
        drain, so that the peers are not left waiting. So: prepare first, communicate last, and leave everything that
        follows (concatenating, cutting) to `convert`.
        """

    def convert(self, unit: Any, gathered: Any) -> list[NamedTensor]:
        """HF names and full tensors of `unit`. Local. The tensors need not be contiguous; they must not alias a buffer
        that a later `gather` overwrites."""
