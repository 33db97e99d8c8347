"""Mixture of experts: router, experts in every container that Megatron has, shared experts.

Containers (megatron/core/transformer/moe/experts.py), all with experts numbered from 0 on each rank:

| class | names below `mlp.experts.` |
|---|---|
| `SequentialMLP` | `local_experts.{i}.linear_fc1.weight` (2·ffn, hidden), `local_experts.{i}.linear_fc2.weight` (hidden, ffn) |
| `TEGroupedMLP` | `linear_fc1.weight{i}`, `linear_fc2.weight{i}`: the same shapes |
| `GroupedMLP` | `weight1`, `weight2`: all experts in one tensor each, transposed; `staged_sync.megatron.experts` takes it apart |
"""

from __future__ import annotations

from dataclasses import replace

from staged_sync.megatron.families.common import Rule
from staged_sync.megatron.families.decoder import gated_mlp, layer_rule
from staged_sync.megatron.families.layouts import GATED

ROUTER = (layer_rule("mlp.router.weight", ["mlp.gate.weight"], ["experts", "hidden"]),)

NO_EXPERT_BIAS = {"moe_router_enable_expert_bias": False}
"""For families whose checkpoints have none: an engine would route without the bias that the trainer routes with."""

EXPERT_BIAS = (layer_rule("mlp.router.expert_bias", ["mlp.gate.e_score_correction_bias"], ["experts"]),)
"""A persistent buffer in fp32 (`TopKRouter`, megatron/core/transformer/moe/router.py)."""

SHARED_EXPERTS = gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn")
"""`SharedExpertMLP`: cut over the dense tensor parallel group, so it is exported in the dense pass."""


def experts(gate: str = "mlp.experts.{expert}.gate_proj.weight", up: str = "mlp.experts.{expert}.up_proj.weight",
            down: str = "mlp.experts.{expert}.down_proj.weight") -> tuple[Rule, ...]:
    """Rules for the experts of a layer, in every container; HF names without the layer's prefix."""
    containers = (("local_experts.{expert}.linear_fc1.weight", "local_experts.{expert}.linear_fc2.weight"),
                  ("linear_fc1.weight{expert}", "linear_fc2.weight{expert}"),
                  ("weight1.{expert}", "weight2.{expert}"))
    rules = []
    for fc1, fc2 in containers:
        rules += [layer_rule(f"mlp.experts.{fc1}", [gate, up], ["2·expert_ffn", "hidden"], GATED),
                  layer_rule(f"mlp.experts.{fc2}", [down], ["hidden", "expert_ffn"])]
    return tuple(replace(rule, part="expert") for rule in rules)
