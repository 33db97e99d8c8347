"""Stub exporters: one that gathers and converts a table of tiny tensors, and one that must not be touched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.recording.model import StubUnit, Table, values
from staged_sync.errors import GatherError
from staged_sync.exporter import RAW_PASSES, Contract, NamedTensor, Part, TensorMeta
from staged_sync.seam import GatherGroup, Seam
from staged_sync.trace import Trace

PASSES: dict[Part, tuple[GatherGroup, ...]] = {"dense": ("tp",), "expert": ("etp", "ep")}


@dataclass(frozen=True)
class Shards:
    """What a gather brought together for one unit: per HF tensor, all shards in order."""

    parts: tuple[tuple[torch.Tensor, ...], ...]


class StubExporter:
    """Exports this rank's stage of `table`. Every rank holds an equal slice of each tensor's flat bytes, padded; a full tensor
    needs all slices, so a gather peer that does not join is a hang, and one that joins out of order spoils the bytes.

    `trace` is that of the updater which drives it (set when the updater is made). `before(step, label)` is called ahead of
    `units`, `gather` and `convert`: a test raises from it to fail locally.
    """

    contract: Contract = "stage_local"
    passes: tuple[Part, ...] = RAW_PASSES

    def __init__(self, seam: Seam, trace: Trace, table: Table, *, step: Callable[[], int] = lambda: 1,
                 before: Callable[[str, str], None] = lambda step, label: None) -> None:
        self.trace = trace
        self._seam = seam
        self._units = table[seam.coordinates().pp]
        self._step = step
        self.before = before

    def follow(self, trace: Trace) -> None:
        """Write into the trace of the updater that drives it."""
        self.trace = trace

    def problems(self) -> list[str]:
        return []

    def optional(self, name: str) -> bool:
        return False

    def describe(self) -> list[TensorMeta]:
        return [meta for part in PASSES for unit in self._units if unit.part == part for meta in unit.tensors]

    def gathers(self, part: Part) -> list[str]:
        return [unit.label for unit in self._units if unit.part == part]

    def units(self, part: Part) -> Sequence[StubUnit]:
        self.before("units", part)
        return [unit for unit in self._units if unit.part == part]

    def gather(self, unit: StubUnit, *, timeout_s: float) -> Shards:
        self.before("gather", unit.label)
        return Shards(tuple(tuple(self._gather(unit, meta, timeout_s)) for meta in unit.tensors))

    def convert(self, unit: StubUnit, gathered: Shards) -> list[NamedTensor]:
        self.before("convert", unit.label)
        return [(meta.name, _joined(meta, shards)) for meta, shards in zip(unit.tensors, gathered.parts, strict=True)]

    def _gather(self, unit: StubUnit, meta: TensorMeta, timeout_s: float) -> list[torch.Tensor]:
        shards = [self._own_shard(meta, unit.part)]
        for group in PASSES[unit.part]:
            if self._group_size(group) > 1:
                shards = self._all_gather(torch.cat(shards), group, unit.label, timeout_s)
        return shards

    def _all_gather(self, shard: torch.Tensor, group: GatherGroup, label: str, timeout_s: float) -> list[torch.Tensor]:
        entered = False
        try:
            with self.trace.waiting("gather", group=group, detail=label):
                entered = True
                return self._seam.all_gather(shard, group, timeout_s=timeout_s)
        except Exception as error:
            if entered:
                raise GatherError(f"{label}: {error}") from error
            raise  # the collective was not entered: the caller asks again, to drain

    def _own_shard(self, meta: TensorMeta, part: Part) -> torch.Tensor:
        me = self._seam.coordinates()
        index, of = (me.tp, me.tp_size) if part == "dense" else (me.ep * me.etp_size + me.etp, me.ep_size * me.etp_size)
        return _shard(meta, self._step(), index, of)

    def _group_size(self, group: GatherGroup) -> int:
        me = self._seam.coordinates()
        return {"tp": me.tp_size, "etp": me.etp_size, "ep": me.ep_size}[group]


@functools.lru_cache(maxsize=4096)
def _shard(meta: TensorMeta, step: int, index: int, of: int) -> torch.Tensor:
    """A rank's parameter: read, never written to."""
    flat = values(meta, step).reshape(-1).view(torch.uint8)
    each = math.ceil(flat.numel() / of)
    padded = torch.cat([flat, flat.new_zeros(each * of - flat.numel())])
    return padded[index * each:(index + 1) * each]


def _joined(meta: TensorMeta, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """A rank that holds all of it gives its own memory away, as a trainer does."""
    flat = shards[0] if len(shards) == 1 else torch.cat(list(shards))[:meta.nbytes]
    return flat.view(meta.dtype).reshape(meta.shape)


class Touched(AssertionError):
    """Something that an inactive rank must leave alone was used."""


class UntouchableExporter:
    """An exporter of a rank that is inactive all through: it may be asked about its model at connect, nothing else."""

    contract: Contract = "stage_local"
    passes: tuple[Part, ...] = RAW_PASSES

    def problems(self) -> list[str]:
        return []

    def gathers(self, part: Part) -> list[str]:
        return []

    def optional(self, name: str) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise Touched(f"an inactive rank touched its exporter: {name}")


class UntouchableEngine:
    """A handle whose every attribute raises: inactive ranks and idle sources never talk to an engine."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise Touched(f"a rank that must not talk to engines touched a handle: {name}")
