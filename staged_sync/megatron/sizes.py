"""The numbers that layouts are made of, from the model's configuration, the trainer's args and the HF checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FIELDS = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
"""Names that megatron's `TransformerConfig` and its args share."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the unsharded model, by Megatron's names. `vocab_size` is the HF checkpoint's: without padding rows."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int

    def dimensions(self) -> dict[str, int]:
        """Size of each dimension that a `Rule.shape` names. `vocabulary` is a lower bound: Megatron pads it."""
        heads, groups, head = self.num_attention_heads, self.num_query_groups, self.kv_channels
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "gate_up": 2 * self.ffn_hidden_size,
            "head": head,
            "queries": heads * head,
            "qkv": (heads + 2 * groups) * head,
            "vocabulary": self.vocab_size,
        }


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


def read_sizes(args: Any, config: Any | None, vocab_size: int | None) -> tuple[Sizes | None, list[str]]:
    """Sizes from the model's `TransformerConfig` and `args`, and every problem; None where a size is unknown.

    The model's configuration decides; `args` stands in where it is silent and must not say otherwise. `vocab_size` is
    the HF checkpoint's; `args.vocab_size` counts only without it (it may be the tokenizer's, which is smaller than the
    model's).
    """
    values: dict[str, Any] = {}
    problems = []
    for name in CONFIG_FIELDS:
        in_config, in_args = getattr(config, name, None), _from_args(args, name)
        values[name] = in_args if in_config is None else in_config
        if in_config is not None and in_args is not None and in_config != in_args:
            problems.append(f"{name} must be the same in the model's config and in args (got {in_config} and "
                            f"{in_args}): the layout of the weights depends on it")
    values["vocab_size"] = getattr(args, "vocab_size", None) if vocab_size is None else vocab_size
    problems += [f"{name} is unknown: neither the model's config nor args has it" for name, value in values.items()
                 if value is None]
    return (None if None in values.values() else Sizes(**values)), problems


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
