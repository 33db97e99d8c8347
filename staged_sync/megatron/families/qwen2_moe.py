"""Qwen2-MoE: Qwen2's attention, routed experts and one shared expert behind a gate (`Qwen2MoeForCausalLM` in transformers)."""

from staged_sync.megatron.families.common import Family
from staged_sync.megatron.families.decoder import DECODER, QKV_BIAS, REQUIRED_ATTENTION, gated_mlp, layer_rule
from staged_sync.megatron.families.moe import NO_EXPERT_BIAS, ROUTER, experts

SHARED_EXPERT = (
    *gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
    layer_rule("mlp.shared_experts.gate_weight", ["mlp.shared_expert_gate.weight"], ["one", "hidden"]),
)

FAMILY = Family(("qwen2_moe",), DECODER + QKV_BIAS + ROUTER + SHARED_EXPERT + experts(),
                REQUIRED_ATTENTION | NO_EXPERT_BIAS)
