"""The numbers that layouts are made of, from the model's configuration, the trainer's args and the HF checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FIELDS = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""Names that megatron's `TransformerConfig` and its args share."""

OPTIONAL_FIELDS = (
    "num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",                 # mixtures of experts
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",               # MLATransformerConfig
)
"""The same, for families that have them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the unsharded model, by Megatron's names.

    `vocab_size` is the HF checkpoint's, without padding rows; `num_layers` too, without layers that predict more tokens.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    num_layers: int | None = None
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None

    def dimensions(self) -> dict[str, int]:
        """Size of each dimension that a `Rule.shape` names, as far as known. `vocabulary` is a lower bound: Megatron pads it."""
        heads, groups, head = self.num_attention_heads, self.num_query_groups, self.kv_channels
        ffns = {"ffn": self.ffn_hidden_size, "expert_ffn": self.moe_ffn_hidden_size,
                "shared_ffn": self.moe_shared_expert_intermediate_size}
        known = {
            "hidden": self.hidden_size,
            "2·hidden": 2 * self.hidden_size,
            "one": 1,
            "head": head,
            "queries": heads * head,
            "qkv": (heads + 2 * groups) * head,
            "vocabulary": self.vocab_size,
            "experts": self.num_moe_experts,
            **ffns,
            **{f"2·{name}": 2 * size for name, size in ffns.items() if size is not None},
            **self._latent_attention(),
        }
        return {name: size for name, size in known.items() if size is not None}

    def _latent_attention(self) -> dict[str, int | None]:
        """Dimensions of `MLASelfAttention` (megatron/core/transformer/multi_latent_attention.py)."""
        heads, nope, rope, value = self.num_attention_heads, self.qk_head_dim, self.qk_pos_emb_head_dim, self.v_head_dim
        if self.kv_lora_rank is None or nope is None or rope is None or value is None:
            return {}
        return {"q_rank": self.q_lora_rank, "kv_rank": self.kv_lora_rank, "kv_rank+rope": self.kv_lora_rank + rope,
                "mla_queries": heads * (nope + rope), "mla_keys_values": heads * (nope + value), "mla_values": heads * value}


def read_hf_config(args: Any) -> tuple[dict[str, Any], list[str]]:
    """`config.json` at `args.hf_checkpoint`, and what is wrong with it; {} where it cannot be read."""
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        return {}, ["args.hf_checkpoint must name the HF checkpoint that the engines serve (got "
                    f"{checkpoint!r}): its config.json says which model family to export"]
    file = Path(checkpoint) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return {}, [f"{file} cannot be read ({error!r}); args.hf_checkpoint must be a local HF checkpoint directory"]
    if not isinstance(config, dict):
        return {}, [f"{file} must hold a JSON object (got a {type(config).__name__})"]
    return config, []


def read_sizes(args: Any, config: Any | None, hf_config: Mapping[str, Any]) -> tuple[Sizes | None, list[str]]:
    """Sizes from the model's `TransformerConfig` and `args`, and every problem; None where a needed size is unknown.

    The model's configuration decides; `args` stands in where it is silent and must not say otherwise. The vocabulary and the
    number of layers are the HF checkpoint's; `args.vocab_size` counts only without it (it may be the tokenizer's, which is
    smaller than the model's), and Megatron's number of layers, where it is known, must be the same.
    """
    values: dict[str, Any] = {}
    problems = []
    for name in (*CONFIG_FIELDS, *OPTIONAL_FIELDS, "num_layers"):
        in_config, in_args = getattr(config, name, None), _from_args(args, name)
        values[name] = in_args if in_config is None else in_config
        if in_config is not None and in_args is not None and in_config != in_args:
            problems.append(f"{name} must be the same in the model's config and in args (got {in_config} and "
                            f"{in_args}): the layout of the weights depends on it")
    layers, in_megatron = hf_config.get("num_hidden_layers"), values.pop("num_layers")
    if None not in (layers, in_megatron) and layers != in_megatron:
        problems.append(f"num_layers must be config.json's num_hidden_layers, without layers that predict more tokens (got "
                        f"{in_megatron} and {layers}): HF numbers those on after the decoder's, so that one would be sent as the "
                        f"other")
    in_hf = hf_config.get("vocab_size")
    values["vocab_size"] = getattr(args, "vocab_size", None) if in_hf is None else in_hf
    needed = (*CONFIG_FIELDS, "vocab_size")
    problems += [f"{name} is unknown: neither the model's config nor args has it" for name in needed if values[name] is None]
    if any(values[name] is None for name in needed):
        return None, problems
    return Sizes(**values, num_layers=layers), problems


def _from_args(args: Any, name: str) -> Any:
    # Megatron's --num-query-groups defaults to 1 and counts only with --group-query-attention; else groups = heads.
    if name == "num_query_groups" and getattr(args, "group_query_attention", None) is False:
        return getattr(args, "num_attention_heads", None)
    return getattr(args, name, None)


def differing_settings(config: Any | None, required: Mapping[str, Any]) -> list[str]:
    """Settings of the model's config under which a family's layouts would be read wrongly, as sentences."""
    return [f"the model's config has {name}={getattr(config, name)!r}, but this family's weights are laid out for "
            f"{name}={value!r}; exporting them would be silently wrong"
            for name, value in required.items() if getattr(config, name, value) != value]
