"""What vLLM's CPU build (0.32.0) leaves stale after a weight update, put right at `finish_weight_update`.

The CPU build packs a layer's weight for its matrix kernels when it is loaded (vllm/model_executor/layers/utils.py,
`dispatch_cpu_unquantized_gemm`) and computes with the packed copy. A layerwise reload packs again for the layers that a
checkpoint names. A tied `lm_head` is not named: it shares the embedding's parameter, keeps its own packed copy, and would go on
computing logits with the old weights, silently.

Mixture-of-experts layers are packed once as well and never again, and that cannot be put right at finish yet: such models are
refused.
"""

from __future__ import annotations

import torch

from staged_sync.errors import StagedSyncError, bullets


class Unrepaired(StagedSyncError):
    """This model would compute with stale weights after an update, silently, on vLLM's CPU build."""


def check(model: torch.nn.Module) -> None:
    """Raise `Unrepaired`, naming the layers, where `repair` would not be enough."""
    experts = [name for name, layer in model.named_modules() if hasattr(getattr(layer, "quant_method", None), "moe_kernel")]
    if experts:
        raise Unrepaired(bullets("vLLM's CPU build does not pack mixture-of-experts layers again after a weight update, so this "
                                 "engine would answer with garbage; the gloo back end does not serve such models yet:", experts))


def repair(model: torch.nn.Module) -> None:
    """Pack again every layer that computes with a packed copy of a weight it shares with another layer."""
    for layer in tied_packed_layers(model):
        layer.quant_method.process_weights_after_loading(layer)


def tied_packed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that hold a packed copy (`cpu_linear`) of a weight parameter which at least one other layer holds too."""
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel():
            owners.setdefault(id(weight), []).append(layer)
    return [layer for layers in owners.values() if len(layers) > 1 for layer in layers if hasattr(layer, "cpu_linear")]
