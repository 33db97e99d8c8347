"""Silent corruptions of mixtures of experts, latent attention and MTP, made on purpose: each is seen, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.exporter import NamedTensor
from staged_sync.megatron import gathering, parameters, raw_export
from staged_sync.megatron.families import common, find_family
from staged_sync.megatron.families.layouts import GATED
from staged_sync.megatron.parameters import Located
from staged_sync.seam import Coordinates
from tests_cpu.megatron import fakes
from tests_cpu.megatron.fakes import LockstepSeam, World, differences, export_world, world

MOE = hf_config("qwen3_moe", num_layers=1, heads=4, groups=4, num_experts=8)
EP4 = world(MOE, ep=4, dp=4)
PARTS = ("gate_proj", "up_proj", "down_proj")

LOCKSTEP = LockstepSeam._gathered
TAKE_APART = parameters.take_apart


def seen(folder: Path, at: World) -> list[str]:
    return differences(export_world(folder, at), checkpoint_tensors(at.config))


def wrong_bytes(*experts: int, parts: tuple[str, ...] = PARTS) -> list[str]:
    return sorted(f"bytes model.layers.0.mlp.experts.{expert}.{part}.weight" for expert in experts for part in parts)


@pytest.mark.parametrize("at", [EP4, world(MOE, tp=2, ep=2, etp=2, dp=2), world(MOE, tp=2, pp=1, ep=2, container="grouped")])
def test_nothing_is_seen_without_a_mutation(at: World, tmp_path: Path) -> None:
    assert seen(tmp_path, at) == []


def test_b19_experts_copied_over_expert_parallel_borders_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public report: a root outside the group falls back to the rank itself, so that every rank's experts are its own."""
    def own_shards(self: LockstepSeam, tensor: torch.Tensor, group: str) -> list[torch.Tensor]:
        return [tensor] * self.coordinates().ep_size if group == "ep" else LOCKSTEP(self, tensor, group)
    monkeypatch.setattr(LockstepSeam, "_gathered", own_shards)
    assert sorted(seen(tmp_path, EP4)) == wrong_bytes(2, 3, 4, 5, 6, 7)


def test_b19_a_group_read_from_the_wrong_root_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global ranks taken for group ranks shift the group: everybody's experts appear under the next rank's numbers."""
    monkeypatch.setattr(LockstepSeam, "_gathered", lambda self, tensor, group: (
        shards := LOCKSTEP(self, tensor, group))[1:] + shards[:1] if group == "ep" else LOCKSTEP(self, tensor, group))
    assert sorted(seen(tmp_path, EP4)) == wrong_bytes(*range(8))


def test_experts_numbered_from_zero_on_every_rank_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_export, "global_number", lambda local, ep_rank, at, experts: local)
    found = seen(tmp_path, EP4)
    assert {f"missing model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(2, 8)} <= set(found)
    assert "duplicate model.layers.0.mlp.experts.1.up_proj.weight" in found


def test_experts_interleaved_over_ranks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round robin instead of blocks: only the first and the last expert come out right."""
    def round_robin(local: int, ep_rank: int, at: Coordinates, experts: int) -> int:
        return local * at.ep_size + ep_rank
    monkeypatch.setattr(raw_export, "global_number", round_robin)
    assert sorted(seen(tmp_path, EP4)) == wrong_bytes(1, 2, 3, 4, 5, 6)


def test_expert_and_expert_tensor_groups_in_the_wrong_order_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = gathering.Partition.groups.fget
    monkeypatch.setattr(gathering.Partition, "groups", property(lambda self: stock(self)[::-1]))
    found = seen(tmp_path, world(MOE, ep=2, etp=2, dp=4))
    assert set(wrong_bytes(*range(8), parts=("up_proj", "down_proj"))) <= set(found)


def test_b127_expert_halves_that_are_concatenated_plainly_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(model_type: str | None) -> Any:
        family, plain = find_family(model_type), replace(GATED, interleaved=1)
        return replace(family, rules=tuple(replace(rule, layout=plain) if rule.layout is GATED and rule.part == "expert" else rule
                                           for rule in family.rules))
    monkeypatch.setattr(raw_export, "find_family", find)
    assert sorted(seen(tmp_path, world(MOE, etp=2, dp=2))) == wrong_bytes(*range(8), parts=("gate_proj", "up_proj"))


def test_a_grouped_container_read_as_columns_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """weight1 looks like (hidden, n · 2·ffn); it is read as (n, hidden, 2·ffn)."""
    def columns(name: str, parameter: torch.Tensor, container: nn.Module) -> list[tuple[str, torch.Tensor]]:
        if not name.endswith("experts.weight1"):
            return TAKE_APART(name, parameter, container)
        pieces = parameter.detach().chunk(container.num_local_experts, dim=1)
        return [(f"{name}.{i}", piece.t()) for i, piece in enumerate(pieces)]
    monkeypatch.setattr(parameters, "take_apart", columns)
    assert sorted(seen(tmp_path, world(MOE, container="grouped"))) == wrong_bytes(*range(8), parts=("gate_proj", "up_proj"))


def test_b91_a_unit_of_experts_that_is_never_yielded_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = raw_export.units_of
    monkeypatch.setattr(raw_export, "units_of", lambda pieces, part, limit: (
        stock(pieces, part, limit)[:-1] if part == "expert" else stock(pieces, part, limit)))
    at = replace(EP4, args={"update_weight_buffer_size": 1 << 17})
    assert "missing model.layers.0.mlp.experts.7.down_proj.weight" in seen(tmp_path, at)


# --- dtype, MTP, virtual chunks -----------------------------------------------------------------------------------------

DEEPSEEK = hf_config("deepseek_v3", num_layers=4, heads=4, q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=6,
                     qk_rope_head_dim=8, v_head_dim=5, num_nextn_predict_layers=1, n_routed_experts=2)


@pytest.mark.parametrize("names", ["local", "te"])
def test_deepseek_is_exact_without_a_mutation(tmp_path: Path, names: Any) -> None:
    assert seen(tmp_path, world(DEEPSEEK, tp=2, pp=2, names=names)) == []


def test_b143_a_blanket_cast_of_the_router_bias_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = raw_export.RawExporter.convert

    def cast(self: Any, unit: Any, gathered: Any) -> list[NamedTensor]:
        return [(name, tensor.bfloat16()) for name, tensor in convert(self, unit, gathered)]
    monkeypatch.setattr(raw_export.RawExporter, "convert", cast)
    biases = [name for name in checkpoint_tensors(DEEPSEEK) if name.endswith("correction_bias")]
    assert seen(tmp_path, world(DEEPSEEK)) == [f"form {name} torch.bfloat16 [2]" for name in biases]


def test_b143_a_bias_that_went_through_bfloat16_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast and cast back: the dtype is right, the values have been merged."""
    tree = fakes.module_tree

    def rounded(shards: Any, at: World) -> nn.Module:
        model = tree(shards, at)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffer.bfloat16()) if name.endswith("expert_bias") else None
        return model
    monkeypatch.setattr(fakes, "module_tree", rounded)
    found = seen(tmp_path, world(DEEPSEEK))
    assert found == [f"bytes {name}" for name in checkpoint_tensors(DEEPSEEK) if name.endswith("correction_bias")]


def test_b123_a_copy_of_the_embedding_sent_by_the_last_stage_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_export.RawExporter, "_sent_elsewhere", lambda self, name, stage: False)
    assert seen(tmp_path, world(DEEPSEEK, pp=2)) == ["duplicate model.embed_tokens.weight",
                                                     "duplicate model.layers.4.embed_tokens.weight"]


def test_b153_extra_layers_numbered_like_the_decoder_s_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = common.hf_names
    monkeypatch.setattr(common, "hf_names", lambda rule, name, sizes, expert: stock(
        rule, name, replace(sizes, num_layers=0), expert))
    found = seen(tmp_path, world(DEEPSEEK, pp=2))
    assert "missing model.layers.4.self_attn.o_proj.weight" in found
    assert "duplicate model.layers.0.self_attn.o_proj.weight" in found


def test_b111_a_layer_offset_dropped_in_virtual_chunks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locate = raw_export.locate
    at = World(MOE | {"num_hidden_layers": 4}, 1, [[range(1), range(1, 2)], [range(2, 3), range(3, 4)]], ep=2, dp=2)
    assert seen(tmp_path, at) == []

    def local_numbers(chunks: Any) -> tuple[list[Located], list[str]]:
        found = []
        for chunk in chunks:  # as if the stage had one chunk that starts at its own number
            located, _ = locate([chunk])
            found += [replace(entry, name=entry.name.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1."))
                      for entry in located]
        return found, []
    monkeypatch.setattr(raw_export, "locate", local_numbers)
    found = seen(tmp_path, at)
    assert "missing model.layers.2.mlp.experts.0.up_proj.weight" in found
    assert "duplicate model.layers.1.mlp.experts.7.down_proj.weight" in found
