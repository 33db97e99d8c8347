"""What the cutter cuts with: where a rank sits, and which rows or columns of a full Megatron tensor it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Tensors = Mapping[str, torch.Tensor]

Names = Literal["local", "te"]
"""Layer norms as modules of their own (local spec) or fused into the linear that follows (Transformer Engine)."""

Container = Literal["sequential", "te", "grouped"]
"""Megatron's containers of experts: SequentialMLP, TEGroupedMLP, GroupedMLP."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank sits in its stage: rank and size of its tensor, expert and expert tensor parallel group."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0


ROWS_OVER_RANKS = (
    "word_embeddings.weight", "output_layer.weight",
    "linear_qkv.weight", "linear_qkv.bias",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "eh_proj.weight",
)
ROWS_IF_LOCAL = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""Cut by the local layer spec, whole on every rank with Transformer Engine (parallel_mode="duplicated")."""

COLUMNS_OVER_RANKS = ("linear_proj.weight", "linear_fc2.weight")
HALVES_OVER_RANKS = ("linear_fc1.weight",)


def cut(name: str, tensor: torch.Tensor, *, tp: int, tp_rank: int, names: Names = "local") -> torch.Tensor:
    """The part of a full Megatron tensor that tensor parallel rank `tp_rank` holds; a copy."""
    if name.endswith(HALVES_OVER_RANKS):
        gate, up = tensor[: len(tensor) // 2], tensor[len(tensor) // 2:]
        return torch.cat([slice_of(gate, 0, tp, tp_rank), slice_of(up, 0, tp, tp_rank)])
    if name.endswith(ROWS_OVER_RANKS) or (names == "local" and name.endswith(ROWS_IF_LOCAL)):
        return slice_of(tensor, 0, tp, tp_rank).clone()
    if name.endswith(COLUMNS_OVER_RANKS):
        return slice_of(tensor, 1, tp, tp_rank).clone()
    return tensor.clone()


def slice_of(tensor: torch.Tensor, dim: int, tp: int, tp_rank: int) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % tp:
        raise ValueError(f"dimension {dim} of shape {tuple(tensor.shape)} does not divide over {tp} ranks")
    return tensor.narrow(dim, tp_rank * (size // tp), size // tp)
