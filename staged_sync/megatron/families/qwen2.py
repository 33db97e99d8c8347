"""Qwen2 and Qwen2.5, dense: biases on q, k and v only (`Qwen2ForCausalLM` in transformers)."""

from staged_sync.megatron.families.decoder import QKV_BIAS, dense_decoder

FAMILY = dense_decoder("qwen2", *QKV_BIAS)
