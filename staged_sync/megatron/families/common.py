"""What families are made of: rules (Megatron parameter <-> HF tensors) and the names on both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from staged_sync.exporter import NamedTensor, Part
from staged_sync.megatron.families.layouts import WHOLE, Layout
from staged_sync.megatron.sizes import Sizes

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""megatron/core/models/gpt/gpt_model.py. A tied model has HEAD only on a last stage that is not the first."""

HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"

ROTARY_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints hold the rotary frequencies, which follow from config.json."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter (or persistent buffer) and its HF tensors.

    In names, `{layer}` stands for the global layer number, from 0; `{expert}` for the expert's (in Megatron's name local to
    the rank, in HF's global); `{mtp}` for a multi-token-prediction layer's number in HF, which goes on after the decoder's.
    `shape` names the dimensions of the full Megatron tensor (`Sizes.dimensions`). Parameters of one layer with the same word
    in `together` are gathered and sent in one bucket, because a receiver needs them in one call.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[str, ...]
    layout: Layout = WHOLE
    part: Part = "dense"
    together: str = ""


@dataclass(frozen=True)
class Family:
    """Everything there is to know about a family of HF checkpoints.

    `model_types`: values of `model_type` in config.json. `required`: settings of Megatron's config without which the
    rules would be wrong. `copies`: HF names that a checkpoint may hold, and the name whose bytes they are; HF's head is one
    more where the embeddings are tied. `optional`: pattern of other HF names that a checkpoint may hold and that nobody
    trains.
    """

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    required: Mapping[str, Any]
    copies: Mapping[str, str] = field(default_factory=dict)
    optional: re.Pattern[str] = ROTARY_BUFFERS
    _by_name: dict[str, Rule] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {rule.megatron: rule for rule in self.rules}
        if len(by_name) != len(self.rules):
            raise ValueError(f"family {self.model_types} has two rules for one Megatron name")
        object.__setattr__(self, "_by_name", by_name)

    def rule(self, name: str) -> Rule | None:
        """The rule of a Megatron parameter (global layer number), None if it is unknown."""
        return self._by_name.get(template_of(name))

    def to_hf(self, name: str, full: torch.Tensor, sizes: Sizes, *, expert: int | None = None) -> list[NamedTensor]:
        """HF names and tensors of the full Megatron tensor `name`; `expert` is its global number. Views where possible.
        Raises KeyError if unknown."""
        rule = self._by_name[template_of(name)]
        return list(zip(hf_names(rule, name, sizes, expert), rule.layout.split(full, sizes), strict=True))

    def from_hf(self, name: str, hf: Mapping[str, torch.Tensor], sizes: Sizes, *, expert: int | None = None) -> torch.Tensor:
        """The full Megatron tensor `name` from HF tensors, without vocabulary padding. Raises KeyError if unknown."""
        rule = self._by_name[template_of(name)]
        return rule.layout.join([hf[hf_name] for hf_name in hf_names(rule, name, sizes, expert)], sizes)

    def copies_of(self, hf_name: str, *, tied: bool, mtp_layers: Sequence[int]) -> list[str]:
        """HF names that hold the same bytes as `hf_name`, in a checkpoint that names them at all."""
        copies = [copy.format(mtp=layer) for copy, original in self.copies.items() for layer in mtp_layers
                  if original == hf_name or (tied and original == HF_HEAD and hf_name == HF_EMBEDDING)]
        return ([HF_HEAD] if tied and hf_name == HF_EMBEDDING else []) + copies

    def is_optional(self, hf_name: str, *, tied: bool, decoder_layers: int | None, mtp_layers: Sequence[int]) -> bool:
        """Whether a checkpoint may hold or lack `hf_name` without anything being wrong: copies, what nobody trains, and of a
        family that predicts more tokens, HF's layers after the decoder's that the trainer has not built."""
        layer = layer_of(hf_name)
        beyond = self.predicts_more and decoder_layers is not None and layer is not None and layer >= decoder_layers
        copies = [copy.format(mtp=number) for copy in self.copies for number in mtp_layers]
        return ((beyond and layer not in mtp_layers) or hf_name in copies or (tied and hf_name == HF_HEAD)
                or self.optional.fullmatch(hf_name) is not None)

    @property
    def predicts_more(self) -> bool:
        """Whether checkpoints of this family may have multi-token-prediction layers."""
        return any(rule.megatron.startswith("mtp.") for rule in self.rules)


# --- names --------------------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.weight|weight[12]\.))(\d+)")
"""SequentialMLP, TEGroupedMLP, and GroupedMLP as `staged_sync.megatron.experts` takes it apart."""


def template_of(name: str) -> str:
    """`decoder.layers.7.mlp.linear_fc1.weight` -> `decoder.layers.{layer}.mlp.linear_fc1.weight`; experts alike."""
    return _EXPERT.sub(r"\1{expert}", _LAYER.sub("layers.{layer}.", name))


def layer_of(name: str) -> int | None:
    """The layer number in a parameter name, None where it has none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def expert_of(name: str) -> int | None:
    """The expert's number in a Megatron parameter name (local to the rank), None where it has none."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[2])


def hf_names(rule: Rule, name: str, sizes: Sizes, expert: int | None) -> list[str]:
    layer = layer_of(name)
    mtp = None if layer is None or sizes.num_layers is None else sizes.num_layers + layer
    return [hf.format(layer=layer, expert=expert, mtp=mtp) for hf in rule.hf]
