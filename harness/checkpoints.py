"""Deterministic tiny HF checkpoints: what trainers load, what engines must end up with, and what tests compare with.

Written from torch and safetensors alone (no transformers, no staged_sync), so that the expected bytes never come from
code under test. Made so that mistakes show: every dimension differs from every other, norms and biases are random
instead of ones and zeros, and each value depends on the seed, the step, the tensor's name and its position.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from harness.model_shapes import Family, copied_from, hf_config, tensor_shapes

__all__ = ["checkpoint_tensors", "config_only_copy", "hf_config", "make_checkpoint", "read_checkpoint", "read_config",
           "tensor_shapes"]

ALWAYS_FLOAT32 = "e_score_correction_bias"
"""What published checkpoints keep in float32 among bf16 weights; values that bf16 would merge."""


def checkpoint_tensors(config: Mapping[str, Any], *, step: int = 0, seed: int = 0,
                       dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """HF name -> tensor. Another `step` changes every tensor: the checkpoint after the next optimizer step."""
    return {name: _values(copied_from(config, name), shape, step=step, seed=seed).to(
                torch.float32 if name.endswith(ALWAYS_FLOAT32) else dtype)
            for name, shape in tensor_shapes(config).items()}


def _values(name: str, shape: tuple[int, ...], *, step: int, seed: int) -> torch.Tensor:
    """Random fp32 values of a size that lets every layer matter: greedy tokens vary and change with any tensor."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    # Uniform with variance 1, from integers: the same bits on every CPU (randn's vector code differs in the last one).
    noise = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) / (1 << 15) * math.sqrt(3)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if name == "model.embed_tokens.weight":
        return 0.05 * noise  # small beside what the layers add: a tied head would else repeat the last token
    return noise / math.sqrt(shape[1])


def make_checkpoint(path: str | Path, family: Family = "qwen3", *, tied: bool = False, step: int = 0, seed: int = 0,
                    shards: int = 1, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> Path:
    """Write `config.json` and the weights into the directory `path`; `shape` goes to `hf_config`.

    One `model.safetensors`, or with `shards` > 1 several files and `model.safetensors.index.json`.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = hf_config(family, tied=tied, **shape)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    tensors = checkpoint_tensors(config, step=step, seed=seed, dtype=dtype)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_sharded(path, tensors, shards)
    return path


def _save_sharded(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def config_only_copy(source: str | Path, destination: str | Path) -> Path:
    """A directory with `config.json` and no weights: what an engine under test starts from, so it cannot cheat."""
    destination = Path(destination)
    destination.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(source) / "config.json", destination / "config.json")
    return destination


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory."""
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return config


def read_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """HF name -> tensor, of every safetensors file in the directory. Raises if a name occurs twice or none is there."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if name in tensors:
                    raise ValueError(f"{file} holds {name}, which another file of {path} holds too")
                tensors[name] = opened.get_tensor(name)
    if not tensors:
        raise FileNotFoundError(f"no *.safetensors in {path}")
    return tensors
