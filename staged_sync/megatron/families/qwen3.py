"""Qwen3, dense: no biases, RMS norms over each query and key head (`Qwen3ForCausalLM` in transformers)."""

from staged_sync.megatron.families.decoder import QK_NORM, dense_decoder

FAMILY = dense_decoder("qwen3", *QK_NORM)
