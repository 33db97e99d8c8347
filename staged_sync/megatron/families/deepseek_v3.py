"""DeepSeek-V3: latent attention with or without a query rank, first layers dense, routed and shared experts with a router bias in
float32, layers that predict more tokens (`DeepseekV3ForCausalLM` in transformers)."""

from staged_sync.megatron.families.common import Family
from staged_sync.megatron.families.decoder import DENSE_MLP, EMBEDDINGS, NORMS, REQUIRED
from staged_sync.megatron.families.mla import LATENT_ATTENTION
from staged_sync.megatron.families.moe import EXPERT_BIAS, ROUTER, SHARED_EXPERTS, experts
from staged_sync.megatron.families.mtp import COPIES, mtp_rules

LAYER = NORMS + LATENT_ATTENTION + DENSE_MLP + ROUTER + EXPERT_BIAS + SHARED_EXPERTS + experts()

FAMILY = Family(("deepseek_v3",), EMBEDDINGS + LAYER + mtp_rules(LAYER), REQUIRED | {"multi_latent_attention": True},
                copies=COPIES)
