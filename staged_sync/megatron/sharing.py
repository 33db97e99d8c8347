"""Which HF names hold the bytes of another one, and which nobody has to send: the family's rule, where there is a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from staged_sync.megatron.families import UnknownFamily, find_family
from staged_sync.megatron.families.common import HF_EMBEDDING, HF_HEAD, Family
from staged_sync.megatron.parameters import unwrap


class Sharing:
    """Of one HF `config.json` and the trainer's model. A model of an unknown family shares a tied head and nothing else."""

    def __init__(self, hf_config: Mapping[str, Any], model: Sequence[nn.Module]) -> None:
        self.tied = bool(hf_config.get("tie_word_embeddings"))
        self._family: Family | None
        try:
            self._family = find_family(hf_config.get("model_type"))
        except UnknownFamily:
            self._family = None
        self._layers: int | None = hf_config.get("num_hidden_layers")
        config = next((c for chunk in model if (c := getattr(unwrap(chunk), "config", None)) is not None), None)
        first = self._layers or 0
        self._mtp = range(first, first + (getattr(config, "mtp_num_layers", None) or 0))

    def optional(self, name: str) -> bool:
        """Whether the checkpoint may name or lack `name`."""
        if self._family is None:
            return self.tied and name == HF_HEAD
        return self._family.is_optional(name, tied=self.tied, decoder_layers=self._layers, mtp_layers=self._mtp)

    def copies_of(self, name: str) -> list[str]:
        """HF names that hold the bytes of `name`, in a checkpoint that names them at all."""
        if self._family is None:
            return [HF_HEAD] if self.tied and name == HF_EMBEDDING else []
        return self._family.copies_of(name, tied=self.tied, mtp_layers=self._mtp)
