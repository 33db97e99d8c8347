"""What cannot be exported is said at connect, all at once, in sentences that name the parameter and the two values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.completeness import coverage_problems
from staged_sync.errors import ConfigurationError, GatherError
from staged_sync.megatron.families import FAMILIES, UnknownFamily, find_family
from tests_cpu.megatron.fakes import (
    RecordingSeam,
    World,
    exporter,
    header,
    megatron_config,
    stage_model,
    world,
    write_config,
)

CONFIG = hf_config("qwen3", num_layers=3)
KNOWN = ("deepseek_v3", "glm4_moe", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def problems(folder: Path, at: World | None = None, *, change: Callable[[nn.Module], None] = lambda model: None,
             args: Any = None, stage: int = 0) -> list[str]:
    """What the exporter of one stage says about its model after `change`."""
    at = at or world(CONFIG, tp=2)
    model = stage_model(checkpoint_tensors(at.config), at, stage=stage)
    change(model[0].module.module)
    args = args or write_config(folder, at.config)
    return exporter(args, model, RecordingSeam(at, stage=stage)).problems()


def layer(model: nn.Module, local: int) -> nn.Module:
    return model.get_submodule(f"decoder.layers.{local}")


def test_a_sound_model_has_no_problems(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


def test_unknown_parameters_are_listed_all_at_once_with_global_layers(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        for local in (0, 1):
            layer(model, local).mlp.linear_fc2.bias = nn.Parameter(torch.ones(3))
        model.decoder.adapter = nn.Parameter(torch.ones(3))

    found = problems(tmp_path, world(CONFIG, pp=2), change=change, stage=1)
    assert found == ["family qwen3 has no rule for the Megatron parameters decoder.adapter, "
                     "decoder.layers.{1,2}.mlp.linear_fc2.bias; see docs/adding-a-model-family.md"]


def test_units_of_a_model_with_unknown_parameters_raise_the_same_sentences(tmp_path: Path) -> None:
    at = world(CONFIG)
    model = stage_model(checkpoint_tensors(CONFIG), at)
    model[0].module.module.decoder.adapter = nn.Parameter(torch.ones(3))
    export = exporter(write_config(tmp_path, CONFIG), model, RecordingSeam(at))
    with pytest.raises(ConfigurationError, match=r"decoder\.adapter") as raised:
        export.units("dense")
    assert raised.value.problems == export.problems()


def test_offloaded_parameters_are_listed_all_at_once(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        for parameter in layer(model, 2).mlp.parameters():
            parameter.data = parameter.data.new_empty(0)

    assert problems(tmp_path, change=change) == [
        "parameters without storage (offloaded?): decoder.layers.{2}.mlp.linear_fc1.weight, "
        "decoder.layers.{2}.mlp.linear_fc2.weight. Load the model back to the device before weights are synchronised"]


def test_a_parameter_offloaded_after_connect_fails_its_gather_by_name(tmp_path: Path) -> None:
    at = world(CONFIG, tp=2)
    model = stage_model(checkpoint_tensors(CONFIG), at)
    seam = RecordingSeam(at)
    unit = exporter(write_config(tmp_path, CONFIG), model, seam).units("dense")[0]
    unit.pieces[0].parameter.data = unit.pieces[0].parameter.data.new_empty(0)
    export = exporter(write_config(tmp_path, CONFIG), model, seam)
    with pytest.raises(GatherError, match=r"embedding\.word_embeddings\.weight has no storage on this rank .*Load the model"):
        export.gather(unit, timeout_s=7)
    assert seam.sent == []


def test_an_unknown_family_is_named_with_the_known_ones(tmp_path: Path) -> None:
    found = problems(tmp_path, args=write_config(tmp_path, CONFIG | {"model_type": "mamba"}))
    assert found == [f"model 'tiny': no model family for model_type 'mamba' in config.json; known: {', '.join(KNOWN)}. "
                     f"See docs/adding-a-model-family.md"]


def test_the_registry_knows_each_family_by_its_model_type() -> None:
    assert {name: find_family(name) for name in KNOWN} == FAMILIES
    with pytest.raises(UnknownFamily, match=f"model_type None.*known: {', '.join(KNOWN)}"):
        find_family(None)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    assert "args.hf_checkpoint must name the HF checkpoint" in problems(tmp_path, args=SimpleNamespace())[0]
    (said,) = problems(tmp_path, args=SimpleNamespace(hf_checkpoint=str(tmp_path / "nowhere"), vocab_size=251))
    assert str(tmp_path / "nowhere" / "config.json") in said
    assert "FileNotFoundError" in said


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    args = write_config(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in problems(tmp_path, args=args)[0]


def test_sizes_that_differ_between_model_and_args_are_listed(tmp_path: Path) -> None:
    args = write_config(tmp_path, CONFIG)
    args.num_query_groups, args.kv_channels, args.hidden_size = 6, 32, 64
    assert problems(tmp_path, args=args) == [
        "hidden_size must be the same in the model's config and in args (got 96 and 64): the layout of the weights depends "
        "on it",
        "num_query_groups must be the same in the model's config and in args (got 2 and 6): the layout of the weights "
        "depends on it"]


def test_megatrons_unused_default_of_query_groups_is_no_contradiction(tmp_path: Path) -> None:
    mha = hf_config("llama", heads=4, groups=4, num_layers=1)
    args = write_config(tmp_path, mha)
    args.num_attention_heads, args.num_query_groups, args.group_query_attention = 4, 1, False
    assert problems(tmp_path, world(mha, tp=2), args=args) == []


def test_args_stand_in_where_the_model_has_no_config(tmp_path: Path) -> None:
    args = write_config(tmp_path, CONFIG)
    for name, value in vars(megatron_config(CONFIG)).items():
        setattr(args, name, value)

    def change(model: nn.Module) -> None:
        del model.config

    assert problems(tmp_path, args=args, change=change) == []


def test_sizes_that_nobody_knows_are_listed(tmp_path: Path) -> None:
    at = world(CONFIG, fields={"kv_channels": None, "ffn_hidden_size": None})
    assert problems(tmp_path, at) == ["ffn_hidden_size is unknown: neither the model's config nor args has it",
                                      "kv_channels is unknown: neither the model's config nor args has it"]


def test_a_sharded_parameter_without_partition_attributes_is_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        del layer(model, 1).mlp.linear_fc2.weight.tensor_model_parallel

    assert problems(tmp_path, change=change) == [
        "decoder.layers.1.mlp.linear_fc2.weight is [96, 88] here, whole on this rank (one rank, or not marked "
        "tensor_model_parallel), so [96, 88] in full; the configuration says [96, 176] (hidden, ffn)"]


def test_a_parameter_marked_sharded_that_is_whole_is_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        norm = model.decoder.final_layernorm.weight
        norm.tensor_model_parallel, norm.partition_dim, norm.partition_stride = True, 0, 1

    assert problems(tmp_path, change=change) == [
        "decoder.final_layernorm.weight is [96] here, cut along dimension 0 over 2 tp ranks, so [192] in full; the "
        "configuration says [96] (hidden)"]


@pytest.mark.parametrize("dim", [None, -1, 2])
def test_a_partition_dimension_that_is_none_is_named(tmp_path: Path, dim: int | None) -> None:
    def change(model: nn.Module) -> None:
        model.output_layer.weight.partition_dim = dim

    assert problems(tmp_path, change=change) == [
        f"output_layer.weight is marked tensor_model_parallel with partition_dim {dim}, which is not one of its 2 dimensions"]


def test_an_interleaving_that_the_layout_does_not_have_is_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        layer(model, 0).self_attention.linear_qkv.weight.partition_stride = 3

    assert problems(tmp_path, change=change) == [
        "decoder.layers.0.self_attention.linear_qkv.weight has partition_stride 3, but its layout gives each rank 1 block(s)"]


def test_gated_fc1_may_be_marked_with_stride_1_as_before_megatron_core_0_16(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        layer(model, 0).mlp.linear_fc1.weight.partition_stride = 1

    assert problems(tmp_path, change=change) == []


def test_a_vocabulary_that_is_smaller_than_the_checkpoints_is_named(tmp_path: Path) -> None:
    found = problems(tmp_path, args=write_config(tmp_path, CONFIG | {"vocab_size": 300}))
    assert [line.split(" is ")[0] for line in found] == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert "so [252, 96] in full; the configuration says [300, 96] (vocabulary, hidden)" in found[0]


@pytest.mark.parametrize(("name", "value", "needed"), [
    ("gated_linear_unit", False, True), ("layernorm_zero_centered_gamma", True, False),
    ("attention_output_gate", True, False), ("normalization", "LayerNorm", "RMSNorm"),
])
def test_settings_that_change_what_weights_mean_are_refused(tmp_path: Path, name: str, value: Any, needed: Any) -> None:
    assert problems(tmp_path, world(CONFIG, fields={name: value})) == [
        f"the model's config has {name}={value!r}, but this family's weights are laid out for {name}={needed!r}; exporting "
        f"them would be silently wrong"]


def test_layers_without_a_number_are_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        del layer(model, 0).layer_number
        del layer(model, 2).layer_number

    assert problems(tmp_path, change=change) == [
        "chunk 0: cannot tell the global layer numbers of decoder.layers.0, decoder.layers.2: these modules have no "
        "layer_number, which Megatron's TransformerLayer has"]


def test_two_layers_with_one_number_are_named(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        layer(model, 2).layer_number = 2

    (said,) = problems(tmp_path, change=change)
    assert said.startswith("several modules of this rank claim to be ")
    assert "decoder.layers.{1}.mlp.linear_fc1.weight" in said


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_ties_what_the_checkpoint_does_not_is_refused(tmp_path: Path, tied: bool) -> None:
    args = write_config(tmp_path, CONFIG | {"tie_word_embeddings": not tied})
    found = problems(tmp_path, world(CONFIG | {"tie_word_embeddings": tied}), args=args)
    assert found == [f"config.json has tie_word_embeddings={not tied}, but the Megatron model has "
                     f"share_embeddings_and_output_weights={tied}: engine and trainer would not be the same model"]


def test_problems_of_different_kinds_come_together(tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.decoder.adapter = nn.Parameter(torch.ones(3))
        model.decoder.final_layernorm.weight.data = torch.empty(0)

    at = world(CONFIG, fields={"gated_linear_unit": False})
    found = problems(tmp_path, at, change=change)
    assert [next(word for word in ("storage", "rule", "gated") if word in line) for line in found] == [
        "storage", "rule", "gated"]


# --- how many layers ----------------------------------------------------------------------------------------------------

GLM = hf_config("glm4_moe", num_layers=3, heads=4, groups=2, num_nextn_predict_layers=1)
DEEPSEEK = hf_config("deepseek_v3", num_layers=3, heads=4, q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=6,
                     qk_rope_head_dim=8, v_head_dim=5, num_nextn_predict_layers=1)
FOUR_LAYERS = {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
"""A trainer that has the checkpoint's layer 3, which predicts more tokens, as one more layer of the decoder."""


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("told", ["config", "args"])
def test_a_decoder_of_another_number_of_layers_is_refused(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    at = world(config | FOUR_LAYERS, fields={"num_layers": None} if told == "args" else {})
    args = write_config(tmp_path, config)
    args.num_layers = 4
    model = stage_model(checkpoint_tensors(config), at)
    assert exporter(args, model, RecordingSeam(at)).problems() == [
        "num_layers must be config.json's num_hidden_layers, without layers that predict more tokens (got 4 and 3): HF numbers "
        "those on after the decoder's, so that one would be sent as the other",
        "config.json has num_hidden_layers=3, but the Megatron model has decoder layers beyond (numbered from 0): "
        "decoder.layers.{3}; engine and trainer would not be the same model"]


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm4_moe", "deepseek_v3"])
def test_a_decoder_layer_beyond_the_checkpoint_s_is_refused_where_nobody_says_how_many_there_are(
        tmp_path: Path, config: dict[str, Any]) -> None:
    layers = [[range(2), range(2, 3)], [range(3, 3), range(3, 4)]]  # the last stage's second virtual chunk has it
    at = World(config | FOUR_LAYERS, 1, layers, fields={"num_layers": None})
    model = stage_model(checkpoint_tensors(config), at, stage=1)
    (said,) = exporter(write_config(tmp_path, config), model, RecordingSeam(at, stage=1)).problems()
    assert "beyond (numbered from 0): decoder.layers.{3};" in said


def test_layers_of_config_and_args_must_be_the_same(tmp_path: Path) -> None:
    args = write_config(tmp_path, CONFIG)
    args.num_layers = 4
    assert problems(tmp_path, args=args) == [
        "num_layers must be the same in the model's config and in args (got 3 and 4): the layout of the weights depends on it"]


LEGAL = {
    "trained": (world(GLM, pp=2), GLM),
    "not trained": (world(GLM | {"num_nextn_predict_layers": 0}, pp=2), GLM),
    "uneven": (World(GLM, 1, [[range(1), range(1, 3)]]), GLM),
    "virtual": (World(GLM, 1, [[range(1), range(1, 2)], [range(2, 3), range(3, 3)]]), GLM),
    "unknown": (world(GLM, fields={"num_layers": None}), GLM),
    "tied": (world(CONFIG | {"tie_word_embeddings": True}, pp=2), CONFIG | {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize(("at", "config"), LEGAL.values(), ids=LEGAL)
def test_as_many_layers_as_the_checkpoint_are_fine_however_they_are_spread(
        tmp_path: Path, at: World, config: dict[str, Any]) -> None:
    tensors = checkpoint_tensors(config)
    named, args = header(tensors), write_config(tmp_path, config)
    exports = [exporter(args, stage_model(tensors, at, stage=stage), RecordingSeam(at, stage=stage), named)
               for stage in range(at.pp)]
    assert [export.problems() for export in exports] == [[]] * at.pp
    assert coverage_problems([export.describe() for export in exports], named, exports[0].optional) == []


def test_a_layer_that_predicts_more_tokens_is_sent_whole_or_not_at_all(tmp_path: Path) -> None:
    """A trainer that has the layer and does not say so: the copies of embedding and head would stay what they were."""
    at = world(GLM, fields={"mtp_num_layers": None})
    tensors = checkpoint_tensors(GLM)
    export = exporter(write_config(tmp_path, GLM), stage_model(tensors, at), RecordingSeam(at), header(tensors))
    assert export.problems() == []
    assert coverage_problems([export.describe()], header(tensors), export.optional) == [
        f"partly: of model.layers.3 some tensors are sent, but nobody sends {name} {list(tensors[name].shape)} bfloat16"
        for name in tensors if name in ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")]
