"""Tensors of published models, computed from the numbers in their `config.json` (harness/model_shapes.py)."""

from __future__ import annotations

from typing import Any

import torch

from harness.model_shapes import hf_config, tensor_shapes
from staged_sync.exporter import TensorMeta

QWEN3_0_6B: dict[str, Any] = {"vocab_size": 151_936, "num_layers": 28, "heads": 16, "groups": 8, "hidden_size": 1024,
                              "ffn_size": 3072, "head_dim": 128}
"""huggingface.co/Qwen/Qwen3-0.6B, config.json; embedding and output layer are one matrix."""

QWEN3_235B_A22B: dict[str, Any] = {
    "vocab_size": 151_936, "num_layers": 94, "heads": 64, "groups": 4, "hidden_size": 4096, "ffn_size": 12_288, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
"""huggingface.co/Qwen/Qwen3-235B-A22B, config.json."""


def dense(**changes: Any) -> list[TensorMeta]:
    """Qwen3-0.6B, or with `changes` something smaller of its shape; in the order of the model."""
    return _metas(hf_config("qwen3", tied=True, **QWEN3_0_6B | changes))


def mixture(**changes: Any) -> list[TensorMeta]:
    """Qwen3-235B-A22B, or with `changes` something smaller of its shape."""
    return _metas(hf_config("qwen3_moe", **QWEN3_235B_A22B | changes))


def _metas(config: dict[str, Any]) -> list[TensorMeta]:
    return [TensorMeta(name, torch.bfloat16, shape) for name, shape in tensor_shapes(config).items()]
