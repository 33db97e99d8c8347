"""Reading an engine's weights back, also those that vLLM's CPU build has packed.

On CPUs vLLM packs every linear weight for its matrix kernels and empties the parameter (shape (0,)). What is read back for
those is the copy taken right before packing, at load and at every reload: honest about what vLLM was about to pack, blind to
the packing itself. The packed weights are covered by tokens and logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_RECORD = "_harness_unpacked_weight"


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Every parameter by name; `unpacked` names those that come from the record instead of the live parameter."""

    tensors: dict[str, torch.Tensor]
    unpacked: frozenset[str]


def record_unpacked_weights() -> None:
    """Once per process, before the first engine is made. Changes nothing of what vLLM computes."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    stock = UnquantizedLinearMethod.process_weights_after_loading

    def process(self: Any, layer: torch.nn.Module) -> None:
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.numel() and not weight.is_meta:
            setattr(layer, _RECORD, weight.detach().clone())
        stock(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process


def read_model(model: torch.nn.Module) -> ReadBack:
    tensors, unpacked = {}, set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            record = getattr(module, _RECORD, None)
            if parameter.numel() == 0 and name == "weight" and record is not None:
                tensors[full] = record
                unpacked.add(full)
            else:
                tensors[full] = parameter.detach()
    return ReadBack(tensors, frozenset(unpacked))
