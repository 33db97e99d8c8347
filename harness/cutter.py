"""A slow, obviously right cutter: HF tensors -> the shard that one Megatron rank must hold.

It shares no code with `staged_sync` on purpose, and says everything in the most literal way (loops over heads and
ranks), so that an export which gives back the HF checkpoint has been checked against a second opinion. Needs torch
only; real megatron-core models are built from it in `harness.megatron_oracle`.

Layouts are those of megatron-core 0.16.1: `SelfAttention` (megatron/core/transformer/attention.py: "q1 q2 k1 v1 | q3 q4
k2 v2"), `MLP` (megatron/core/transformer/mlp.py: gate and up rows of one rank together), `ColumnParallelLinear`,
`RowParallelLinear` and `VocabParallelEmbedding` (megatron/core/tensor_parallel/layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

Tensors = Mapping[str, torch.Tensor]

Names = Literal["local", "te"]
"""Layer norms as modules of their own (local spec) or fused into the linear that follows (Transformer Engine)."""

NORMS: Mapping[Names, tuple[str, str]] = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}

ROWS_OVER_RANKS = (
    "word_embeddings.weight", "output_layer.weight",
    "linear_qkv.weight", "linear_qkv.bias",
)
COLUMNS_OVER_RANKS = ("linear_proj.weight", "linear_fc2.weight")
HALVES_OVER_RANKS = ("linear_fc1.weight",)


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def padded_vocab_size(vocab_size: int, *, tp: int, multiple: int = 8) -> int:
    """As Megatron pads (`--make-vocab-size-divisible-by`, here 8 instead of 128), but never without padding rows."""
    size = vocab_size + 1
    while size % (multiple * tp):
        size += 1
    return size


def stage_layers(num_layers: int, *, pp: int) -> list[range]:
    """Global layer numbers (from 0) of each stage. The first gets the remainder: 5 layers on 2 stages are 2 and 3."""
    if num_layers < pp:
        raise ValueError(f"{num_layers} layers cannot fill {pp} pipeline stages")
    later = next(size for size in range(-(-num_layers // pp), 0, -1) if num_layers - (pp - 1) * size >= 1)
    first = num_layers - (pp - 1) * later
    return [range(first)] + [range(first + stage * later, first + (stage + 1) * later) for stage in range(pp - 1)]


def shard_tensors(hf: Tensors, config: Mapping[str, Any], *, tp: int, tp_rank: int, layers: Sequence[int], first: bool,
                  last: bool, padded_vocab: int, names: Names = "local") -> dict[str, torch.Tensor]:
    """Megatron name -> tensor of one rank's model chunk; layer numbers in names are LOCAL, as Megatron's are.

    `first` and `last` say whether the chunk holds the embedding and the output layer. A tied model has its output
    layer's copy of the embedding only where the chunk is `last` and not `first`.
    """
    full: dict[str, torch.Tensor] = {}
    if first:
        full["embedding.word_embeddings.weight"] = _pad_rows(hf["model.embed_tokens.weight"], padded_vocab)
    for local, layer in enumerate(layers):
        for name, tensor in full_layer(hf, config, layer, names=names).items():
            full[f"decoder.layers.{local}.{name}"] = tensor
    if last:
        full["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            full["output_layer.weight"] = _pad_rows(hf["lm_head.weight"], padded_vocab)
        elif not first:
            full["output_layer.weight"] = _pad_rows(hf["model.embed_tokens.weight"], padded_vocab)
    return {name: cut(name, tensor, tp=tp, tp_rank=tp_rank) for name, tensor in full.items()}


def full_layer(hf: Tensors, config: Mapping[str, Any], layer: int, *,
               names: Names = "local") -> dict[str, torch.Tensor]:
    """Megatron name within the layer -> tensor as if TP were 1."""
    of = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in hf.items()
          if name.startswith(f"model.layers.{layer}.")}
    input_norm, mlp_norm = NORMS[names]
    full = {
        input_norm: of["input_layernorm.weight"],
        "self_attention.linear_qkv.weight": _interleave(of, config, "weight"),
        "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"],
        mlp_norm: of["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": of["mlp.down_proj.weight"],
    }
    if "self_attn.q_proj.bias" in of:
        full["self_attention.linear_qkv.bias"] = _interleave(of, config, "bias")
    if "self_attn.q_norm.weight" in of:
        full["self_attention.q_layernorm.weight"] = of["self_attn.q_norm.weight"]
        full["self_attention.k_layernorm.weight"] = of["self_attn.k_norm.weight"]
    return full


def cut(name: str, tensor: torch.Tensor, *, tp: int, tp_rank: int) -> torch.Tensor:
    """The part of a full Megatron tensor that tensor parallel rank `tp_rank` holds; a copy."""
    if name.endswith(HALVES_OVER_RANKS):
        gate, up = tensor[: len(tensor) // 2], tensor[len(tensor) // 2:]
        return torch.cat([_slice(gate, 0, tp, tp_rank), _slice(up, 0, tp, tp_rank)])
    if name.endswith(ROWS_OVER_RANKS):
        return _slice(tensor, 0, tp, tp_rank).clone()
    if name.endswith(COLUMNS_OVER_RANKS):
        return _slice(tensor, 1, tp, tp_rank).clone()
    return tensor.clone()


def _slice(tensor: torch.Tensor, dim: int, tp: int, tp_rank: int) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % tp:
        raise ValueError(f"dimension {dim} of shape {tuple(tensor.shape)} does not divide over {tp} ranks")
    return tensor.narrow(dim, tp_rank * (size // tp), size // tp)


def _interleave(of: Tensors, config: Mapping[str, Any], kind: Literal["weight", "bias"]) -> torch.Tensor:
    """Rows of q, k and v in Megatron's order: per query group its query heads, then its key, then its value head."""
    q, k, v = (of[f"self_attn.{part}_proj.{kind}"] for part in "qkv")
    size = head_dim(config)
    queries_per_group = config["num_attention_heads"] // config["num_key_value_heads"]
    rows = []
    for group in range(config["num_key_value_heads"]):
        for query in range(group * queries_per_group, (group + 1) * queries_per_group):
            rows.append(q[query * size:(query + 1) * size])
        rows.append(k[group * size:(group + 1) * size])
        rows.append(v[group * size:(group + 1) * size])
    return torch.cat(rows)


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Padding rows hold a value that no weight has, so that an export that keeps them is seen."""
    padding = torch.full((rows - len(tensor), *tensor.shape[1:]), 777.0, dtype=tensor.dtype)
    return torch.cat([tensor, padding])
