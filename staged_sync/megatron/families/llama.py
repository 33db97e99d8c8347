"""Llama 2 and 3, dense: no biases, no query and key norms (`LlamaForCausalLM` in transformers)."""

from staged_sync.megatron.families.decoder import dense_decoder

FAMILY = dense_decoder("llama")
