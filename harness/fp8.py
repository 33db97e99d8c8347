"""FP8 checkpoints with a scale per block, by a slow second opinion: block by block, in the words of the format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness.checkpoints import read_checkpoint, read_config

BLOCK = 128
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""What published FP8 checkpoints have in config.json as `quantization_config`."""


def quantise_slowly(weight: torch.Tensor, height: int = BLOCK, width: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) -> float8_e4m3fn of the same shape and one float32 scale per block. The largest magnitude of a block
    becomes 448; a block of zeros has scale 1."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(math.ceil(rows / height), math.ceil(columns / width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * height:(i + 1) * height, j * width:(j + 1) * width].float()
            largest = block.abs().max()
            scales[i, j] = largest / 448 if largest > 0 else 1.0
            values[i * height:(i + 1) * height, j * width:(j + 1) * width] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def quantised(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers in FP8, each followed by its scales; the rest as it is."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            result[name], result[name + "_scale_inv"] = quantise_slowly(tensor)
        else:
            result[name] = tensor
    return result


def quantised_copy(source: str | Path, destination: str | Path) -> Path:
    """The checkpoint that engines serve where trainers hold `source`: what a user points `hf_checkpoint` at."""
    destination = Path(destination)
    destination.mkdir(parents=True, exist_ok=True)
    (destination / "config.json").write_text(json.dumps(read_config(source) | {"quantization_config": FP8_CONFIG}, indent=1))
    save_file(quantised(read_checkpoint(source)), destination / "model.safetensors", metadata={"format": "pt"})
    return destination
