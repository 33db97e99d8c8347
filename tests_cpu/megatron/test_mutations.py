"""The mistakes that public bug reports are made of: each one, made on purpose, is seen by the comparison the tests use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.megatron import gathering, raw_export
from staged_sync.megatron.families import find_family
from staged_sync.megatron.families.layouts import GATED, QKV, VOCABULARY, Layout
from staged_sync.megatron.parameters import Located
from tests_cpu.megatron.fakes import PARTITION, World, differences, export_stage, export_world, world

LAYERS = range(3)
MHA = hf_config("qwen3", heads=4, groups=4, num_layers=3)  # q, k and v have the same shape: only bytes can tell


def seen(folder: Path, at: World) -> list[str]:
    return differences(export_world(folder, at), checkpoint_tensors(at.config))


def mutate_layout(monkeypatch: pytest.MonkeyPatch, layout: Layout, mutated: Layout) -> None:
    """All families read parameters of `layout` as `mutated`."""
    def find(model_type: str | None) -> Any:
        family = find_family(model_type)
        rules = tuple(replace(rule, layout=mutated) if rule.layout is layout else rule for rule in family.rules)
        return replace(family, rules=rules)
    monkeypatch.setattr(raw_export, "find_family", find)


def of_layers(*names: str) -> list[str]:
    return [f"bytes model.layers.{layer}.{name}" for layer in LAYERS for name in names]


def test_nothing_is_seen_without_a_mutation(tmp_path: Path) -> None:
    assert seen(tmp_path, world(MHA, tp=2, pp=2)) == []


def test_a_plain_concatenation_of_fc1_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate_layout(monkeypatch, GATED, replace(GATED, interleaved=1))
    # The shards' own stride of 2 would be refused; older Megatron marks 1, which is how this mistake goes unnoticed.
    monkeypatch.setitem(PARTITION, "linear_fc1.weight", (0, 1))
    assert seen(tmp_path, world(MHA, tp=2)) == of_layers("mlp.gate_proj.weight", "mlp.up_proj.weight")


def test_a_dropped_layer_offset_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local_names(chunks: Sequence[nn.Module]) -> tuple[list[Located], list[str]]:
        return [Located(name.removeprefix("module.module."), parameter, None)
                for chunk in chunks for name, parameter in chunk.named_parameters()], []
    monkeypatch.setattr(raw_export, "locate", local_names)
    found = seen(tmp_path, world(MHA, pp=3))
    assert "missing model.layers.2.mlp.down_proj.weight" in found
    assert "duplicate model.layers.0.mlp.down_proj.weight" in found
    assert "bytes model.layers.0.mlp.down_proj.weight" in found


def test_layers_that_swap_numbers_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locate = raw_export.locate

    def swapped(chunks: Sequence[nn.Module]) -> tuple[list[Located], list[str]]:
        other = {"layers.0.": "layers.1.", "layers.1.": "layers.0.", "layers.2.": "layers.2."}
        located, problems = locate(chunks)
        names = [next((e.name.replace(old, new) for old, new in other.items() if old in e.name), e.name) for e in located]
        return [replace(entry, name=name) for entry, name in zip(located, names, strict=True)], problems
    monkeypatch.setattr(raw_export, "locate", swapped)
    found = seen(tmp_path, world(MHA))
    assert len(found) == 2 * (len(checkpoint_tensors(MHA)) - 3) / 3  # every tensor of two layers of three, norms included
    assert "bytes model.layers.0.input_layernorm.weight" in found


@pytest.mark.parametrize(("order", "names"), [([1, 0, 2], ["q", "k"]), ([0, 2, 1], ["k", "v"])])
def test_swapped_projections_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int],
                                      names: list[str]) -> None:
    mutate_layout(monkeypatch, QKV, replace(QKV, split=lambda full, sizes: [QKV.split(full, sizes)[i] for i in order]))
    assert seen(tmp_path, world(MHA, tp=2)) == of_layers(*(f"self_attn.{name}_proj.weight" for name in names))


def test_a_qkv_that_is_cut_without_groups_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate_layout(monkeypatch, QKV, replace(QKV, split=lambda full, sizes: full.chunk(3)))
    assert seen(tmp_path, world(MHA)) == of_layers(*(f"self_attn.{name}_proj.weight" for name in "qkv"))


def test_padding_rows_that_are_not_cut_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate_layout(monkeypatch, VOCABULARY, replace(VOCABULARY, split=lambda full, sizes: [full]))
    assert seen(tmp_path, world(MHA, tp=2)) == ["form model.embed_tokens.weight torch.bfloat16 [252, 96]",
                                                "form lm_head.weight torch.bfloat16 [252, 96]"]


def test_gathering_ranks_in_the_wrong_order_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = raw_export.join_shards
    monkeypatch.setattr(raw_export, "join_shards", lambda shards, partition: join(shards[::-1], partition))
    found = seen(tmp_path, world(MHA, tp=2))
    whole = [name for name in checkpoint_tensors(MHA) if "norm" in name]
    assert len(found) == len(checkpoint_tensors(MHA)) - len(whole)


def test_a_tied_head_that_is_sent_again_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_export.RawExporter, "_sent_elsewhere", lambda self, name, stage: False)
    tied = hf_config("qwen3", tied=True, num_layers=3)
    assert seen(tmp_path, world(tied, pp=2)) == ["extra lm_head.weight"]


def test_a_strided_gather_input_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = world(MHA, tp=2, strided=True)
    assert seen(tmp_path, at) == []
    monkeypatch.setattr(gathering, "sendable", lambda tensors: tensors[0])
    assert "bytes model.layers.1.mlp.down_proj.weight" in seen(tmp_path, at)


def test_weights_in_the_dtype_of_the_module_instead_of_the_checkpoint_are_seen(tmp_path: Path) -> None:
    hf = checkpoint_tensors(MHA)
    wide = {name: tensor.float() if "norm" in name else tensor for name, tensor in hf.items()}
    stage = export_stage(tmp_path, wide, world(MHA), 0, None)
    assert differences([stage], hf) == [f"form {name} torch.float32 {list(hf[name].shape)}" for name, _ in stage.tensors
                                        if "norm" in name]
