"""Mixtral: Llama's attention, experts under names of their own (`MixtralForCausalLM` in transformers)."""

from staged_sync.megatron.families.common import Family
from staged_sync.megatron.families.decoder import ATTENTION, EMBEDDINGS, NORMS, REQUIRED_ATTENTION, layer_rule
from staged_sync.megatron.families.moe import NO_EXPERT_BIAS, experts

ROUTER = layer_rule("mlp.router.weight", ["block_sparse_moe.gate.weight"], ["experts", "hidden"])

EXPERTS = experts(gate="block_sparse_moe.experts.{expert}.w1.weight", up="block_sparse_moe.experts.{expert}.w3.weight",
                  down="block_sparse_moe.experts.{expert}.w2.weight")

FAMILY = Family(("mixtral",), (*EMBEDDINGS, *NORMS, *ATTENTION, ROUTER, *EXPERTS), REQUIRED_ATTENTION | NO_EXPERT_BIAS)
