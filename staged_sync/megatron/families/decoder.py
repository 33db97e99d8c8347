"""The rules that most decoders share: attention with grouped queries, a gated MLP, embeddings (`GPTModel`)."""

from __future__ import annotations

from collections.abc import Sequence

from staged_sync.megatron.families.common import EMBEDDING, HEAD, HF_EMBEDDING, HF_HEAD, Family, Rule
from staged_sync.megatron.families.layouts import GATED, QKV, VOCABULARY, WHOLE, Layout


def layer_rule(megatron: str, hf: Sequence[str], shape: Sequence[str], layout: Layout = WHOLE, *, together: str = "") -> Rule:
    """A rule inside a decoder layer; names without the layer's prefix."""
    in_hf = tuple("model.layers.{layer}." + name for name in hf)
    return Rule("decoder.layers.{layer}." + megatron, in_hf, tuple(shape), layout, together=together)


EMBEDDINGS = (
    Rule(EMBEDDING, (HF_EMBEDDING,), ("vocabulary", "hidden"), VOCABULARY),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",)),
    Rule(HEAD, (HF_HEAD,), ("vocabulary", "hidden"), VOCABULARY),
)

# The norms are modules of their own in the local layer spec, and fused into the linear that follows in Transformer Engine's.
NORMS = (
    layer_rule("input_layernorm.weight", ["input_layernorm.weight"], ["hidden"]),
    layer_rule("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"], ["hidden"]),
    layer_rule("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], ["hidden"]),
    layer_rule("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"], ["hidden"]),
)

_QKV_NAMES = ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}")

ATTENTION = (
    layer_rule("self_attention.linear_qkv.weight", [n.format("weight") for n in _QKV_NAMES], ["qkv", "hidden"], QKV),
    layer_rule("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ["hidden", "queries"]),
)

QKV_BIAS = (layer_rule("self_attention.linear_qkv.bias", [n.format("bias") for n in _QKV_NAMES], ["qkv"], QKV),)

QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"], ["head"]),
    layer_rule("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"], ["head"]),
)


def gated_mlp(megatron: str, hf: str, ffn: str) -> tuple[Rule, Rule]:
    """`linear_fc1` and `linear_fc2` of an MLP with `ffn` channels: HF's gate, up and down."""
    return (layer_rule(f"{megatron}.linear_fc1.weight", [f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"],
                       [f"2·{ffn}", "hidden"], GATED),
            layer_rule(f"{megatron}.linear_fc2.weight", [f"{hf}.down_proj.weight"], ["hidden", ffn]))


DENSE_MLP = gated_mlp("mlp", "mlp", "ffn")

DECODER = EMBEDDINGS + NORMS + ATTENTION + DENSE_MLP
"""A dense pre-norm decoder with grouped-query attention and a gated MLP, no biases."""

REQUIRED = {
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,  # Megatron would store gamma - 1
    "moe_mlp_glu_interleave_size": None,     # later versions can interleave the rows of gate and up
    "moe_shared_expert_glu_interleave_size": None,
}

REQUIRED_ATTENTION = REQUIRED | {
    "attention_output_gate": False,   # linear_qkv would hold gate rows too
    "rotary_interleaved": False,      # rows of q and k would be in another order than HF's
}


def dense_decoder(model_type: str, *extra_rules: Rule) -> Family:
    """A family that is `DECODER` and perhaps more rules."""
    return Family((model_type,), DECODER + extra_rules, REQUIRED_ATTENTION)
