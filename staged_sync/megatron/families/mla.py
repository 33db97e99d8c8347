"""Multi-latent attention (`MLASelfAttention`, megatron/core/transformer/multi_latent_attention.py) and HF's DeepSeek names.

The local layer spec cuts the down projections over tensor parallel ranks, Transformer Engine keeps them whole on every rank:
their own attributes say which. The norms of the latents are modules of their own (local spec) or fused into the up projections.
"""

from __future__ import annotations

from staged_sync.megatron.families.decoder import layer_rule

LATENT_ATTENTION = (
    layer_rule("self_attention.linear_q_proj.weight", ["self_attn.q_proj.weight"], ["mla_queries", "hidden"]),
    # vLLM fuses q_a with kv_a and needs both in one call.
    layer_rule("self_attention.linear_q_down_proj.weight", ["self_attn.q_a_proj.weight"], ["q_rank", "hidden"],
               together="down projections"),
    layer_rule("self_attention.linear_kv_down_proj.weight", ["self_attn.kv_a_proj_with_mqa.weight"], ["kv_rank+rope", "hidden"],
               together="down projections"),
    layer_rule("self_attention.q_layernorm.weight", ["self_attn.q_a_layernorm.weight"], ["q_rank"]),
    layer_rule("self_attention.linear_q_up_proj.layer_norm_weight", ["self_attn.q_a_layernorm.weight"], ["q_rank"]),
    layer_rule("self_attention.linear_q_up_proj.weight", ["self_attn.q_b_proj.weight"], ["mla_queries", "q_rank"]),
    layer_rule("self_attention.kv_layernorm.weight", ["self_attn.kv_a_layernorm.weight"], ["kv_rank"]),
    layer_rule("self_attention.linear_kv_up_proj.layer_norm_weight", ["self_attn.kv_a_layernorm.weight"], ["kv_rank"]),
    layer_rule("self_attention.linear_kv_up_proj.weight", ["self_attn.kv_b_proj.weight"], ["mla_keys_values", "kv_rank"]),
    layer_rule("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ["hidden", "mla_values"]),
)
