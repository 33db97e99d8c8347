"""Raw export: our own converters, with collectives only inside the stage's tensor, expert-tensor and expert parallel groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from staged_sync.config import read_settings
from staged_sync.errors import ConfigurationError
from staged_sync.exporter import RAW_PASSES, Contract, NamedTensor, Part, TensorMeta
from staged_sync.megatron.experts import global_number
from staged_sync.megatron.families import UnknownFamily, find_family
from staged_sync.megatron.families.common import EMBEDDING, HEAD, Family, expert_of
from staged_sync.megatron.gathering import Shards, gather_shards, join_shards, partition_of
from staged_sync.megatron.inspection import Inspection
from staged_sync.megatron.parameters import Located, locate, unwrap
from staged_sync.megatron.quantise import FP8, SCALE_SUFFIX, quantise, read_block
from staged_sync.megatron.signature import signature
from staged_sync.megatron.sizes import Sizes, read_hf_config, read_sizes
from staged_sync.megatron.units import Piece, RawUnit, units_of
from staged_sync.seam import GatherGroup, Seam
from staged_sync.trace import Trace


class RawExporter:
    """Exports this rank's stage, all of its model chunks, as HF tensors (`staged_sync.exporter.Exporter`).

    `hf_tensors` is the header of the HF checkpoint (name -> `TensorMeta`). Each tensor is sent in the checkpoint's
    dtype: an fp32 norm of a bf16 checkpoint goes out as bf16, an fp32 router bias stays fp32. A tensor that it does not
    name, or all of them where it is None, keeps the parameter's dtype. `quantization_config`: what the caller believes that
    config.json says, to be compared; None if nothing.

    The constructor never raises: whatever is wrong is said by `problems()`. `describe`, `units`, `gather` and `convert`
    need a model without problems. The model is walked anew each time, so parameters may be replaced between updates.

    Memory on the source, besides the bucket that is being filled: one unit as gathered and, where tensors are cut, once more
    as joined. Units of experts are at most half a bucket, so that all of it stays within two buckets plus the largest tensor.
    Gather peers hold one unit as gathered, and nothing else.
    """

    contract: Contract = "stage_local"
    passes: tuple[Part, ...] = RAW_PASSES

    def __init__(self, args: Any, model: Sequence[nn.Module], *, model_name: str, seam: Seam,
                 hf_tensors: Mapping[str, TensorMeta] | None, trace: Trace | None = None,
                 quantization_config: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._seam = seam
        self._trace = trace
        self._hf_tensors = hf_tensors or {}
        self._config = next((c for chunk in model if (c := getattr(unwrap(chunk), "config", None)) is not None), None)
        self._limit_bytes = read_settings(args)[0].bucket_bytes // 2
        hf_config, self._setup_problems = read_hf_config(args)
        self._family = self._find_family(hf_config, model_name)
        self._sizes = self._read_sizes(args, hf_config)
        self.tied = self._read_tied(hf_config)
        self._block, problems = read_block(hf_config, quantization_config)
        self._setup_problems += problems

    # --- what the model is, once ------------------------------------------------------------------------------------

    def _find_family(self, hf_config: dict[str, Any], model_name: str) -> Family | None:
        if not hf_config:
            return None
        try:
            return find_family(hf_config.get("model_type"))
        except UnknownFamily as error:
            self._setup_problems.append(f"model {model_name!r}: {error}")
            return None

    def _read_sizes(self, args: Any, hf_config: dict[str, Any]) -> Sizes | None:
        sizes, problems = read_sizes(args, self._config, hf_config)
        self._setup_problems += problems
        return sizes

    def _read_tied(self, hf_config: dict[str, Any]) -> bool:
        in_hf = hf_config.get("tie_word_embeddings")
        in_model = {bool(shared) for chunk in self._model
                    if (shared := getattr(unwrap(chunk), "share_embeddings_and_output_weights", None)) is not None}
        if in_hf is not None and in_model - {in_hf}:
            self._setup_problems.append(
                f"config.json has tie_word_embeddings={in_hf}, but the Megatron model has "
                f"share_embeddings_and_output_weights={not in_hf}: engine and trainer would not be the same model")
        return bool(in_hf) if in_hf is not None else True in in_model

    @property
    def _mtp_layers(self) -> range:
        """HF's numbers of the multi-token-prediction layers that the trainer has: they follow the decoder's."""
        first = (self._sizes.num_layers if self._sizes else None) or 0
        return range(first, first + (getattr(self._config, "mtp_num_layers", None) or 0))

    def optional(self, hf_name: str) -> bool:
        """Whether the HF checkpoint may name or lack `hf_name`: the family's rule, for `coverage_problems`."""
        return self._family is not None and self._sizes is not None and self._family.is_optional(
            hf_name, tied=self.tied, decoder_layers=self._sizes.num_layers, mtp_layers=self._mtp_layers)

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything in this rank's model that cannot be exported, as full sentences; empty if none. Local."""
        located, problems = locate(self._model)
        problems = self._setup_problems + problems
        inspection = Inspection(self._family, self._sizes, self._seam.coordinates(), self._hf_tensors)
        return problems + inspection.problems(located)

    # --- the export -------------------------------------------------------------------------------------------------

    def describe(self) -> list[TensorMeta]:
        """Name, dtype and full shape of what this stage sends, in sending order: `convert` itself, on meta tensors."""
        metas = []
        for part in ("dense", "expert"):
            for unit in self.units(part):
                shards = [[torch.empty(p.parameter.shape, dtype=p.parameter.dtype, device="meta")]
                          * (p.partition.ranks * p.partition.ep) for p in unit.pieces]
                metas += [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.convert(unit, shards)]
        return metas

    def units(self, part: Part) -> list[RawUnit]:
        """The units of the pass, in the model's order. Raises `ConfigurationError` for an unknown name."""
        return units_of([self._piece(entry) for entry in self._exported(part)], part, self._limit_bytes)

    def gathers(self, part: Part) -> list[str]:
        """What this rank brings into the gathers of the pass, in few lines: see `signature`."""
        return signature(self.units(part))

    def _exported(self, part: Part) -> Iterator[Located]:
        stage = self._seam.coordinates().pp
        for entry in locate(self._model)[0]:
            rule = self._family.rule(entry.name) if self._family else None
            if rule is None and not entry.is_buffer:
                raise ConfigurationError(self.problems())
            if rule is not None and rule.part == part and not self._sent_elsewhere(entry.name, stage):
                yield entry

    def _piece(self, entry: Located) -> Piece:
        assert self._family is not None and self._sizes is not None
        rule = self._family.rule(entry.name)
        assert rule is not None
        expected = [self._sizes.dimensions()[name] for name in rule.shape]
        partition = partition_of(entry.parameter, rule.layout, rule.part, self._seam.coordinates(), expected)
        return Piece(entry.name, entry.parameter, rule, partition)

    def _sent_elsewhere(self, name: str, stage: int) -> bool:
        """Copies of the embedding that Megatron keeps on later stages (a tied head, MTP): the first stage sends it."""
        return (name == HEAD and self.tied) or (name == EMBEDDING and stage != 0)

    def gather(self, unit: RawUnit, *, timeout_s: float) -> list[Shards]:
        """Every piece's shards. Collectives of the unit's groups, except where nothing is cut."""
        def all_gather(tensor: torch.Tensor, group: GatherGroup) -> list[torch.Tensor]:
            waiting = nullcontext() if self._trace is None else self._trace.waiting("gather", detail=unit.label, group=group)
            with waiting:
                return self._seam.all_gather(tensor, group, timeout_s=timeout_s)

        return gather_shards(all_gather, unit.label, [piece.parameter for piece in unit.pieces],
                             [piece.partition for piece in unit.pieces])

    def convert(self, unit: RawUnit, gathered: Sequence[Shards]) -> list[NamedTensor]:
        """HF names and full tensors, in the HF checkpoint's dtype. Views of the model where nothing was gathered."""
        named = [pair for piece, shards in zip(unit.pieces, gathered, strict=True) for pair in self._convert(piece, shards)]
        return [pair for name, tensor in named for pair in self._in_checkpoint_form(name, tensor)]

    def _in_checkpoint_form(self, name: str, tensor: torch.Tensor) -> list[NamedTensor]:
        """In the dtype that the HF checkpoint has; where that is FP8 with scales, quantised, and the scales next to it."""
        wanted = self._hf_tensors.get(name)
        if wanted is None:
            return [(name, tensor)]
        if wanted.dtype == FP8 and self._block is not None and tensor.dtype != FP8:
            values, scales = quantise(tensor, self._block)
            return [(name, values), (name + SCALE_SUFFIX, scales)]
        return [(name, tensor.to(wanted.dtype))]

    def _convert(self, piece: Piece, shards: Shards) -> list[NamedTensor]:
        assert self._family is not None and self._sizes is not None
        at, named = self._seam.coordinates(), []
        for ep_rank in range(piece.partition.ep):
            mine = shards[ep_rank * piece.partition.ranks:(ep_rank + 1) * piece.partition.ranks]
            local, expert = expert_of(piece.name), None
            if local is not None and self._sizes.num_moe_experts is not None:
                expert = global_number(local, ep_rank, at, self._sizes.num_moe_experts)
            named += self._family.to_hf(piece.name, join_shards(mine, piece.partition), self._sizes, expert=expert)
        return self._with_copies(named)

    def _with_copies(self, named: list[NamedTensor]) -> list[NamedTensor]:
        """The HF checkpoint decides whether a copy (a tied head, MTP's embedding) is a tensor of its own: if it names it, it
        is sent, once, next to the original."""
        assert self._family is not None
        return named + [(copy, tensor) for name, tensor in named
                        for copy in self._family.copies_of(name, tied=self.tied, mtp_layers=self._mtp_layers)
                        if copy in self._hf_tensors]
