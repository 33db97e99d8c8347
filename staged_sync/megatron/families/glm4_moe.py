"""GLM-4.5 and GLM-4-MoE: biases on q, k and v, perhaps norms over heads, first layers dense, routed and shared experts with a
router bias in float32, layers that predict more tokens (`Glm4MoeForCausalLM` in transformers)."""

from staged_sync.megatron.families.common import Family
from staged_sync.megatron.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    REQUIRED_ATTENTION,
)
from staged_sync.megatron.families.moe import EXPERT_BIAS, ROUTER, SHARED_EXPERTS, experts
from staged_sync.megatron.families.mtp import COPIES, mtp_rules

LAYER = (NORMS + ATTENTION + QKV_BIAS + QK_NORM + DENSE_MLP
         + ROUTER + EXPERT_BIAS + SHARED_EXPERTS + experts())

FAMILY = Family(("glm4_moe",), EMBEDDINGS + LAYER + mtp_rules(LAYER), REQUIRED_ATTENTION, copies=COPIES)
