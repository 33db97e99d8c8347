"""The cutter's experts: router, shared experts and routed experts, in each of Megatron's containers.

Expert parallel rank r holds experts r·n … r·n + n - 1 and numbers them from 0 (`BaseMoELayer`,
megatron/core/transformer/moe/moe_layer.py). Inside an expert, gate and up, then the columns of down, are cut over the expert
tensor parallel ranks as those of an `MLP` are. `GroupedMLP` (megatron/core/transformer/moe/experts.py) holds them transposed:
weight1 is read as (n, hidden, 2·ffn), weight2 as (n, ffn, hidden).
"""

from __future__ import annotations

import torch

from harness.cutting import Container, Place, Tensors, cut

EXPERT_NAMES = {"mlp.experts": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe.experts": ("w1", "w3", "w2")}
"""Prefix in HF -> names of gate, up and down (Mixtral's are the second)."""


def full_mixture(of: Tensors) -> dict[str, torch.Tensor]:
    """Megatron name within the layer -> full tensor, of router and shared experts; empty where the layer has no experts."""
    router = of.get("mlp.gate.weight", of.get("block_sparse_moe.gate.weight"))
    if router is None:
        return {}
    full = {"mlp.router.weight": router}
    if "mlp.gate.e_score_correction_bias" in of:
        full["mlp.router.expert_bias"] = of["mlp.gate.e_score_correction_bias"]
    for shared in ("mlp.shared_expert", "mlp.shared_experts"):
        if f"{shared}.gate_proj.weight" in of:
            full["mlp.shared_experts.linear_fc1.weight"] = torch.cat(
                [of[f"{shared}.gate_proj.weight"], of[f"{shared}.up_proj.weight"]])
            full["mlp.shared_experts.linear_fc2.weight"] = of[f"{shared}.down_proj.weight"]
    if "mlp.shared_expert_gate.weight" in of:
        full["mlp.shared_experts.gate_weight"] = of["mlp.shared_expert_gate.weight"]
    return full


def expert_shards(of: Tensors, place: Place, container: Container) -> dict[str, torch.Tensor]:
    """Megatron name within the layer -> this rank's shard of the routed experts; empty where the layer has none."""
    prefix = next((prefix for prefix in EXPERT_NAMES if any(name.startswith(f"{prefix}.0.") for name in of)), None)
    if prefix is None:
        return {}
    count = 0
    while f"{prefix}.{count}.{EXPERT_NAMES[prefix][0]}.weight" in of:
        count += 1
    each = count // place.ep
    assert each * place.ep == count, f"{count} experts do not divide over {place.ep} ranks"
    mine = [_expert(of, f"{prefix}.{expert}", EXPERT_NAMES[prefix], place)
            for expert in range(place.ep_rank * each, place.ep_rank * each + each)]
    if container == "grouped":
        hidden = mine[0][1].shape[0]
        weight1 = torch.stack([fc1.t() for fc1, _ in mine])  # (n, hidden, 2·ffn)
        weight2 = torch.stack([fc2.t() for _, fc2 in mine])  # (n, ffn, hidden)
        return {"mlp.experts.weight1": weight1.reshape(hidden, -1), "mlp.experts.weight2": weight2.reshape(-1, hidden)}
    pattern = {"sequential": "mlp.experts.local_experts.{i}.{linear}.weight", "te": "mlp.experts.{linear}.weight{i}"}[container]
    return {pattern.format(i=i, linear=linear): shard for i, pair in enumerate(mine)
            for linear, shard in zip(("linear_fc1", "linear_fc2"), pair, strict=True)}


def _expert(of: Tensors, prefix: str, names: tuple[str, str, str], place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, down = (of[f"{prefix}.{name}.weight"] for name in names)
    fc1 = cut("linear_fc1.weight", torch.cat([gate, up]), tp=place.etp, tp_rank=place.etp_rank)
    return fc1, cut("linear_fc2.weight", down, tp=place.etp, tp_rank=place.etp_rank)
