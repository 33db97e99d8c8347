"""A slow, obviously right cutter: HF tensors -> the shard that one Megatron rank must hold.

It shares no code with `staged_sync` on purpose, and says everything in the most literal way (loops over heads, experts and
ranks), so that an export which gives back the HF checkpoint has been checked against a second opinion. Needs torch
only; real megatron-core models are built from it in `harness.megatron_oracle`.

Layouts are those of megatron-core 0.16.1: `SelfAttention` (megatron/core/transformer/attention.py: "q1 q2 k1 v1 | q3 q4
k2 v2"), `MLP` (megatron/core/transformer/mlp.py: gate and up rows of one rank together), `ColumnParallelLinear`,
`RowParallelLinear` and `VocabParallelEmbedding` (megatron/core/tensor_parallel/layers.py). Experts: `harness.cutter_moe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from harness.cutter_moe import expert_shards, full_mixture
from harness.cutting import Container, Names, Place, Tensors, cut


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


def virtual_layers(num_layers: int, *, pp: int, vpp: int) -> list[list[range]]:
    """Global layer numbers (from 0) of each stage's virtual chunks: dealt out in rounds, as Megatron does evenly."""
    each, rest = divmod(num_layers, pp * vpp)
    if rest:
        raise ValueError(f"{num_layers} layers cannot be dealt out evenly to {pp} stages of {vpp} chunks")
    return [[range((chunk * pp + stage) * each, (chunk * pp + stage + 1) * each) for chunk in range(vpp)]
            for stage in range(pp)]


def shard_tensors(hf: Tensors, config: Mapping[str, Any], *, place: Place, layers: Sequence[int], first: bool, last: bool,
                  padded_vocab: int, names: Names = "local", container: Container = "sequential",
                  mtp: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Megatron name -> tensor of one rank's model chunk; layer and expert numbers in names are LOCAL, as Megatron's are.

    `first` and `last` say whether the chunk holds the embedding and the output layer. A tied model has its output
    layer's copy of the embedding only where the chunk is `last` and not `first`. A chunk with the layers `mtp` (HF's numbers)
    has the embedding too.
    """
    full: dict[str, torch.Tensor] = {}
    if first or mtp:
        full["embedding.word_embeddings.weight"] = _pad_rows(hf["model.embed_tokens.weight"], padded_vocab)
    for local, layer in enumerate(layers):
        for name, tensor in full_layer(hf, config, layer, names=names).items():
            full[f"decoder.layers.{local}.{name}"] = tensor
    if last:
        full["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for local, layer in enumerate(mtp):
        for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            full[f"mtp.layers.{local}.{name}"] = hf[f"model.layers.{layer}.{name}"]
        full[f"mtp.layers.{local}.final_layernorm.weight"] = hf[f"model.layers.{layer}.shared_head.norm.weight"]
        for name, tensor in full_layer(hf, config, layer, names=names).items():
            full[f"mtp.layers.{local}.transformer_layer.{name}"] = tensor
    if last and not config["tie_word_embeddings"]:
        full["output_layer.weight"] = _pad_rows(hf["lm_head.weight"], padded_vocab)
    elif last and not first:
        full["output_layer.weight"] = _pad_rows(hf["model.embed_tokens.weight"], padded_vocab)
    cut_ones = {name: cut(name, tensor, tp=place.tp, tp_rank=place.tp_rank, names=names) for name, tensor in full.items()}
    numbered = [("decoder.layers", layers), ("mtp.layers", mtp)]
    return cut_ones | {f"{stem}.{local}.{'transformer_layer.' * (stem == 'mtp.layers')}{name}": tensor
                       for stem, numbers in numbered for local, layer in enumerate(numbers)
                       for name, tensor in expert_shards(of_layer(hf, layer), place, container).items()}


def of_layer(hf: Tensors, layer: int) -> dict[str, torch.Tensor]:
    """The tensors of one HF layer, by their names inside it."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in hf.items() if name.startswith(prefix)}


def full_layer(hf: Tensors, config: Mapping[str, Any], layer: int, *, names: Names = "local") -> dict[str, torch.Tensor]:
    """Megatron name within the layer -> tensor as if TP were 1; all but the routed experts."""
    of = of_layer(hf, layer)
    full = {"input_layernorm.weight": of["input_layernorm.weight"]}
    if "self_attn.kv_a_proj_with_mqa.weight" in of:
        full |= _latent_attention(of)
    else:
        full |= _attention(of, config)
    full["pre_mlp_layernorm.weight"] = of["post_attention_layernorm.weight"]
    full |= full_mixture(of) or _mlp(of)
    return _fused_norms(full) if names == "te" else full


def _attention(of: Tensors, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    full = {"self_attention.linear_qkv.weight": _interleave(of, config, "weight"),
            "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"]}
    if "self_attn.q_proj.bias" in of:
        full["self_attention.linear_qkv.bias"] = _interleave(of, config, "bias")
    if "self_attn.q_norm.weight" in of:
        full["self_attention.q_layernorm.weight"] = of["self_attn.q_norm.weight"]
        full["self_attention.k_layernorm.weight"] = of["self_attn.k_norm.weight"]
    return full


LATENT_ATTENTION = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight", "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight", "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight", "linear_proj.weight": "o_proj.weight",
}
"""`MLASelfAttention` (megatron/core/transformer/multi_latent_attention.py): the same matrices under other names."""


def _latent_attention(of: Tensors) -> dict[str, torch.Tensor]:
    return {f"self_attention.{ours}": of[f"self_attn.{theirs}"] for ours, theirs in LATENT_ATTENTION.items()
            if f"self_attn.{theirs}" in of}


def _mlp(of: Tensors) -> dict[str, torch.Tensor]:
    return {"mlp.linear_fc1.weight": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": of["mlp.down_proj.weight"]}


FUSED_NORMS = {  # norm of the local spec -> the linear that Transformer Engine fuses it into
    "input_layernorm.weight": "self_attention.linear_qkv",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1",
}


def _fused_norms(full: Tensors) -> dict[str, torch.Tensor]:
    """The same tensors under Transformer Engine's names: a norm moves into the linear after it, where there is one."""
    return {f"{FUSED_NORMS[name]}.layer_norm_weight" if f"{FUSED_NORMS.get(name)}.weight" in full else name: tensor
            for name, tensor in full.items()}


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
