"""The trainer's `args`, with the attribute names of Megatron and vime, and defaults that suit a tiny model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def make_args(hf_checkpoint: Path | str, **overrides: Any) -> SimpleNamespace:
    """Raw export, unpacked, deadlines at their defaults. An override with another name than below is taken as it is."""
    defaults: dict[str, Any] = {
        "hf_checkpoint": str(hf_checkpoint), "megatron_to_hf_mode": "raw", "vllm_weight_sync_packed": False,
        "update_weight_buffer_size": 1 << 20, "rollout_num_gpus_per_engine": 1, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 8, "hidden_size": 32, "vocab_size": 64,
    }
    return SimpleNamespace(**{**defaults, **overrides})
