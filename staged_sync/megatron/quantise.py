"""FP8 with a scale per block, as the checkpoints of DeepSeek-V3 and Qwen3-FP8 hold their weights.

A quantised weight is two HF tensors: `name` in float8_e4m3fn and `name_scale_inv` in float32, one entry per block of, say, 128
rows and 128 columns; blocks at the lower and right edge may be smaller. A weight is `name * name_scale_inv` of its block. The
engine needs both at once, so they are one unit. Quantised once, on the source, from the full tensor: blocks do not end where
shards do.

Which tensors are quantised is what the checkpoint's header says: those that it holds in float8_e4m3fn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from staged_sync.config import quantisation_problems

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448

SCALE_SUFFIX = "_scale_inv"

Block = tuple[int, int]


def quantise(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` (rows, columns) of any float dtype -> float8_e4m3fn of the same shape, and float32 scales (⌈rows / block rows⌉,
    ⌈columns / block columns⌉).

    A block's largest magnitude becomes 448. The scale of a block of zeros is 1: 0 / 448 would make every weight of it NaN.
    """
    (rows, columns), (height, width) = weight.shape, block
    padded = F.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # (block row, row, block column, column)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (blocks / scales).clamp(-LARGEST, LARGEST).to(FP8)
    return scaled.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales[:, 0, :, 0]


def read_block(hf_config: Mapping[str, Any], given: Mapping[str, Any] | None) -> tuple[Block | None, list[str]]:
    """The block size that config.json's `quantization_config` gives, None without quantisation, and what cannot be served.

    `given`: the caller's `quantization_config`, which must not say anything else; None or empty if there is none.
    """
    config = hf_config.get("quantization_config")
    problems = _differences(given, config or {})
    if not config:
        return None, problems
    problems += quantisation_problems(config)
    if problems:
        return None, problems
    rows, columns = config["weight_block_size"]
    return (rows, columns), []


COMPARED = {"quant_method": None, "weight_block_size": None, "activation_scheme": "dynamic"}
"""What decides about the form of weights and scales, and what it is where a config is silent."""


def _differences(given: Any, in_hf: Any) -> list[str]:
    if not given or not isinstance(given, Mapping) or not isinstance(in_hf, Mapping):
        return []  # what is no mapping cannot be served, and is refused for that
    mine, its = ({name: list(value) if isinstance(value := config.get(name, default), tuple) else value
                  for name, default in COMPARED.items()} for config in (given, in_hf))
    if not (differing := [f"{name} {mine[name]!r} and not {its[name]!r}" for name in COMPARED if mine[name] != its[name]]):
        return []
    return [f"quantization_config must say what config.json at args.hf_checkpoint says, or be None (got {', '.join(differing)}): "
            f"weights are sent in the checkpoint's form"]
