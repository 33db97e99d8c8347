"""What all stages export together is the HF checkpoint, bit for bit, whatever the layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoints import checkpoint_tensors, hf_config
from harness.model_shapes import HEAD_FROM_HIDDEN
from staged_sync.megatron.families import find_family
from staged_sync.megatron.families.common import expert_of
from tests_cpu.megatron.fakes import (
    RecordingSeam,
    World,
    differences,
    export_stage,
    export_world,
    exporter,
    header,
    run,
    stage_model,
    world,
    write_config,
)

DENSE = ["qwen3", "qwen2", "llama"]
MIXTURES = ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3"]

SMALL: dict[str, dict[str, Any]] = {  # every dimension cuts over 4 ranks
    "qwen3_moe": {"moe_intermediate_size": 8},
    "qwen2_moe": {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    "mixtral": {"intermediate_size": 8},
    "glm4_moe": {"moe_intermediate_size": 8},
    "deepseek_v3": {"moe_intermediate_size": 8, "q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 6,
                    "qk_rope_head_dim": 8, "v_head_dim": 5},
}
EXPERTS_FIELD = {"qwen3_moe": "num_experts", "qwen2_moe": "num_experts", "mixtral": "num_local_experts",
                 "glm4_moe": "n_routed_experts", "deepseek_v3": "n_routed_experts"}


def mixture(draw: st.DrawFn, family: str, ep: int) -> dict[str, Any]:
    """What the family's config.json says of its experts, and whether it predicts more tokens."""
    extra = SMALL[family] | {EXPERTS_FIELD[family]: ep * draw(st.integers(1, 3))}
    if family in ("glm4_moe", "deepseek_v3"):
        extra |= {"first_k_dense_replace": draw(st.integers(0, 2)), "num_nextn_predict_layers": draw(st.integers(0, 2))}
    elif family != "mixtral":
        extra |= {"mlp_only_layers": draw(st.lists(st.integers(0, 3), max_size=2))}
    if family == "deepseek_v3":
        extra |= {"q_lora_rank": draw(st.sampled_from([None, 20]))}
    return extra


def small_config(draw: st.DrawFn, family: str, **more: Any) -> dict[str, Any]:
    """Groups fewer than, as many as and more than 4 tensor parallel ranks, an odd vocabulary, few layers."""
    heads, groups = draw(st.sampled_from([(h, g) for h in (4, 8, 12) for g in (1, 2, 4, 8) if h % g == 0]))
    hidden = None if family in HEAD_FROM_HIDDEN else 24
    return hf_config(family, tied=draw(st.booleans()), vocab_size=draw(st.integers(3, 61)), heads=heads, groups=groups,
                     num_layers=draw(st.integers(1, 4)), hidden_size=hidden, **({"ffn_size": 20} | more))


def ranges(draw: st.DrawFn, layers: int) -> list[list[range]]:
    """By chunk and stage; uneven, also empty."""
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1  # Megatron has no virtual chunks on one stage
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    pieces = [range(low, high) for low, high in zip([0, *cuts], [*cuts, layers], strict=True)]
    return [pieces[chunk * pp:(chunk + 1) * pp] for chunk in range(vpp)]


@st.composite
def worlds(draw: st.DrawFn, families: list[str]) -> World:
    """Any of `families` on any legal layout, with any bucket size, from a model that holds some tensors in float32."""
    family, tp = draw(st.sampled_from(families)), draw(st.sampled_from([1, 2, 4]))
    etp, ep = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)] if family in MIXTURES else [(1, 1)]))
    config = small_config(draw, family, **(mixture(draw, family, ep) if family in MIXTURES else {}))
    return World(config, tp, ranges(draw, config["num_hidden_layers"]), ep=ep, etp=etp,
                 dp=etp * ep // math.gcd(tp, etp * ep) * draw(st.integers(1, 2) if etp * ep * tp <= 2 else st.just(1)),
                 names=draw(st.sampled_from(["local", "te"])), container=draw(st.sampled_from(["sequential", "te", "grouped"])),
                 padded_vocab=-(-config["vocab_size"] // tp) * tp + tp * draw(st.integers(0, 2)),
                 float32=draw(st.sampled_from(["-", "norm.weight", "weight"])),
                 args={"update_weight_buffer_size": draw(st.sampled_from([1, 3000, 1 << 14, 1 << 30]))})


def check_export(at: World, folder: Path) -> None:
    hf = checkpoint_tensors(at.config)
    stages = export_world(folder, at, hf=hf)
    assert differences(stages, hf) == []
    for stage in stages:
        assert [(m.name, m.dtype, m.shape) for m in stage.described] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stage.tensors]


@given(at=worlds(DENSE))
@settings(max_examples=25)
def test_stages_together_export_a_dense_checkpoint_bit_for_bit(at: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_export(at, tmp_path_factory.getbasetemp() / "hf")


@pytest.mark.parametrize("family", MIXTURES)
@given(data=st.data())
@settings(max_examples=12)
def test_stages_together_export_a_mixture_of_experts_bit_for_bit(family: str, data: st.DataObject,
                                                                 tmp_path_factory: pytest.TempPathFactory) -> None:
    check_export(data.draw(worlds([family])), tmp_path_factory.getbasetemp() / "hf")


@given(at=worlds(DENSE + MIXTURES))
@settings(max_examples=20)
def test_converting_to_hf_and_back_keeps_every_bit(at: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    hf = checkpoint_tensors(at.config)
    whole = World(at.config, 1, [[range(at.config["num_hidden_layers"])]], names=at.names, container=at.container)
    args = write_config(tmp_path_factory.getbasetemp() / "hf", at.config)
    export = exporter(args, stage_model(hf, whole), RecordingSeam(whole))
    family, sizes = find_family(at.config["model_type"]), export._sizes
    assert sizes is not None
    for unit in (*export.units("dense"), *export.units("expert")):
        for piece in unit.pieces:
            expert = expert_of(piece.name)
            true_rows = piece.parameter[:sizes.vocab_size] if "vocabulary" in piece.rule.shape else piece.parameter
            assert torch.equal(family.from_hf(piece.name, hf, sizes, expert=expert), true_rows), piece.name
            assert dict(family.to_hf(piece.name, piece.parameter, sizes, expert=expert)).keys() <= hf.keys()


def test_the_source_sends_in_the_order_of_the_model(tmp_path: Path) -> None:
    _, stage1 = export_world(tmp_path, world(hf_config("qwen2", num_layers=2), tp=2, pp=2))
    assert [name for name, _ in stage1.tensors] == [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_tied_embedding_is_sent_once_by_the_first_stage(tmp_path: Path, pp: int) -> None:
    stages = export_world(tmp_path, world(hf_config("qwen3", tied=True, num_layers=3), pp=pp))
    senders = [[name for name, _ in stage.tensors if "embed" in name or "head" in name] for stage in stages]
    assert senders == [["model.embed_tokens.weight"], *[[]] * (pp - 1)]


def test_a_copy_of_the_embedding_on_a_later_stage_is_not_sent(tmp_path: Path) -> None:
    at = world(hf_config("qwen3", num_layers=2), pp=2)
    hf = checkpoint_tensors(at.config)
    first, last = (stage_model(hf, at, stage=stage) for stage in range(2))
    last[0].module.module.add_module("embedding", first[0].module.module.embedding)  # as MTP keeps one
    args = write_config(tmp_path, at.config)
    names = [[name for name, _ in run(exporter(args, model, RecordingSeam(at, stage=stage)))]
             for stage, model in enumerate((first, last))]
    assert [names[stage].count("model.embed_tokens.weight") for stage in range(2)] == [1, 0]


def test_a_tied_head_is_sent_too_where_the_checkpoint_names_it(tmp_path: Path) -> None:
    at = world(hf_config("llama", tied=True, num_layers=2), tp=2, pp=2)
    hf = checkpoint_tensors(at.config)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    stages = export_world(tmp_path, at, hf=hf)
    assert differences(stages, hf) == []
    assert [name for name, _ in stages[0].tensors][:2] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_each_tensor_goes_out_in_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    at = world(hf_config("qwen3", num_layers=2), tp=2)
    hf = checkpoint_tensors(at.config, dtype=torch.bfloat16)
    hf["model.norm.weight"] = checkpoint_tensors(at.config, dtype=torch.float32)["model.norm.weight"]
    wide = {name: tensor.float() for name, tensor in hf.items()}
    stage = export_stage(tmp_path, wide, at, 0, header(hf))
    assert differences([stage], hf) == []
    assert {m.name for m in stage.described if m.dtype == torch.float32} == {"model.norm.weight"}
    assert hf["model.norm.weight"].bfloat16().float().ne(hf["model.norm.weight"]).any()


def test_without_a_checkpoint_header_every_tensor_keeps_its_parameters_dtype(tmp_path: Path) -> None:
    at = world(hf_config("llama", num_layers=1))
    hf = checkpoint_tensors(at.config)
    hf["model.layers.0.input_layernorm.weight"] = hf["model.layers.0.input_layernorm.weight"].float()
    assert differences([export_stage(tmp_path, hf, at, 0, None)], hf) == []


@pytest.mark.parametrize(("tp", "gathers"), [(1, 0), (2, 1 + 2 * 4 + 1)])
def test_only_what_is_cut_is_gathered_and_nothing_at_tp_1(tmp_path: Path, tp: int, gathers: int) -> None:
    (stage,) = export_world(tmp_path, world(hf_config("qwen3", num_layers=2), tp=tp))
    assert stage.groups == ["tp"] * gathers


def test_parameters_with_other_strides_are_gathered_by_value(tmp_path: Path) -> None:
    at = world(hf_config("llama", num_layers=1), tp=2, strided=True)
    assert differences(export_world(tmp_path, at), checkpoint_tensors(at.config)) == []


def test_a_second_update_sends_the_new_weights_and_replaced_parameters(tmp_path: Path) -> None:
    at = world(hf_config("qwen3", num_layers=2))
    old, new = (checkpoint_tensors(at.config, step=step) for step in (0, 1))
    model = stage_model(old, at)
    export = exporter(write_config(tmp_path, at.config), model, RecordingSeam(at), header(old))
    assert all(torch.equal(tensor, old[name]) for name, tensor in run(export))
    changed = {name: shard for chunk in stage_model(new, at) for name, shard in chunk.named_parameters()}
    for name, parameter in model[0].named_parameters():
        if parameter.dim() == 2:
            parameter.data.copy_(changed[name])                                        # updated in place
        else:
            path, leaf = name.rsplit(".", 1)
            model[0].get_submodule(path).register_parameter(leaf, changed[name])       # replaced by a new object
    assert all(torch.equal(tensor, new[name]) for name, tensor in run(export))


def test_buffers_are_not_exported(tmp_path: Path) -> None:
    at = world(hf_config("llama", num_layers=1))
    hf = checkpoint_tensors(at.config)
    model = stage_model(hf, at)
    model[0].module.module.decoder.register_buffer("_extra_state", torch.ones(3))
    export = exporter(write_config(tmp_path, at.config), model, RecordingSeam(at))
    assert export.problems() == []
    assert [name for name, _ in run(export)] == [meta.name for meta in export.describe()]
    assert {name for name, _ in run(export)} == hf.keys()


def test_a_dense_family_has_an_empty_expert_pass(tmp_path: Path) -> None:
    at = world(hf_config("qwen3", num_layers=1))
    model = stage_model(checkpoint_tensors(at.config), at)
    export = exporter(write_config(tmp_path, at.config), model, RecordingSeam(at))
    assert list(export.units("expert")) == []


def test_what_is_sent_together_is_of_one_layer(tmp_path: Path) -> None:
    """The decoder's first layer and the first one that predicts more tokens have the same number and live on one stage."""
    config = hf_config("deepseek_v3", num_layers=2, num_nextn_predict_layers=1, heads=4, **SMALL["deepseek_v3"])
    at = world(config)
    export = exporter(write_config(tmp_path, config), stage_model(checkpoint_tensors(config), at), RecordingSeam(at))
    together = [[piece.name for piece in unit.pieces] for unit in export.units("dense") if len(unit.pieces) > 1]
    assert together == [[f"{layer}.self_attention.linear_{latent}_down_proj.weight" for latent in ("q", "kv")] for layer in (
        "decoder.layers.0", "decoder.layers.1", "mtp.layers.0.transformer_layer")]


@pytest.mark.parametrize(("name", "tied", "optional"), [
    ("lm_head.weight", True, True),
    ("lm_head.weight", False, False),
    ("model.layers.3.self_attn.rotary_emb.inv_freq", False, True),
    ("model.layers.3.self_attn.q_proj.weight", True, False),
])
def test_only_tied_heads_and_rotary_buffers_are_optional(tmp_path: Path, name: str, tied: bool, optional: bool) -> None:
    config: dict[str, Any] = hf_config("qwen2", tied=tied, num_layers=1)
    at = world(config)
    model = stage_model(checkpoint_tensors(config), at)
    export = exporter(write_config(tmp_path, config), model, RecordingSeam(at))
    assert export.optional(name) is optional
