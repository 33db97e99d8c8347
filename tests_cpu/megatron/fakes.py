"""Megatron models without Megatron: module trees with its names, attributes and layer numbers, filled by the cutter.

And a seam that plays all tensor parallel ranks of one stage: the exporters of all ranks run once to record what each puts
into its gathers, then the source runs again and gets the shards of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors
from harness.cutter import Names, head_dim, shard_tensors
from staged_sync.exporter import NamedTensor, TensorMeta
from staged_sync.megatron.raw_export import RawExporter
from staged_sync.seam import Coordinates

PARTITION = {  # name's end -> (partition_dim, partition_stride), as megatron-core 0.16.1 marks its parameters
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_qkv.bias": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
}


@dataclass(frozen=True)
class World:
    """A layout: `ranges[chunk][stage]` are the global layers (from 0) of a stage's virtual chunk."""

    config: Mapping[str, Any]
    tp: int
    ranges: Sequence[Sequence[range]]
    names: Names = "local"
    padded_vocab: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the Megatron config."""
    strided: bool = False
    """Matrices stored column by column."""

    @property
    def pp(self) -> int:
        return len(self.ranges[0])

    @property
    def padded(self) -> int:
        return self.padded_vocab or -(-self.config["vocab_size"] // self.tp) * self.tp


def world(config: Mapping[str, Any], *, tp: int = 1, pp: int = 1, **more: Any) -> World:
    """A world without virtual chunks; the last stage takes the layers that are left over."""
    layers, each = config["num_hidden_layers"], config["num_hidden_layers"] // pp
    ranges = [[range(s * each, layers if s == pp - 1 else (s + 1) * each) for s in range(pp)]]
    return World(config, tp, ranges, **more)


def megatron_config(config: Mapping[str, Any], **fields: Any) -> SimpleNamespace:
    """The fields of a `TransformerConfig` that the library looks at."""
    values = {
        "hidden_size": config["hidden_size"], "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"], "num_query_groups": config["num_key_value_heads"],
        "kv_channels": head_dim(config), "gated_linear_unit": True, "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False, "attention_output_gate": False,
    }
    return SimpleNamespace(**(values | fields))


def stage_model(hf: Mapping[str, torch.Tensor], at: World, *, tp_rank: int = 0, stage: int = 0) -> list[nn.Module]:
    """The model chunks of one rank, wrapped as DistributedDataParallel(Float16Module(GPTModel)) is."""
    chunks = []
    for chunk, stages in enumerate(at.ranges):
        shards = shard_tensors(hf, at.config, tp=at.tp, tp_rank=tp_rank, layers=stages[stage],
                               first=stage == 0 and chunk == 0, last=stage == at.pp - 1 and chunk == len(at.ranges) - 1,
                               padded_vocab=at.padded, names=at.names)
        model = module_tree(shards, at)
        for local, layer in enumerate(stages[stage]):
            model.get_submodule(f"decoder.layers.{local}").layer_number = layer + 1
        chunks.append(_wrap(_wrap(model)))
    return chunks


def module_tree(shards: Mapping[str, torch.Tensor], at: World) -> nn.Module:
    root = nn.Module()
    root.config = megatron_config(at.config, **at.fields)
    root.share_embeddings_and_output_weights = at.config["tie_word_embeddings"]
    for name, shard in shards.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(leaf, marked(name, strided(shard) if at.strided else shard))
    return root


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, stored column by column."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def marked(name: str, shard: torch.Tensor) -> nn.Parameter:
    """A parameter with the attributes that Megatron gives it; norms have none."""
    parameter = nn.Parameter(shard)
    for end, (dim, stride) in PARTITION.items():
        if name.endswith(end):
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
    return parameter


def _wrap(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.config = getattr(model, "config", None)
    outer.add_module("module", model)
    return outer


class RecordingSeam:
    """Takes every gather's input; knows one rank only, so it returns its own shard for all."""

    def __init__(self, at: World, *, tp_rank: int, stage: int) -> None:
        self._coordinates = Coordinates(0, tp=tp_rank, pp=stage, tp_size=at.tp, pp_size=at.pp)
        self.sent: list[torch.Tensor] = []

    def coordinates(self) -> Coordinates:
        return self._coordinates

    def all_gather(self, tensor: torch.Tensor, group: str, *, timeout_s: float) -> list[torch.Tensor]:
        assert group == "tp"
        assert timeout_s == 7
        self.sent.append(shipped(tensor))
        return [tensor] * self._coordinates.tp_size


class ReplaySeam(RecordingSeam):
    """Returns what all ranks put into the gather of the same number."""

    def __init__(self, at: World, *, tp_rank: int, stage: int, peers: Sequence[RecordingSeam]) -> None:
        super().__init__(at, tp_rank=tp_rank, stage=stage)
        self._peers = peers

    def all_gather(self, tensor: torch.Tensor, group: str, *, timeout_s: float) -> list[torch.Tensor]:
        super().all_gather(tensor, group, timeout_s=timeout_s)
        return [peer.sent[len(self.sent) - 1] for peer in self._peers]


def shipped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transport sends: the bytes that follow the first element, whatever the strides say."""
    count = tensor.numel()
    available = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.detach().as_strided((min(count, available),), (1,)).clone()
    return flat.resize_(count).view(tensor.shape)


def write_config(folder: Path, config: Mapping[str, Any]) -> SimpleNamespace:
    """A HF checkpoint directory with config.json alone, and args that point there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(hf_checkpoint=str(folder))


def header(hf: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in hf.items()}


def exporter(args: Any, model: Sequence[nn.Module], seam: Any,
             hf_tensors: Mapping[str, TensorMeta] | None = None) -> RawExporter:
    return RawExporter(args, model, model_name="tiny", seam=seam, hf_tensors=hf_tensors)


def run(export: RawExporter) -> Iterator[NamedTensor]:
    """The export as a lifecycle drives it: dense pass, then expert pass."""
    for part in ("dense", "expert"):
        for unit in export.units(part):
            yield from export.convert(unit, export.gather(unit, timeout_s=7))


@dataclass
class Stage:
    """What one stage's source exported."""

    described: list[TensorMeta]
    tensors: list[NamedTensor]
    gathers: int


def export_stage(folder: Path, hf: Mapping[str, torch.Tensor], at: World, stage: int,
                 hf_tensors: Mapping[str, TensorMeta] | None) -> Stage:
    args = write_config(folder, at.config)
    models = [stage_model(hf, at, tp_rank=rank, stage=stage) for rank in range(at.tp)]
    peers = [RecordingSeam(at, tp_rank=rank, stage=stage) for rank in range(at.tp)]
    for model, peer in zip(models, peers, strict=True):
        export = exporter(args, model, peer)
        for unit in export.units("dense"):
            export.gather(unit, timeout_s=7)
    assert len({len(peer.sent) for peer in peers}) == 1, "gather peers made different numbers of gathers"
    source = ReplaySeam(at, tp_rank=0, stage=stage, peers=peers)
    export = exporter(args, models[0], source, hf_tensors)
    assert export.problems() == []
    described = export.describe()
    assert source.sent == [], "describe() communicated"
    return Stage(described, list(run(export)), len(source.sent))


def export_world(folder: Path, at: World, *, hf: Mapping[str, torch.Tensor] | None = None) -> list[Stage]:
    """Every stage's export of the checkpoint `hf` (default: the one of `at.config`), in that checkpoint's dtypes."""
    hf = checkpoint_tensors(at.config) if hf is None else hf
    return [export_stage(folder, hf, at, stage, header(hf)) for stage in range(at.pp)]


def differences(stages: Sequence[Stage], hf: Mapping[str, torch.Tensor]) -> list[str]:
    """Every way in which the stages' union is not the checkpoint, tensor by tensor, bit by bit."""
    sent = [(name, tensor) for stage in stages for name, tensor in stage.tensors]
    names = [name for name, _ in sent]
    found = [f"missing {name}" for name in hf if name not in names]
    found += [f"duplicate {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    for name, tensor in sent:
        if name not in hf:
            found.append(f"extra {name}")
        elif (tensor.dtype, tensor.shape) != (hf[name].dtype, hf[name].shape):
            found.append(f"form {name} {tensor.dtype} {list(tensor.shape)}")
        elif not torch.equal(tensor.contiguous().view(torch.uint8), hf[name].view(torch.uint8)):
            found.append(f"bytes {name}")
    return found
