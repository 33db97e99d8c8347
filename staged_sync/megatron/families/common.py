"""What families are made of: rules (Megatron parameter <-> HF tensors), layouts, and the rules most decoders share.

A layout is a pair of pure functions on full (unsharded) tensors of any dtype, on any device including `meta`; both
directions keep every bit. Layouts mirror megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from staged_sync.exporter import NamedTensor, Part
from staged_sync.megatron.sizes import Sizes

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""megatron/core/models/gpt/gpt_model.py. A tied model has HEAD only on a last stage that is not the first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one full Megatron tensor holds one or several HF tensors.

    `interleaved`: how many blocks of its partition dimension each tensor parallel rank holds a slice of (1: one slice
    of the whole; 2: a slice of the first half, then one of the second).
    """

    split: Callable[[torch.Tensor, Sizes], Sequence[torch.Tensor]]
    join: Callable[[Sequence[torch.Tensor], Sizes], torch.Tensor]
    interleaved: int = 1


def _split_qkv(qkv: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    per_group = sizes.num_attention_heads // sizes.num_query_groups
    groups = qkv.unflatten(0, (sizes.num_query_groups, per_group + 2, sizes.kv_channels))
    return [part.flatten(0, 2) for part in groups.split([per_group, 1, 1], dim=1)]


def _join_qkv(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    return torch.cat([part.unflatten(0, (sizes.num_query_groups, -1, sizes.kv_channels)) for part in parts],
                     dim=1).flatten(0, 2)


WHOLE = Layout(lambda full, sizes: [full], lambda parts, sizes: parts[0])
"""The same tensor on both sides."""

QKV = Layout(_split_qkv, _join_qkv)
"""Rows [group, (queries per group + key + value), head]: the query heads of a group, then its key, then its value head.

`SelfAttention.get_query_key_value_tensors` (megatron/core/transformer/attention.py): "q1 q2 k1 v1 | q3 q4 k2 v2 | …".
Tensor parallel ranks hold equal slices of these rows, also with fewer groups than ranks: then a slice ends inside a
group, and the full tensor is still their concatenation. Weight (qkv, hidden) or bias (qkv,).
"""

GATED = Layout(lambda full, sizes: full.chunk(2), lambda parts, sizes: torch.cat(list(parts)), interleaved=2)
"""Rows [gate | up]; each tensor parallel rank holds [its slice of gate | its slice of up].

`MLP.forward` (megatron/core/transformer/mlp.py) chunks the local output in two; 0.16.1 marks it with
partition_stride=2.
"""

VOCABULARY = Layout(lambda full, sizes: [full[:sizes.vocab_size]], lambda parts, sizes: parts[0])
"""The vocabulary's rows, then padding rows up to a multiple of Megatron's choice, which HF does not have.

`join` returns the rows without padding.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and its HF tensors. `{layer}` in names stands for the global layer number, from 0.

    `shape` names the dimensions of the full Megatron tensor (`Sizes.dimensions`).
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[str, ...]
    layout: Layout = WHOLE
    part: Part = "dense"


@dataclass(frozen=True)
class Family:
    """Everything there is to know about a family of HF checkpoints.

    `model_types`: values of `model_type` in config.json. `required`: settings of Megatron's config without which the
    rules would be wrong. `tied_names`: HF names that a checkpoint with tied embeddings may hold, and the name whose
    bytes they are. `optional`: pattern of other HF names that a checkpoint may hold and that nobody trains.
    """

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    required: Mapping[str, Any]
    tied_names: Mapping[str, str]
    optional: re.Pattern[str]
    _by_name: dict[str, Rule] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {rule.megatron: rule for rule in self.rules}
        if len(by_name) != len(self.rules):
            raise ValueError(f"family {self.model_types} has two rules for one Megatron name")
        object.__setattr__(self, "_by_name", by_name)

    def rule(self, name: str) -> Rule | None:
        """The rule of a Megatron parameter (global layer number), None if it is unknown."""
        return self._by_name.get(template_of(name))

    def to_hf(self, name: str, full: torch.Tensor, sizes: Sizes) -> list[NamedTensor]:
        """HF names and tensors of the full Megatron tensor `name`. Views where possible. Raises KeyError if unknown."""
        rule = self._by_name[template_of(name)]
        return list(zip(_numbered(rule.hf, name), rule.layout.split(full, sizes), strict=True))

    def from_hf(self, name: str, hf: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """The full Megatron tensor `name` from HF tensors, without vocabulary padding. Raises KeyError if unknown."""
        rule = self._by_name[template_of(name)]
        return rule.layout.join([hf[hf_name] for hf_name in _numbered(rule.hf, name)], sizes)

    def is_optional(self, hf_name: str, *, tied: bool) -> bool:
        """Whether a checkpoint may hold or lack `hf_name` without anything being wrong."""
        return (tied and hf_name in self.tied_names) or self.optional.fullmatch(hf_name) is not None


_LAYER = re.compile(r"\blayers\.(\d+)\.")


def template_of(name: str) -> str:
    """`decoder.layers.7.mlp.linear_fc1.weight` -> `decoder.layers.{layer}.mlp.linear_fc1.weight`."""
    return _LAYER.sub("layers.{layer}.", name)


def layer_of(name: str) -> int | None:
    """The layer number in a Megatron parameter name, None where it has none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _numbered(hf_names: Sequence[str], megatron_name: str) -> list[str]:
    layer = layer_of(megatron_name)
    return [name.format(layer=layer) for name in hf_names]


def layer_rule(megatron: str, hf: Sequence[str], shape: Sequence[str], layout: Layout = WHOLE) -> Rule:
    """A rule inside a decoder layer; names without the layer's prefix."""
    in_hf = tuple("model.layers.{layer}." + name for name in hf)
    return Rule("decoder.layers.{layer}." + megatron, in_hf, tuple(shape), layout)


_QKV_NAMES = ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}")

DECODER = (
    Rule(EMBEDDING, ("model.embed_tokens.weight",), ("vocabulary", "hidden"), VOCABULARY),
    # The norms are modules of their own in the local layer spec, and fused into the linear that follows in TE's.
    layer_rule("input_layernorm.weight", ["input_layernorm.weight"], ["hidden"]),
    layer_rule("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"], ["hidden"]),
    layer_rule("self_attention.linear_qkv.weight", [n.format("weight") for n in _QKV_NAMES], ["qkv", "hidden"],
               QKV),
    layer_rule("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ["hidden", "queries"]),
    layer_rule("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], ["hidden"]),
    layer_rule("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"], ["hidden"]),
    layer_rule("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["gate_up", "hidden"], GATED),
    layer_rule("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ["hidden", "ffn"]),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),
    Rule(HEAD, ("lm_head.weight",), ("vocabulary", "hidden"), VOCABULARY),
)
"""A dense pre-norm decoder with grouped-query attention and a gated MLP, no biases."""

QKV_BIAS = (layer_rule("self_attention.linear_qkv.bias", [n.format("bias") for n in _QKV_NAMES], ["qkv"], QKV),)

QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"], ["head"]),
    layer_rule("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"], ["head"]),
)

REQUIRED = {
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,  # Megatron would store gamma - 1
    "attention_output_gate": False,          # linear_qkv would hold gate rows too
}

TIED_NAMES = {"lm_head.weight": "model.embed_tokens.weight"}

ROTARY_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints hold the rotary frequencies, which follow from config.json."""


def dense_decoder(model_type: str, *extra_rules: Rule) -> Family:
    """A family that is `DECODER` and perhaps more rules."""
    return Family((model_type,), DECODER + extra_rules, REQUIRED, TIED_NAMES, ROTARY_BUFFERS)
