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


def read_block(hf_config: Mapping[str, Any]) -> tuple[Block | None, list[str]]:
    """The block size that config.json's `quantization_config` gives, None without quantisation, and what cannot be served."""
    config = hf_config.get("quantization_config")
    if not config:
        return None, []
    if problems := quantisation_problems(config):
        return None, problems
    rows, columns = config["weight_block_size"]
    return (rows, columns), []
