"""Qwen3-MoE: Qwen3's attention, experts instead of the MLP, no shared experts (`Qwen3MoeForCausalLM` in transformers)."""

from staged_sync.megatron.families.common import Family
from staged_sync.megatron.families.decoder import DECODER, QK_NORM, REQUIRED_ATTENTION
from staged_sync.megatron.families.moe import NO_EXPERT_BIAS, ROUTER, experts

FAMILY = Family(("qwen3_moe",), DECODER + QK_NORM + ROUTER + experts(), REQUIRED_ATTENTION | NO_EXPERT_BIAS)
