"""The harness's own checkpoints and cutter: made so that mistakes show."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from harness.checkpoints import (
    Family,
    checkpoint_tensors,
    config_only_copy,
    hf_config,
    make_checkpoint,
    read_checkpoint,
    read_config,
    tensor_shapes,
)
from harness.cutter import full_layer, padded_vocab_size, shard_tensors, stage_layers
from harness.cutting import Place, cut

FAMILIES = ["qwen3", "qwen2", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_tensors_of_a_layer_can_be_taken_for_each_other(family: Family) -> None:
    tensors = checkpoint_tensors(hf_config(family))
    assert len({tuple(tensor.flatten()[:32].tolist()) for tensor in tensors.values()}) == len(tensors)


def test_every_dimension_differs_from_every_other() -> None:
    for config in (hf_config("qwen3"), hf_config("llama")):
        sizes = {size for shape in tensor_shapes(config).values() for size in shape}
        queries, keys = 6 * 32, 2 * 32
        assert sizes - {32} == {251, 96, queries, keys, 176}
        assert len({251, 96, queries, keys, 176, queries + 2 * keys, 2 * 176, 32}) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_biases_are_neither_ones_nor_zeros(family: Family) -> None:
    for name, tensor in checkpoint_tensors(hf_config(family)).items():
        if tensor.dim() == 1:
            assert len(tensor.unique()) > len(tensor) // 3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_every_matrix_is_unique(family: Family) -> None:
    for name, tensor in checkpoint_tensors(hf_config(family)).items():
        if tensor.dim() == 2:
            assert len(tensor.unique(dim=0)) == len(tensor), name


def test_a_step_changes_every_tensor_and_a_repetition_none() -> None:
    config = hf_config("qwen2")
    first, again, second = (checkpoint_tensors(config, step=step) for step in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_values_are_the_same_on_every_machine_and_in_every_process() -> None:
    tensor = checkpoint_tensors(hf_config("qwen3", num_layers=1))["model.layers.0.mlp.up_proj.weight"]
    digest = hashlib.sha256(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()[:16]
    assert digest == "b73e938071650156"


def test_a_sharded_checkpoint_holds_the_same_tensors_and_an_index_of_them(tmp_path: Path) -> None:
    single = read_checkpoint(make_checkpoint(tmp_path / "single", "qwen3", num_layers=1))
    folder = make_checkpoint(tmp_path / "sharded", "qwen3", num_layers=1, shards=3)
    sharded = read_checkpoint(folder)
    assert not (folder / "model.safetensors").exists()
    assert single.keys() == sharded.keys() and all(torch.equal(single[name], sharded[name]) for name in single)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == single.keys()
    assert set(index["weight_map"].values()) == {f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())


def test_a_tied_checkpoint_has_no_head(tmp_path: Path) -> None:
    tied = read_checkpoint(make_checkpoint(tmp_path / "tied", "llama", tied=True, num_layers=1))
    untied = read_checkpoint(make_checkpoint(tmp_path / "untied", "llama", num_layers=1))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert read_config(tmp_path / "tied")["tie_word_embeddings"] is True


def test_a_config_only_copy_has_no_weights(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "full", "qwen3", num_layers=1)
    copy = config_only_copy(source, tmp_path / "empty")
    assert [file.name for file in copy.iterdir()] == ["config.json"]
    assert read_config(copy) == read_config(source)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in"):
        read_checkpoint(copy)


def test_heads_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="heads=6, groups=4"):
        hf_config("qwen3", groups=4)


def test_qwen2_cannot_have_a_hidden_size_of_its_own() -> None:
    with pytest.raises(ValueError, match="qwen2 needs hidden_size = heads"):
        hf_config("qwen2", hidden_size=96)


# --- the cutter, against layouts written down by hand -------------------------------------------------------------------

def rows(*values: int) -> torch.Tensor:
    """One row per head or channel; its value says which."""
    return torch.tensor(values).unsqueeze(1)


def test_the_cutter_interleaves_query_groups_as_megatron_does() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4, "head_dim": 1}
    hf = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight",
                        "mlp.down_proj.weight"), rows(0)) | {
        "self_attn.q_proj.weight": rows(1, 2, 3, 4), "self_attn.k_proj.weight": rows(11, 12),
        "self_attn.v_proj.weight": rows(21, 22), "mlp.gate_proj.weight": rows(31, 32, 33, 34),
        "mlp.up_proj.weight": rows(41, 42, 43, 44)}
    full = full_layer({f"model.layers.3.{name}": tensor for name, tensor in hf.items()}, config, 3)
    qkv, fc1 = full["self_attention.linear_qkv.weight"], full["mlp.linear_fc1.weight"]
    assert qkv.flatten().tolist() == [1, 2, 11, 21, 3, 4, 12, 22]
    shards = [cut("mlp.linear_fc1.weight", fc1, tp=2, tp_rank=rank).flatten().tolist() for rank in range(2)]
    assert shards == [[31, 32, 41, 42], [33, 34, 43, 44]]
    shards = [cut("self_attention.linear_qkv.weight", qkv, tp=4, tp_rank=rank).flatten().tolist() for rank in range(4)]
    assert shards == [[1, 2], [11, 21], [3, 4], [12, 22]]
    square = torch.arange(4).view(2, 2)
    assert cut("mlp.linear_fc2.weight", square, tp=2, tp_rank=1).tolist() == [[1], [3]]
    assert cut("output_layer.weight", square, tp=2, tp_rank=1).tolist() == [[2, 3]]
    assert cut("input_layernorm.weight", square, tp=2, tp_rank=1).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("layers", "pp", "expected"), [
    (5, 1, [[0, 1, 2, 3, 4]]), (5, 2, [[0, 1], [2, 3, 4]]), (4, 2, [[0, 1], [2, 3]]), (5, 4, [[0, 1], [2], [3], [4]]),
    (8, 3, [[0, 1], [2, 3, 4], [5, 6, 7]]),
])
def test_the_first_stage_takes_the_remainder(layers: int, pp: int, expected: list[list[int]]) -> None:
    assert [list(stage) for stage in stage_layers(layers, pp=pp)] == expected


@pytest.mark.parametrize(("vocab", "tp", "expected"), [(251, 1, 256), (251, 2, 256), (256, 2, 272), (7, 4, 32)])
def test_the_vocabulary_always_gets_padding_rows(vocab: int, tp: int, expected: int) -> None:
    assert padded_vocab_size(vocab, tp=tp) == expected


def test_a_tied_head_exists_only_on_a_last_stage_that_is_not_the_first() -> None:
    config = hf_config("llama", tied=True, num_layers=2)
    hf = checkpoint_tensors(config)
    def names(first: bool, last: bool) -> set[str]:
        shards = shard_tensors(hf, config, place=Place(), layers=[], first=first, last=last, padded_vocab=256)
        return set(shards)
    assert names(True, True) == {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    assert names(False, True) == {"output_layer.weight", "decoder.final_layernorm.weight"}
    assert names(False, False) == set()
