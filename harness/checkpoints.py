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
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Family = Literal["qwen3", "qwen2", "llama"]

ARCHITECTURES: Mapping[str, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

HEAD_DIM = 32
"""The smallest head size that vLLM's CPU attention takes (16 is refused)."""


def hf_config(family: Family = "qwen3", *, tied: bool = False, vocab_size: int = 251, num_layers: int = 5,
              heads: int = 6, groups: int = 2, hidden_size: int | None = None, ffn_size: int = 176) -> dict[str, Any]:
    """The `config.json` of a tiny model, as transformers and vLLM read it.

    The defaults shard over 2 tensor parallel ranks and 2 pipeline stages (unevenly: 5 layers); 251 is prime, so that
    the vocabulary needs padding. Qwen2 has no `head_dim` of its own: its hidden size is `heads * HEAD_DIM`.
    """
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups (got heads={heads}, groups={groups})")
    if family == "qwen2":
        if hidden_size not in (None, heads * HEAD_DIM):
            raise ValueError(f"qwen2 needs hidden_size = heads * {HEAD_DIM} = {heads * HEAD_DIM} (got {hidden_size})")
        hidden_size = heads * HEAD_DIM
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size or 96,
        "intermediate_size": ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if family != "qwen2":
        config |= {"head_dim": HEAD_DIM, "attention_bias": False}
    if family == "llama":
        config["mlp_bias"] = False
    return config


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the checkpoint that `config` describes, in the order of the model."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * HEAD_DIM
    keys = config["num_key_value_heads"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (HEAD_DIM,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def checkpoint_tensors(config: Mapping[str, Any], *, step: int = 0, seed: int = 0,
                       dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """HF name -> tensor. Another `step` changes every tensor: the checkpoint after the next optimizer step."""
    return {name: _values(name, shape, step=step, seed=seed).to(dtype)
            for name, shape in tensor_shapes(config).items()}


def _values(name: str, shape: tuple[int, ...], *, step: int, seed: int) -> torch.Tensor:
    """Random fp32 values of a size that lets every layer matter: greedy tokens vary and change with any tensor."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    # Uniform with variance 1, from integers: the same bits on every CPU (randn's vector code differs in the last one).
    noise = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) / (1 << 15) * math.sqrt(3)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
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
