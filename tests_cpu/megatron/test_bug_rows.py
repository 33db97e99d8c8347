"""Public bug reports about layers, shared tensors, shards, experts, names, dtypes and MTP: the smallest scenario of each row.

A test is named after its row (docs/bug-coverage.md has the table). Rows that need a mutant are in `test_mutations*.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.completeness import coverage_problems
from staged_sync.errors import ConfigurationError
from staged_sync.megatron import raw_export
from staged_sync.megatron.families import find_family
from staged_sync.megatron.families.decoder import DECODER
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

QWEN3 = hf_config("qwen3", num_layers=4, heads=4, groups=2)
MOE = hf_config("qwen3_moe", num_layers=2, heads=4, groups=2)
GLM = hf_config("glm4_moe", num_layers=3, heads=4, groups=2, num_nextn_predict_layers=1)
DEEPSEEK = hf_config("deepseek_v3", num_layers=2, heads=4, q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=6,
                     qk_rope_head_dim=8, v_head_dim=5, num_nextn_predict_layers=1)


def problems(folder: Path, at: World, change: Callable[[nn.Module], None] = lambda model: None, *, stage: int = 0,
             config: dict[str, Any] | None = None) -> list[str]:
    model = stage_model(checkpoint_tensors(at.config), at, stage=stage)
    change(model[0].module.module)
    return exporter(write_config(folder, config or dict(at.config)), model, RecordingSeam(at, stage=stage)).problems()


def exact(folder: Path, at: World) -> bool:
    return differences(export_world(folder, at), checkpoint_tensors(at.config)) == []


# --- LAYER --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("at", [world(QWEN3, pp=2), world(QWEN3, pp=4), world(QWEN3, pp=3),
                                World(QWEN3, 1, [[range(1), range(1, 2)], [range(2, 3), range(3, 4)]])],
                         ids=["pp2", "pp4", "uneven pp3", "pp2·vpp2"])
def test_b111_layers_have_global_numbers_on_every_stage(at: World, tmp_path: Path) -> None:
    assert exact(tmp_path, at)


def test_b112_numbers_come_from_the_layers_and_are_not_computed(tmp_path: Path) -> None:
    """No arithmetic gives this order, and none is asked: what the modules say is what is sent."""
    at = World(QWEN3, 1, [[range(3, 4), range(1)], [range(1, 3), range(0)]])
    stages = export_world(tmp_path, at)
    assert differences(stages, checkpoint_tensors(QWEN3)) == []
    layers = [[int(number) for name, _ in stage.tensors for number in re.findall(r"layers\.(\d+)\.input_layernorm", name)]
              for stage in stages]
    assert layers == [[3, 1, 2], [0]]


@pytest.mark.parametrize("model_type", ["nemotron_h", "jamba", "qwen3_next"], ids=["b113", "b113-mamba", "b128"])
def test_b113_b128_hybrid_and_gated_delta_net_families_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (said,) = problems(tmp_path, world(QWEN3), config=QWEN3 | {"model_type": model_type})
    assert f"no model family for model_type '{model_type}'" in said


def test_b114_layers_that_megatron_has_not_built_are_missing_by_name(tmp_path: Path) -> None:
    hf = checkpoint_tensors(QWEN3)
    short = replace(world(QWEN3, pp=2), ranges=[[range(2), range(2, 3)]])
    stages = export_world(tmp_path, short, hf=hf)
    missing = coverage_problems([stage.described for stage in stages], header(hf))
    assert len(missing) == 11
    assert all(line.startswith("missing: model.layers.3.") for line in missing)


@pytest.mark.parametrize("layout", ["Ettt|tL", [["embedding", "decoder"], ["decoder", "loss"]], SimpleNamespace(layout=None)],
                         ids=["string", "list", "object"])
def test_b116_the_layout_s_form_is_not_looked_at(layout: Any, tmp_path: Path) -> None:
    """A string, a list, an object that has lost its content: layers are found where they are."""
    at = replace(world(QWEN3, pp=2), fields={"pipeline_model_parallel_layout": layout})
    assert exact(tmp_path, at)


def test_b117_a_parameter_without_a_counterpart_on_a_later_stage_is_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.decoder.layers.get_submodule("0").gate = nn.Parameter(torch.ones(3))

    assert problems(tmp_path, world(QWEN3, pp=2), change) != []
    (said,) = problems(tmp_path, world(QWEN3, pp=2), change, stage=1)
    assert said.startswith("family qwen3 has no rule for the Megatron parameters decoder.layers.{2}.gate;")


def test_b118_three_updates_with_storages_that_come_and_go_are_exact(tmp_path: Path) -> None:
    """Offload and onload replace every storage between updates; nothing is remembered by address."""
    at, steps = world(MOE), [checkpoint_tensors(MOE, step=step) for step in range(3)]
    model = stage_model(steps[0], at)
    export = exporter(write_config(tmp_path, MOE), model, RecordingSeam(at), header(steps[0]))
    for hf in steps:
        fresh = dict(stage_model(hf, at)[0].named_parameters())
        for name, parameter in model[0].named_parameters():
            parameter.data = parameter.data.new_empty(0)
            parameter.data = fresh[name].data.clone()
        sent = dict(run(export))
        assert sent.keys() == hf.keys()
        assert [name for name, tensor in hf.items() if not torch.equal(sent[name], tensor)] == []


# --- SHARED -------------------------------------------------------------------------------------------------------------

def test_b119_tied_embeddings_in_virtual_chunks_come_once_from_the_first(tmp_path: Path) -> None:
    tied = hf_config("qwen3", tied=True, num_layers=4)
    at = World(tied, 2, [[range(1), range(1, 2)], [range(2, 3), range(3, 4)]])
    stages = export_world(tmp_path, at)
    assert differences(stages, checkpoint_tensors(tied)) == []
    assert [[name for name, _ in stage.tensors if "embed" in name or "head" in name] for stage in stages] == [
        ["model.embed_tokens.weight"], []]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("model", ["qwen3", "glm4_moe", "mixtral"])
def test_b121_the_checkpoint_decides_whether_a_tied_head_is_sent(model: Any, named: bool, tmp_path: Path) -> None:
    tied = hf_config(model, tied=True, num_layers=2)
    hf = checkpoint_tensors(tied)
    if named:
        hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    assert differences(export_world(tmp_path, world(tied, pp=2), hf=hf), hf) == []


@pytest.mark.parametrize("pp", [1, 2])
def test_b123_unequal_copies_of_the_embedding_do_not_matter(pp: int, tmp_path: Path) -> None:
    """MTP keeps a copy on the last stage. The first stage's is canonical, whatever has happened to the other."""
    at, hf = world(GLM, pp=pp), checkpoint_tensors(GLM)
    args, sent = write_config(tmp_path, GLM), []
    for stage in range(pp):
        model = stage_model(hf, at, stage=stage)
        if stage:
            model[0].module.module.embedding.word_embeddings.weight.data.fill_(777)
        sent += list(run(exporter(args, model, RecordingSeam(at, stage=stage), header(hf))))
    assert len(sent) == len(hf)
    assert [name for name, tensor in sent if not torch.equal(tensor, hf[name])] == []


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_b124_padding_rows_are_cut_from_embedding_head_and_their_copies(tp: int, tied: bool, tmp_path: Path) -> None:
    config = GLM | {"vocab_size": 151, "tie_word_embeddings": tied}
    at = world(config, tp=tp, pp=2, padded_vocab=256)
    stages = export_world(tmp_path, at)
    assert differences(stages, checkpoint_tensors(config)) == []
    rows = {name: len(tensor) for stage in stages for name, tensor in stage.tensors if "embed" in name or "head.w" in name}
    assert len(rows) >= 3 and set(rows.values()) == {151}


# --- SHARD --------------------------------------------------------------------------------------------------------------

def test_b126_interleaved_halves_of_fc1_are_refused(tmp_path: Path) -> None:
    at = replace(world(MOE), fields={"moe_mlp_glu_interleave_size": 32})
    assert problems(tmp_path, at) == [
        "the model's config has moe_mlp_glu_interleave_size=32, but this family's weights are laid out for "
        "moe_mlp_glu_interleave_size=None; exporting them would be silently wrong"]


def test_b127_gate_and_up_are_told_apart_by_their_rows(tmp_path: Path) -> None:
    """Rows that say who they are: gate 0…, up 1000…; over 4 ranks and back."""
    hf = checkpoint_tensors(QWEN3, dtype=torch.float32)
    for layer in range(4):
        for part, first in (("gate", 0), ("up", 1000)):
            rows = torch.arange(first, first + 176, dtype=torch.float32)
            hf[f"model.layers.{layer}.mlp.{part}_proj.weight"] = rows[:, None].expand(-1, 96).contiguous()
    (stage,) = export_world(tmp_path, world(QWEN3, tp=4), hf=hf)
    sent = dict(stage.tensors)
    assert sent["model.layers.3.mlp.gate_proj.weight"][:, 0].tolist() == list(range(176))
    assert sent["model.layers.3.mlp.up_proj.weight"][:, 95].tolist() == list(range(1000, 1176))


def test_b129_renamed_projections_are_all_named_at_once(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        for layer in model.decoder.layers.children():
            layer.self_attention.linear_qgkv = layer.self_attention._modules.pop("linear_qkv")

    found = problems(tmp_path, replace(world(QWEN3), fields={"attention_output_gate": True}), change)
    assert found[0].startswith("family qwen3 has no rule for the Megatron parameters "
                               "decoder.layers.{0,1,2,3}.self_attention.linear_qgkv.weight;")
    assert "attention_output_gate=True" in found[1]


# --- MOE ----------------------------------------------------------------------------------------------------------------

def test_b136_experts_that_a_receiver_needs_in_one_call_are_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family for fused loaders declares its experts `together`; the smallest bucket size does not split them, nor do ranks."""
    def fused(model_type: str | None) -> Any:
        family = find_family(model_type)
        return replace(family, rules=tuple(replace(rule, together="experts") if rule.part == "expert" else rule
                                           for rule in family.rules))
    monkeypatch.setattr(raw_export, "find_family", fused)
    at = world(MOE, ep=2, dp=2, args={"update_weight_buffer_size": 1})
    (stage,) = export_world(tmp_path, at)
    assert differences([stage], checkpoint_tensors(MOE)) == []
    units = [unit for unit in stage.units if any(".experts." in name for name in unit)]
    assert [len(unit) for unit in units] == [8 * 3, 8 * 3]
    assert all(len({name.split(".experts.")[0] for name in unit}) == 1 for unit in units)


# --- NAME ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe", "llava"])
def test_b138_a_multimodal_model_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (said,) = problems(tmp_path, world(QWEN3), config=QWEN3 | {"model_type": model_type})
    assert f"no model family for model_type {model_type!r}" in said


def test_b139_tensors_that_match_no_rule_are_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """112 of 113 tensors without a rule: an error with every name, and no stream at all."""
    monkeypatch.setattr(raw_export, "find_family", lambda model_type: replace(find_family(model_type), rules=DECODER[:1]))
    at = world(QWEN3)
    export = exporter(write_config(tmp_path, QWEN3), stage_model(checkpoint_tensors(QWEN3), at), RecordingSeam(at))
    (said,) = export.problems()
    assert said.count("decoder.layers.{0,1,2,3}.") == 8
    with pytest.raises(ConfigurationError):
        export.describe()


def test_b140_a_checkpoint_with_another_prefix_is_refused_with_both_names(tmp_path: Path) -> None:
    hf = checkpoint_tensors(QWEN3)
    (stage,) = export_world(tmp_path, world(QWEN3), hf=hf)
    index = header({name.replace("model.", "language_model.model.", 1): tensor for name, tensor in hf.items()})
    found = coverage_problems([stage.described], index)
    assert any(line.startswith("missing: language_model.model.norm.weight") for line in found)
    assert any(line.startswith("extra: stage 0 sends model.norm.weight") for line in found)


def test_b142_a_replicated_parameter_has_one_owner(tmp_path: Path) -> None:
    """A rank whose replica has drifted away changes nothing: the source's goes out, once."""
    at, hf = world(QWEN3, tp=2), checkpoint_tensors(QWEN3)
    drifted = stage_model(hf, at, rank=1)
    drifted[0].module.module.decoder.final_layernorm.weight.data.fill_(777)
    seam = RecordingSeam(at, rank=1)
    export = exporter(write_config(tmp_path, QWEN3), drifted, seam)
    for unit in export.units("dense"):
        export.gather(unit, timeout_s=7)
    assert not any(tensor.eq(777).all() for tensor in seam.sent)
    stage = export_stage(tmp_path, hf, at, 0, header(hf))
    assert [name for name, _ in stage.tensors].count("model.norm.weight") == 1
    assert differences([stage], hf) == []


# --- DTYPE --------------------------------------------------------------------------------------------------------------

def test_b143_router_biases_that_bfloat16_would_merge_arrive_apart(tmp_path: Path) -> None:
    hf = checkpoint_tensors(GLM)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    hf[name] = torch.tensor([6.8171, 6.8173, 6.8175, 6.8177, 6.8179, 6.8181, 6.8183, 6.8185])
    assert len(set(hf[name].bfloat16().tolist())) == 1, "bf16 would not merge these"
    (stage,) = export_world(tmp_path, world(GLM, tp=2, ep=2), hf=hf)
    sent = dict(stage.tensors)[name]
    assert sent.dtype == torch.float32
    assert sent.tolist() == hf[name].tolist()


# --- MTP ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm4_moe", "deepseek_v3"])
def test_b153_layers_that_predict_more_tokens_are_announced_and_sent(config: dict[str, Any], tmp_path: Path) -> None:
    layer = f"model.layers.{config['num_hidden_layers']}."
    stages = export_world(tmp_path, world(config, pp=2))
    own = [[name for name, _ in stage.tensors if name.startswith(layer)] for stage in stages]
    assert own[0] == [f"{layer}embed_tokens.weight"]
    assert {f"{layer}{name}" for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
                                          "shared_head.head.weight", "self_attn.o_proj.weight")} <= set(own[1])
    assert differences(stages, checkpoint_tensors(config)) == []


def test_b153_a_checkpoint_may_have_layers_that_the_trainer_has_not(tmp_path: Path) -> None:
    """Declared by the family: what Megatron does not train (mtp_num_layers unset) may stay. Once it trains it, it must come."""
    at = replace(world(GLM | {"num_nextn_predict_layers": 0}), config=GLM | {"num_nextn_predict_layers": 0})
    hf = checkpoint_tensors(GLM)
    idle = exporter(write_config(tmp_path, GLM), stage_model(hf, at), RecordingSeam(at), header(hf))
    training = exporter(write_config(tmp_path, GLM), stage_model(hf, world(GLM)), RecordingSeam(world(GLM)), header(hf))
    assert coverage_problems([idle.describe()], header(hf), idle.optional) == []
    assert any(line.startswith("missing: model.layers.3.eh_proj.weight") for line in coverage_problems(
        [idle.describe()], header(hf), training.optional))
    assert not idle.optional("model.layers.2.eh_proj.weight")


def test_b153_a_dense_family_has_no_layers_that_may_be_missing(tmp_path: Path) -> None:
    at = world(QWEN3)
    export = exporter(write_config(tmp_path, QWEN3), stage_model(checkpoint_tensors(QWEN3), at), RecordingSeam(at))
    assert not export.optional("model.layers.4.self_attn.o_proj.weight")
