"""Megatron models without Megatron: module trees with its names, attributes and layer numbers, filled by the cutter.

And a seam that plays all ranks of one stage together (`lockstep`), so that what a stage exports comes from real gathers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.checkpoints import checkpoint_tensors
from harness.cutter import head_dim, shard_tensors
from harness.cutting import Container, Names, Place
from harness.model_shapes import experts_of, mtp_layers
from staged_sync.exporter import NamedTensor, Part, TensorMeta
from staged_sync.megatron.raw_export import RawExporter
from staged_sync.seam import Coordinates
from tests_cpu.megatron.lockstep import Lockstep, shipped

PARTITION = {  # name's end -> (partition_dim, partition_stride), as megatron-core 0.16.1 marks its parameters
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
    "linear_qkv.weight": (0, 1),
    "linear_qkv.bias": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "linear_q_proj.weight": (0, 1),
    "linear_q_up_proj.weight": (0, 1),
    "linear_kv_up_proj.weight": (0, 1),
    "eh_proj.weight": (0, 1),
}
PARTITION_IF_LOCAL = {"linear_q_down_proj.weight": (0, 1), "linear_kv_down_proj.weight": (0, 1)}
"""Transformer Engine duplicates these, and marks nothing inside its grouped experts."""

PARTS: tuple[Part, ...] = ("dense", "expert")


@dataclass(frozen=True)
class World:
    """A layout: `ranges[chunk][stage]` are the global layers (from 0) of a stage's virtual chunk."""

    config: Mapping[str, Any]
    tp: int
    ranges: Sequence[Sequence[range]]
    ep: int = 1
    etp: int = 1
    dp: int = 1
    names: Names = "local"
    container: Container = "sequential"
    padded_vocab: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the Megatron config."""
    args: Mapping[str, Any] = field(default_factory=dict)
    float32: str = "-"
    """Names' end of the tensors that the trainer holds in float32, whatever the checkpoint has."""
    strided: bool = False
    """Matrices stored column by column."""

    @property
    def pp(self) -> int:
        return len(self.ranges[0])

    @property
    def padded(self) -> int:
        return self.padded_vocab or -(-self.config["vocab_size"] // self.tp) * self.tp

    @property
    def ranks(self) -> range:
        """The ranks of one stage."""
        return range(self.tp * self.dp)

    def coordinates(self, rank: int, stage: int) -> Coordinates:
        """As Megatron orders them ("tp-cp-ep-dp-pp"); `rank` counts inside the stage."""
        experts = self.etp * self.ep
        assert self.tp * self.dp % experts == 0, "Megatron refuses a world whose stages do not hold whole expert groups"
        return Coordinates(rank, tp=rank % self.tp, pp=stage, dp=rank // self.tp, etp=rank % self.etp,
                           ep=rank // self.etp % self.ep, edp=rank // experts, tp_size=self.tp, pp_size=self.pp,
                           dp_size=self.dp, etp_size=self.etp, ep_size=self.ep, edp_size=self.tp * self.dp // experts)


def world(config: Mapping[str, Any], *, tp: int = 1, pp: int = 1, **more: Any) -> World:
    """A world without virtual chunks; the last stage takes the layers that are left over."""
    layers, each = config["num_hidden_layers"], config["num_hidden_layers"] // pp
    ranges = [[range(s * each, layers if s == pp - 1 else (s + 1) * each) for s in range(pp)]]
    return World(config, tp, ranges, **more)


def megatron_config(config: Mapping[str, Any], **fields: Any) -> SimpleNamespace:
    """The fields of a `TransformerConfig` that the library looks at."""
    values = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"], "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"], "num_query_groups": config["num_key_value_heads"],
        "kv_channels": head_dim(config), "gated_linear_unit": True, "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False, "attention_output_gate": False, "rotary_interleaved": False,
        "mtp_num_layers": len(mtp_layers(config)) or None,
    }
    if experts_of(config):
        ffn = config.get("moe_intermediate_size", config["intermediate_size"])
        values |= {"num_moe_experts": experts_of(config), "moe_ffn_hidden_size": ffn,
                   "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size")
                   or config.get("n_shared_experts", 0) * ffn or None}
    if "kv_lora_rank" in config:
        values |= {"q_lora_rank": config["q_lora_rank"], "kv_lora_rank": config["kv_lora_rank"],
                   "qk_head_dim": config["qk_nope_head_dim"], "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
                   "v_head_dim": config["v_head_dim"]}
    return SimpleNamespace(**(values | fields))


def stage_model(hf: Mapping[str, torch.Tensor], at: World, *, rank: int = 0, stage: int = 0) -> list[nn.Module]:
    """The model chunks of one rank, wrapped as DistributedDataParallel(Float16Module(GPTModel)) is."""
    c, chunks = at.coordinates(rank, stage), []
    place = Place(c.tp_size, c.tp, c.ep_size, c.ep, c.etp_size, c.etp)
    for chunk, stages in enumerate(at.ranges):
        last = stage == at.pp - 1 and chunk == len(at.ranges) - 1
        mtp = mtp_layers(at.config) if last else ()
        shards = shard_tensors(hf, at.config, place=place, layers=stages[stage], first=stage == 0 and chunk == 0, last=last,
                               padded_vocab=at.padded, names=at.names, container=at.container, mtp=mtp)
        model = module_tree(shards, at)
        for local, layer in enumerate(stages[stage]):
            model.get_submodule(f"decoder.layers.{local}").layer_number = layer + 1
        for local in range(len(mtp)):
            model.get_submodule(f"mtp.layers.{local}").layer_number = local + 1
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
        if leaf == "expert_bias":
            module.register_buffer(leaf, shard)
        else:
            module.register_parameter(leaf, marked(name, strided(shard) if at.strided else shard, at.names))
        if path[-1] == "experts":
            module.num_local_experts = experts_of(at.config) // at.ep
    return root


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, stored column by column."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def marked(name: str, shard: torch.Tensor, names: Names = "local") -> nn.Parameter:
    """A parameter with the attributes that Megatron gives it; norms have none."""
    parameter = nn.Parameter(shard)
    for end, (dim, stride) in (PARTITION | (PARTITION_IF_LOCAL if names == "local" else {})).items():
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

    def __init__(self, at: World, *, rank: int = 0, stage: int = 0) -> None:
        self._coordinates = at.coordinates(rank, stage)
        self.sent: list[torch.Tensor] = []
        self.groups: list[str] = []

    def coordinates(self) -> Coordinates:
        return self._coordinates

    def all_gather(self, tensor: torch.Tensor, group: str, *, timeout_s: float) -> list[torch.Tensor]:
        assert timeout_s == 7
        self.sent.append(shipped(tensor))
        self.groups.append(group)
        return self._gathered(self.sent[-1], group)

    def _gathered(self, tensor: torch.Tensor, group: str) -> list[torch.Tensor]:
        return [tensor] * getattr(self._coordinates, f"{group}_size")


class LockstepSeam(RecordingSeam):
    """One of several ranks that run against each other."""

    def __init__(self, at: World, lockstep: Lockstep, *, rank: int, stage: int) -> None:
        super().__init__(at, rank=rank, stage=stage)
        self._lockstep = lockstep

    def _gathered(self, tensor: torch.Tensor, group: str) -> list[torch.Tensor]:
        return self._lockstep.all_gather(self._coordinates, tensor, group)


def write_config(folder: Path, config: Mapping[str, Any], **args: Any) -> SimpleNamespace:
    """A HF checkpoint directory with config.json alone, and args that point there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(hf_checkpoint=str(folder), **args)


def header(hf: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in hf.items()}


def exporter(args: Any, model: Sequence[nn.Module], seam: Any,
             hf_tensors: Mapping[str, TensorMeta] | None = None) -> RawExporter:
    return RawExporter(args, model, model_name="tiny", seam=seam, hf_tensors=hf_tensors)


def run(export: RawExporter) -> Iterator[NamedTensor]:
    """The export as a lifecycle drives it: dense pass, then expert pass."""
    for part in PARTS:
        for unit in export.units(part):
            yield from export.convert(unit, export.gather(unit, timeout_s=7))


@dataclass
class Stage:
    """What one stage's source exported, and in which groups it gathered."""

    described: list[TensorMeta]
    tensors: list[NamedTensor]
    groups: list[str]
    units: list[list[str]]
    """HF names by unit."""


def export_stage(folder: Path, hf: Mapping[str, torch.Tensor], at: World, stage: int,
                 hf_tensors: Mapping[str, TensorMeta] | None) -> Stage:
    """The source's export, with all its gather peers; the other ranks of the stage do not run at all."""
    args, lockstep = write_config(folder, at.config, **at.args), Lockstep()
    seams = [LockstepSeam(at, lockstep, rank=rank, stage=stage) for rank in at.ranks]
    held = {name: tensor.float() if name.endswith(at.float32) else tensor for name, tensor in hf.items()}
    exports = [exporter(args, stage_model(held, at, rank=rank, stage=stage), seam, hf_tensors if rank == 0 else None)
               for rank, seam in zip(at.ranks, seams, strict=True)]
    source = exports[0]
    assert source.problems() == []
    described = source.describe()
    assert seams[0].sent == [], "describe() communicated"
    units = []
    for part in PARTS:
        peers = [rank for rank in at.ranks if is_peer(seams[rank].coordinates(), part)]
        assert len({tuple(exports[rank].gathers(part)) for rank in peers}) == 1, f"peers gather different things: {part} pass"
        assert len({tuple(unit.label for unit in exports[rank].units(part)) for rank in peers}) == 1
        sent = lockstep.run({rank: _pass(exports[rank], part, converts=rank == 0) for rank in peers})
        units += sent[0]
    return Stage(described, [pair for unit in units for pair in unit], seams[0].groups, [[name for name, _ in u] for u in units])


def is_peer(at: Coordinates, part: Part) -> bool:
    return at.dp == 0 if part == "dense" else at.edp == 0


def _pass(export: RawExporter, part: Part, *, converts: bool) -> Callable[[], list[list[NamedTensor]]]:
    def rank() -> list[list[NamedTensor]]:
        units = []
        for unit in export.units(part):
            gathered = export.gather(unit, timeout_s=7)
            units.append(export.convert(unit, gathered) if converts else [])
        return units
    return rank


def export_world(folder: Path, at: World, *, hf: Mapping[str, torch.Tensor] | None = None,
                 named: Mapping[str, TensorMeta] | None = None) -> list[Stage]:
    """Every stage's export of the weights `hf` (default: of `at.config`), in the form of a checkpoint with the header `named`."""
    hf = checkpoint_tensors(at.config) if hf is None else hf
    return [export_stage(folder, hf, at, stage, header(hf) if named is None else named) for stage in range(at.pp)]


def differences(stages: Sequence[Stage], hf: Mapping[str, torch.Tensor]) -> list[str]:
    """Every way in which the stages' union is not the checkpoint, tensor by tensor, bit by bit."""
    sent = [(name, tensor) for stage in stages for name, tensor in stage.tensors]
    names = [name for name, _ in sent]
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    found = [f"missing {name}" for name in hf if name not in counts]
    found += [f"duplicate {name}" for name, count in sorted(counts.items()) if count > 1]
    for name, tensor in sent:
        if name not in hf:
            found.append(f"extra {name}")
        elif (tensor.dtype, tensor.shape) != (hf[name].dtype, hf[name].shape):
            found.append(f"form {name} {tensor.dtype} {list(tensor.shape)}")
        elif not torch.equal(tensor.contiguous().view(torch.uint8), hf[name].view(torch.uint8)):
            found.append(f"bytes {name}")
    return found
