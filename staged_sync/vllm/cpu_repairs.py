"""What vLLM's CPU build (0.32.0) leaves stale after a weight update, or cannot update, put right around the session.

The CPU build packs a layer's weight for its matrix kernels when it is loaded (vllm/model_executor/layers/utils.py,
`dispatch_cpu_unquantized_gemm`) and computes with the packed copy. A layerwise reload packs again for the layers that a
checkpoint names. A tied `lm_head` is not named: it shares the embedding's parameter, keeps its own packed copy, and would go on
computing logits with the old weights, silently.

Experts are packed by the first load and never again (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py,
`_setup_kernel` packs only where it makes the kernel): an update leaves checkpoint-shaped bytes where the kernel reads packed
ones. They are packed at the same place, each time a layer has been loaded. Other expert kernels than the unquantised one are
refused, since nobody has looked at what they leave stale.

On processors with AMX, latent attention (vllm/model_executor/layers/attention/mla_attention.py, `MLAAttention`) keeps packed
copies of `kv_b_proj` and drops the weight itself, so that a reload has nowhere to put the new one and fails. It gets a place
again before every session; when the session is finished, vLLM packs and drops it as it did at the first load.
"""

from __future__ import annotations

from typing import Any

import torch

from staged_sync.errors import StagedSyncError, bullets


class Unrepaired(StagedSyncError):
    """This model would compute with stale weights after an update, silently, on vLLM's CPU build."""


def prepare(model: torch.nn.Module) -> None:
    """Once per engine, before its first session: expert layers pack again whenever they are reloaded. Raises `Unrepaired`,
    naming the layers, where nobody knows how to put a layer right."""
    experts = {name: layer for name, layer in model.named_modules()
               if hasattr(getattr(layer, "quant_method", None), "moe_kernel")}
    unknown = [f"{name} ({type(layer.quant_method).__name__})" for name, layer in experts.items()
               if type(layer.quant_method).__name__ != "UnquantizedFusedMoEMethod"]
    if unknown:
        raise Unrepaired(bullets("vLLM's CPU build does not pack these mixture-of-experts layers again after a weight update, so "
                                 "this engine would answer with garbage; only unquantised experts can be repaired:", unknown))
    for layer in experts.values():
        _pack_on_reload(layer.quant_method)


def _pack_on_reload(method: Any) -> None:
    stock = method.process_weights_after_loading

    def process(layer: torch.nn.Module) -> None:
        reloaded = method.moe_kernel is not None  # the first load makes the kernel, and packs
        stock(layer)
        if reloaded:
            pack_experts(layer)

    method.process_weights_after_loading = process


def pack_experts(layer: torch.nn.Module) -> None:
    """Pack the checkpoint-shaped weights that `layer` (vLLM's RoutedExperts) has just been loaded with. Once: packing twice
    would scramble them."""
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]


def make_room(model: torch.nn.Module) -> None:
    """Before a session: give every latent attention that has dropped its `kv_b_proj` weight a new one to load into. It holds
    NaN, so that a session that never brings it cannot pass unseen."""
    for layer in model.modules():
        if getattr(layer, "is_amx_bmm_enabled", False) and layer.kv_b_proj.weight.numel() == 0:
            linear = layer.kv_b_proj
            shape = (sum(linear.output_partition_sizes), linear.input_size_per_partition)
            linear.weight = torch.nn.Parameter(torch.full(shape, float("nan"), dtype=linear.params_dtype), requires_grad=False)


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
