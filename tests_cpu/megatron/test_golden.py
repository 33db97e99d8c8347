"""Golden test of a family: copy this file, and write down by hand what a tiny model is called on both sides.

The world is the smallest in which a name can be wrong: two stages, two expert parallel ranks, and the second stage looked at.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoints import checkpoint_tensors, hf_config
from tests_cpu.megatron.fakes import PARTS, RecordingSeam, exporter, header, stage_model, world, write_config

CONFIG = hf_config("qwen3_moe", num_layers=2, heads=4, groups=2, num_experts=4)

GOLDEN = {  # Megatron name on the second of two stages, with the global layer number -> HF names that come of it
    "decoder.layers.1.input_layernorm.weight": ["model.layers.1.input_layernorm.weight"],
    "decoder.layers.1.self_attention.linear_qkv.weight": ["model.layers.1.self_attn.q_proj.weight",
                                                          "model.layers.1.self_attn.k_proj.weight",
                                                          "model.layers.1.self_attn.v_proj.weight"],
    "decoder.layers.1.self_attention.linear_proj.weight": ["model.layers.1.self_attn.o_proj.weight"],
    "decoder.layers.1.self_attention.q_layernorm.weight": ["model.layers.1.self_attn.q_norm.weight"],
    "decoder.layers.1.self_attention.k_layernorm.weight": ["model.layers.1.self_attn.k_norm.weight"],
    "decoder.layers.1.pre_mlp_layernorm.weight": ["model.layers.1.post_attention_layernorm.weight"],
    "decoder.layers.1.mlp.router.weight": ["model.layers.1.mlp.gate.weight"],
    # The first local expert of each of the two expert parallel ranks, then the second.
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight": [
        "model.layers.1.mlp.experts.0.gate_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.2.gate_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"],
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": ["model.layers.1.mlp.experts.0.down_proj.weight",
                                                                       "model.layers.1.mlp.experts.2.down_proj.weight"],
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight": [
        "model.layers.1.mlp.experts.1.gate_proj.weight", "model.layers.1.mlp.experts.1.up_proj.weight",
        "model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"],
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": ["model.layers.1.mlp.experts.1.down_proj.weight",
                                                                       "model.layers.1.mlp.experts.3.down_proj.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    "output_layer.weight": ["lm_head.weight"],
}

SHAPES = {  # of the full HF tensors: heads 4 · 32, groups 2 · 32, hidden 96, expert ffn 64, vocabulary 251
    "self_attn.q_proj.weight": (128, 96), "self_attn.k_proj.weight": (64, 96), "self_attn.o_proj.weight": (96, 128),
    "self_attn.q_norm.weight": (32,), "mlp.gate.weight": (4, 96), "mlp.experts.3.gate_proj.weight": (64, 96),
    "mlp.experts.3.down_proj.weight": (96, 64), "post_attention_layernorm.weight": (96,),
}


@pytest.fixture
def hf_names(tmp_path: Path) -> dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]:
    """Megatron name -> name, dtype and shape of what its unit converts to."""
    at, hf = world(CONFIG, pp=2, ep=2, dp=2, args={"update_weight_buffer_size": 1}), checkpoint_tensors(CONFIG)
    args, seam = write_config(tmp_path, CONFIG, **at.args), RecordingSeam(at, stage=1)
    export = exporter(args, stage_model(hf, at, stage=1), seam, header(hf))
    assert export.problems() == []
    return {unit.label: [(name, tensor.dtype, tuple(tensor.shape))
                         for name, tensor in export.convert(unit, export.gather(unit, timeout_s=7))]
            for part in PARTS for unit in export.units(part)}


def test_megatron_names_become_hf_names(hf_names: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]) -> None:
    assert {label: [name for name, _, _ in tensors] for label, tensors in hf_names.items()} == GOLDEN


def test_hf_tensors_have_these_shapes(hf_names: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]) -> None:
    shapes = {name: shape for tensors in hf_names.values() for name, _, shape in tensors}
    assert {name: shapes[f"model.layers.1.{name}"] for name in SHAPES} == SHAPES
    assert shapes["lm_head.weight"] == (251, 96)
    assert {dtype for tensors in hf_names.values() for _, dtype, _ in tensors} == {torch.bfloat16}
