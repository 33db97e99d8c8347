"""Megatron's configuration of the model that a HF `config.json` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from harness.cutter import head_dim, stage_layers
from harness.model_shapes import QK_NORM, QKV_BIAS, experts_of, has_experts, mtp_layers


def transformer_config(hf: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16,
                       settings: Mapping[str, Any] | None = None) -> TransformerConfig:
    """For this world's sizes; `settings` are Megatron's own names and win (uneven stages, layouts)."""
    values = _dense(hf, dtype) | _parallel(hf, settings or {})
    if experts_of(hf):
        values |= _mixture(hf)
    if mtp_layers(hf):
        values |= {"mtp_num_layers": len(mtp_layers(hf))}
    if "kv_lora_rank" in hf:
        return MLATransformerConfig(**(values | _latent_attention(hf) | dict(settings or {})))
    return TransformerConfig(**(values | dict(settings or {})))


def _dense(hf: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] in QKV_BIAS,
        "qk_layernorm": hf["model_type"] in QK_NORM,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
    }


SPLITS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
          "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout")


def _parallel(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    pp, vpp = mpu.get_pipeline_model_parallel_world_size(), mpu.get_virtual_pipeline_model_parallel_world_size()
    # Not context_parallel_size: it would need Transformer Engine's attention, and no weight depends on it.
    values = {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
    }
    if vpp is None and not any(name in settings for name in SPLITS):
        stages = stage_layers(hf["num_hidden_layers"], pp=pp)
        if len({len(stage) for stage in stages}) > 1:
            values["num_layers_in_first_pipeline_stage"] = len(stages[0])
    return values


def _mixture(hf: Mapping[str, Any]) -> dict[str, Any]:
    ffn = hf.get("moe_intermediate_size", hf["intermediate_size"])
    shared = hf.get("shared_expert_intermediate_size") or hf.get("n_shared_experts", 0) * ffn or None
    values = {
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
        "num_moe_experts": experts_of(hf),
        "moe_ffn_hidden_size": ffn,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_layer_freq": [int(has_experts(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": "shared_expert_intermediate_size" in hf,
    }
    if "routed_scaling_factor" in hf:
        values |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
                   "moe_router_topk_scaling_factor": hf["routed_scaling_factor"], "moe_router_pre_softmax": True}
    return values


def _latent_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": hf["rope_theta"],
        "kv_channels": None,
        "num_query_groups": hf["num_attention_heads"],
    }
