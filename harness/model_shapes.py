"""Tiny models of every family: their `config.json`, and name and shape of every tensor of their HF checkpoints.

Names and shapes are those of the published checkpoints, which are also what vLLM loads. Needs no package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3"]
Shapes = dict[str, tuple[int, ...]]

ARCHITECTURES: Mapping[str, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

HEAD_DIM = 32
"""The smallest head size that vLLM's CPU attention takes (16 is refused)."""

HEAD_FROM_HIDDEN = ("qwen2", "qwen2_moe", "mixtral")
"""Families without a `head_dim` of their own: their hidden size is `heads * HEAD_DIM`."""

QKV_BIAS = ("qwen2", "qwen2_moe", "glm4_moe")
QK_NORM = ("qwen3", "qwen3_moe", "glm4_moe")

EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 64}

EXTRA: Mapping[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False},
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen3_moe": EXPERTS | {"attention_bias": False, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 1,
                            "mlp_only_layers": [], "norm_topk_prob": False, "qkv_bias": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    "glm4_moe": EXPERTS | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "n_routed_experts": 8,
                           "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                           "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0},
    # kv_lora_rank 512 and 64 rotary channels: the only latent attention that vLLM's CPU build has. topk_method: transformers
    # does not write it, and vLLM has no e_score_correction_bias without it.
    "deepseek_v3": EXPERTS | {"attention_bias": False, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
                              "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 2,
                              "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
                              "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
                              "num_nextn_predict_layers": 0, "rope_interleave": True},
}


def hf_config(family: Family = "qwen3", *, tied: bool = False, vocab_size: int = 251, num_layers: int = 5,
              heads: int = 6, groups: int = 2, hidden_size: int | None = None, ffn_size: int = 176,
              **extra: Any) -> dict[str, Any]:
    """The `config.json` of a tiny model, as transformers and vLLM read it; `extra` replaces entries of the family's own.

    The defaults shard over 2 tensor parallel ranks and 2 pipeline stages (unevenly: 5 layers); 251 is prime, so that
    the vocabulary needs padding.
    """
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups (got heads={heads}, groups={groups})")
    if family in HEAD_FROM_HIDDEN:
        if hidden_size not in (None, heads * HEAD_DIM):
            raise ValueError(f"{family} needs hidden_size = heads * {HEAD_DIM} = {heads * HEAD_DIM} (got {hidden_size})")
        hidden_size = heads * HEAD_DIM
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size or 96,
        "intermediate_size": ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "deepseek_v3" else groups,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if family not in (*HEAD_FROM_HIDDEN, "deepseek_v3"):
        config["head_dim"] = HEAD_DIM
    return config | EXTRA.get(family, {}) | extra


def experts_of(config: Mapping[str, Any]) -> int:
    """Number of routed experts; 0 for a dense model."""
    return int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the MLP of `layer` (from 0, MTP layers after the decoder's) is a mixture of experts."""
    return experts_of(config) > 0 and layer >= config.get("first_k_dense_replace", 0) \
        and layer not in config.get("mlp_only_layers", ())


def mtp_layers(config: Mapping[str, Any]) -> range:
    """HF's numbers of the layers that predict more tokens; none without `num_nextn_predict_layers`."""
    layers = config["num_hidden_layers"]
    return range(layers, layers + (config.get("num_nextn_predict_layers") or 0))


def tensor_shapes(config: Mapping[str, Any]) -> Shapes:
    """HF name -> shape of every tensor of the checkpoint that `config` describes, in the order of the model."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= _layer(config, layer)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in mtp_layers(config):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.embed_tokens.weight": (vocab, hidden), f"{prefix}.enorm.weight": (hidden,),
                   f"{prefix}.hnorm.weight": (hidden,), f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
                   f"{prefix}.shared_head.norm.weight": (hidden,), f"{prefix}.shared_head.head.weight": (vocab, hidden)}
        shapes |= _layer(config, layer)
    return shapes


def copied_from(config: Mapping[str, Any], name: str) -> str:
    """The tensor whose bytes `name` has: MTP layers repeat the embedding and the head."""
    if name in {f"model.layers.{layer}.embed_tokens.weight" for layer in mtp_layers(config)}:
        return "model.embed_tokens.weight"
    if name in {f"model.layers.{layer}.shared_head.head.weight" for layer in mtp_layers(config)}:
        return "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return name


def _layer(config: Mapping[str, Any], layer: int) -> Shapes:
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}"
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    shapes |= _latent_attention(config) if config["model_type"] == "deepseek_v3" else _attention(config)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _mixture(config) if has_experts(config, layer) else _mlp("mlp", hidden, config["intermediate_size"])
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _attention(config: Mapping[str, Any]) -> Shapes:
    hidden, family = config["hidden_size"], config["model_type"]
    head_dim = config.get("head_dim", HEAD_DIM)
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes: Shapes = {}
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{part}_proj.weight"] = (rows, hidden)
        if family in QKV_BIAS:
            shapes[f"self_attn.{part}_proj.bias"] = (rows,)
    if family in QK_NORM:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    return shapes


def _latent_attention(config: Mapping[str, Any]) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if rank is None:
        shapes: Shapes = {"self_attn.q_proj.weight": (heads * (nope + rope), hidden)}
    else:
        shapes = {"self_attn.q_a_proj.weight": (rank, hidden), "self_attn.q_a_layernorm.weight": (rank,),
                  "self_attn.q_b_proj.weight": (heads * (nope + rope), rank)}
    latent = config["kv_lora_rank"]
    return shapes | {"self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
                     "self_attn.kv_a_layernorm.weight": (latent,),
                     "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
                     "self_attn.o_proj.weight": (hidden, heads * value)}


def _mlp(prefix: str, hidden: int, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = names
    return {f"{prefix}.{gate}.weight": (ffn, hidden), f"{prefix}.{up}.weight": (ffn, hidden),
            f"{prefix}.{down}.weight": (hidden, ffn)}


def _mixture(config: Mapping[str, Any]) -> Shapes:
    hidden, family, experts = config["hidden_size"], config["model_type"], experts_of(config)
    if family == "mixtral":
        shapes: Shapes = {"block_sparse_moe.gate.weight": (experts, hidden)}
        for expert in range(experts):
            shapes |= _mlp(f"block_sparse_moe.experts.{expert}", hidden, config["intermediate_size"], ("w1", "w3", "w2"))
        return shapes
    shapes = {"mlp.gate.weight": (experts, hidden)}
    if family in ("deepseek_v3", "glm4_moe"):
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    if family == "qwen2_moe":
        shapes |= _mlp("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    elif shared := config.get("n_shared_experts"):
        shapes |= _mlp("mlp.shared_experts", hidden, shared * config["moe_intermediate_size"])
    return shapes
