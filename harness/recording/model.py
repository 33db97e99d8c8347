"""A tiny model as a table: stage -> units, each with its HF tensors. Shapes all differ, values depend on name and step."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

from staged_sync.exporter import Part, TensorMeta


@dataclass(frozen=True)
class StubUnit:
    """One Megatron parameter (`label`) and the HF tensors it becomes."""

    label: str
    part: Part
    tensors: tuple[TensorMeta, ...]


Table: TypeAlias = Sequence[Sequence[StubUnit]]
"""By stage."""


def small_table(pp: int, *, dense: int = 2, expert: int = 0) -> Table:
    """`dense` and `expert` units of one tensor per stage, named by stage and place: `s0.dense1` becomes `hf.s0.dense1`."""
    return [[_unit(stage, part, i) for part, count in (("dense", dense), ("expert", expert)) for i in range(count)]
            for stage in range(pp)]


def _unit(stage: int, part: str, i: int) -> StubUnit:
    label = f"s{stage}.{part}{i}"
    shape = (2 + stage, 3 + i, 5 if part == "dense" else 7)
    return StubUnit(label, "dense" if part == "dense" else "expert", (TensorMeta(f"hf.{label}", torch.bfloat16, shape),))


def hf_metas(table: Table) -> dict[str, TensorMeta]:
    """Every HF tensor of the model by name."""
    return {meta.name: meta for units in table for unit in units for meta in unit.tensors}


def values(meta: TensorMeta, step: int) -> torch.Tensor:
    """Bytes that depend on the tensor's name and the training step; every bit pattern may occur, so compare bytes."""
    return _values(meta, step).clone()


@functools.lru_cache(maxsize=4096)
def _values(meta: TensorMeta, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{meta.name}/{step}".encode()))
    raw = torch.randint(0, 256, (max(1, meta.nbytes),), dtype=torch.uint8, generator=generator)[:meta.nbytes]
    return raw.view(meta.dtype).reshape(meta.shape)


def differences(held: Mapping[str, torch.Tensor | None], metas: Mapping[str, TensorMeta], step: int) -> list[str]:
    """Where an engine worker's weights are not the bytes of `step`; empty if it holds exactly those."""
    wrong = [f"{name}: not of this model" for name in held if name not in metas]
    for name, meta in metas.items():
        tensor = held.get(name)
        if tensor is None:
            wrong.append(f"{name}: never received")
        elif not same_bytes(tensor, _values(meta, step)):
            wrong.append(f"{name}: other bytes than step {step}{_whose(tensor, metas, step)}")
    return wrong


def _whose(tensor: torch.Tensor, metas: Mapping[str, TensorMeta], step: int) -> str:
    owner = next((name for name, meta in metas.items() if same_bytes(tensor, _values(meta, step))), None)
    return "" if owner is None else f", those of {owner}"


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


def write_checkpoint(folder: Path, metas: Iterable[TensorMeta], **config: Any) -> Path:
    """An HF checkpoint directory whose header names exactly `metas`: what completeness is checked against. `config` goes into
    its config.json."""
    (folder / "config.json").write_text(json.dumps({"model_type": "a stub", **config}))
    save_file({meta.name: values(meta, 0).clone() for meta in metas}, folder / "model.safetensors")
    return folder
