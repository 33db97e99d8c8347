"""Raw export: our own converters, with collectives only inside the stage's tensor parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from staged_sync.errors import ConfigurationError
from staged_sync.exporter import Contract, NamedTensor, Part, TensorMeta
from staged_sync.megatron.families import UnknownFamily, find_family
from staged_sync.megatron.families.common import EMBEDDING, HEAD, Family, Rule
from staged_sync.megatron.gathering import Partition, gather_shards, join_shards, partition_of
from staged_sync.megatron.parameters import Located, locate, summary, unwrap
from staged_sync.megatron.sizes import Sizes, differing_settings, read_hf_config, read_sizes
from staged_sync.seam import Seam
from staged_sync.trace import Trace


@dataclass(frozen=True, slots=True)
class RawUnit:
    """One Megatron parameter of this stage; `label` is its name with the global layer number."""

    label: str
    parameter: nn.Parameter
    rule: Rule
    partition: Partition


class RawExporter:
    """Exports this rank's stage, all of its model chunks, as HF tensors (`staged_sync.exporter.Exporter`).

    `hf_tensors` is the header of the HF checkpoint (name -> `TensorMeta`). Each tensor is sent in the checkpoint's
    dtype: an fp32 norm of a bf16 checkpoint goes out as bf16, an fp32 tensor stays fp32. A tensor that it does not
    name, or all of them where it is None, keeps the parameter's dtype.

    The constructor never raises: whatever is wrong is said by `problems()`. `describe`, `units`, `gather` and `convert`
    need a model without problems. The model is walked anew each time, so parameters may be replaced between updates.
    """

    contract: Contract = "stage_local"

    def __init__(self, args: Any, model: Sequence[nn.Module], *, model_name: str, seam: Seam,
                 hf_tensors: Mapping[str, TensorMeta] | None, trace: Trace | None = None) -> None:
        self._model = model
        self._seam = seam
        self._trace = trace
        self._hf_tensors = hf_tensors or {}
        self._config = next((c for chunk in model if (c := getattr(unwrap(chunk), "config", None)) is not None), None)
        hf_config, self._setup_problems = read_hf_config(args)
        self._family = self._find_family(hf_config, model_name)
        self._sizes = self._read_sizes(args, hf_config)
        self.tied = self._read_tied(hf_config)

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
        sizes, problems = read_sizes(args, self._config, hf_config.get("vocab_size"))
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

    def optional(self, hf_name: str) -> bool:
        """Whether the HF checkpoint may name or lack `hf_name`: the family's rule, for `coverage_problems`."""
        return self._family is not None and self._family.is_optional(hf_name, tied=self.tied)

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything in this rank's model that cannot be exported, as full sentences; empty if none. Local."""
        located, problems = locate(self._model)
        problems = self._setup_problems + problems
        if empty := [entry.name for entry in located if entry.parameter.numel() == 0]:
            problems.append(f"parameters without storage (offloaded?): {summary(empty)}. Load the model back to the "
                            f"device before weights are synchronised")
        if self._family is None or self._sizes is None:
            return problems
        family = self._family
        if unknown := [entry.name for entry in located if family.rule(entry.name) is None]:
            problems.append(f"family {'/'.join(family.model_types)} has no rule for the Megatron parameters "
                            f"{summary(unknown)}; see docs/adding-a-model-family.md")
        configs = {id(entry.config): entry.config for entry in located}
        problems += dict.fromkeys(line for config in configs.values()
                                  for line in differing_settings(config, family.required))
        return problems + [line for entry in located if entry.parameter.numel() > 0
                           and (line := self._shape_problem(entry, self._sizes))]

    def _shape_problem(self, entry: Located, sizes: Sizes) -> str | None:
        """What is wrong with the full shape of a parameter as it would be gathered, if anything."""
        assert self._family is not None
        if (rule := self._family.rule(entry.name)) is None:
            return None
        try:
            partition = partition_of(entry.parameter, rule.layout, rule.part, self._seam.coordinates())
        except ValueError as error:
            return f"{entry.name} {error}"
        full = partition.full_shape(entry.parameter.shape)
        expected = tuple(sizes.dimensions()[name] for name in rule.shape)
        fits = len(full) == len(expected) and all(
            have >= want if name == "vocabulary" else have == want
            for name, have, want in zip(rule.shape, full, expected, strict=True))
        if fits:
            return None
        how = (f"cut along dimension {partition.dim} over {partition.ranks} {partition.group} ranks"
               if partition.ranks > 1 else "whole on this rank (one rank, or not marked tensor_model_parallel)")
        return (f"{entry.name} is {list(entry.parameter.shape)} here, {how}, so {list(full)} in full; "
                f"the configuration says {list(expected)} ({', '.join(rule.shape)})")

    # --- the export -------------------------------------------------------------------------------------------------

    def describe(self) -> list[TensorMeta]:
        """Name, dtype and full shape of what this stage sends, in sending order: `convert` itself, on meta tensors."""
        metas = []
        for part in ("dense", "expert"):
            for unit in self.units(part):
                shard = torch.empty_like(unit.parameter, device="meta")
                metas += [TensorMeta(name, tensor.dtype, tuple(tensor.shape))
                          for name, tensor in self.convert(unit, [shard] * unit.partition.ranks)]
        return metas

    def units(self, part: Part) -> list[RawUnit]:
        """One unit per parameter of the pass, in the model's order. Raises `ConfigurationError` for an unknown name."""
        at = self._seam.coordinates()
        units = []
        for entry in locate(self._model)[0]:
            rule = self._family.rule(entry.name) if self._family else None
            if rule is None:
                raise ConfigurationError(self.problems())
            if rule.part == part and not self._sent_elsewhere(entry.name, at.pp):
                units.append(RawUnit(entry.name, entry.parameter, rule,
                                     partition_of(entry.parameter, rule.layout, part, at)))
        return units

    def _sent_elsewhere(self, name: str, stage: int) -> bool:
        """Copies of the embedding that Megatron keeps on later stages (a tied head, MTP): the first stage sends it."""
        return (name == HEAD and self.tied) or (name == EMBEDDING and stage != 0)

    def gather(self, unit: RawUnit, *, timeout_s: float) -> list[torch.Tensor]:
        """The parameter's shards by group rank. A collective of the unit's group, except where nothing is cut."""
        if unit.partition.ranks == 1 or self._trace is None:
            return gather_shards(self._seam, unit.label, unit.parameter, unit.partition, timeout_s=timeout_s)
        with self._trace.waiting("gather", detail=unit.label, group=unit.partition.group):
            return gather_shards(self._seam, unit.label, unit.parameter, unit.partition, timeout_s=timeout_s)

    def convert(self, unit: RawUnit, gathered: Sequence[torch.Tensor]) -> list[NamedTensor]:
        """HF names and full tensors, in the HF checkpoint's dtype. Views of the model where nothing was gathered."""
        assert self._family is not None and self._sizes is not None
        full = join_shards(gathered, unit.partition)
        named = self._with_tied_names(self._family.to_hf(unit.label, full, self._sizes))
        return [(name, tensor.to(self._hf_tensors[name].dtype) if name in self._hf_tensors else tensor)
                for name, tensor in named]

    def _with_tied_names(self, named: list[NamedTensor]) -> list[NamedTensor]:
        """A tied model's HF checkpoint decides whether the head is a tensor of its own: if it names it, it is sent."""
        if not self.tied or self._family is None:
            return named
        return named + [(alias, tensor) for name, tensor in named for alias, original in self._family.tied_names.items()
                        if original == name and alias in self._hf_tensors]
