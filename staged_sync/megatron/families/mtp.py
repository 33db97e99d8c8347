"""Layers that predict more tokens (`MultiTokenPredictionLayer`, megatron/core/transformer/multi_token_prediction.py).

Megatron numbers them from 0 on the last stage, next to a copy of the embedding there; HF numbers them on after the decoder's
layers, and holds copies of the embedding and of the head in each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from staged_sync.megatron.families.common import HF_EMBEDDING, HF_HEAD, Rule

COPIES = {
    "model.layers.{mtp}.embed_tokens.weight": HF_EMBEDDING,
    "model.layers.{mtp}.shared_head.head.weight": HF_HEAD,
}

_OWN = {
    "enorm.weight": ("enorm.weight", ("hidden",)),
    "hnorm.weight": ("hnorm.weight", ("hidden",)),
    "eh_proj.weight": ("eh_proj.weight", ("hidden", "2·hidden")),
    "final_layernorm.weight": ("shared_head.norm.weight", ("hidden",)),
}

INNER = ("transformer_layer", "mtp_model_layer")
"""What Megatron calls the decoder layer inside: 0.16, and later versions."""


def mtp_rules(decoder: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the extra layers: their own, and those of `decoder`'s layers once more."""
    own = [Rule(f"mtp.layers.{{layer}}.{name}", (f"model.layers.{{mtp}}.{hf}",), shape)
           for name, (hf, shape) in _OWN.items()]
    inner = [replace(rule, megatron=rule.megatron.replace("decoder.layers.{layer}", f"mtp.layers.{{layer}}.{module}"),
                     hf=tuple(name.replace("{layer}", "{mtp}") for name in rule.hf))
             for module in INNER for rule in decoder if rule.megatron.startswith("decoder.layers.{layer}.")]
    return (*own, *inner)
