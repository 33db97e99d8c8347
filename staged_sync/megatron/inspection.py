"""Looks at a rank's parameters before anything is paused: what cannot be exported, in sentences that name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staged_sync.exporter import TensorMeta
from staged_sync.megatron.experts import distribution_problems
from staged_sync.megatron.families.common import Family, Rule, expert_of, hf_names, layer_of
from staged_sync.megatron.gathering import partition_of
from staged_sync.megatron.parameters import Located, summary
from staged_sync.megatron.sizes import Sizes, differing_settings
from staged_sync.seam import Coordinates


@dataclass(frozen=True)
class Inspection:
    """What is needed to judge parameters; `hf_tensors` is the checkpoint's header where this rank has read it."""

    family: Family | None
    sizes: Sizes | None
    at: Coordinates
    hf_tensors: Mapping[str, TensorMeta]

    def problems(self, located: Sequence[Located]) -> list[str]:
        """Everything that is wrong with these parameters, as full sentences; empty if nothing."""
        problems = []
        if empty := [entry.name for entry in located if entry.parameter.numel() == 0 and not entry.is_buffer]:
            problems.append(f"parameters without storage (offloaded?): {summary(empty)}. Load the model back to the "
                            f"device before weights are synchronised")
        if self.family is None or self.sizes is None:
            return problems
        family, sizes = self.family, self.sizes
        if unknown := [entry.name for entry in located if family.rule(entry.name) is None and not entry.is_buffer]:
            problems.append(f"family {'/'.join(family.model_types)} has no rule for the Megatron parameters "
                            f"{summary(unknown)}; see docs/adding-a-model-family.md")
        configs = {id(entry.config): entry.config for entry in located}
        problems += dict.fromkeys(line for config in configs.values()
                                  for line in differing_settings(config, family.required))
        problems += _layers_beyond(located, sizes)
        known = [(entry, rule) for entry in located if (rule := family.rule(entry.name)) is not None]
        problems += distribution_problems((entry.name for entry, _ in known), self.at, sizes.num_moe_experts)
        problems += dict.fromkeys(line for entry, rule in known if entry.parameter.numel() > 0
                                  and (line := self._shape_problem(entry, rule, sizes)))
        return problems + [line for entry, rule in known if entry.is_buffer
                           and (line := self._buffer_problem(entry, rule, sizes))]

    def _shape_problem(self, entry: Located, rule: Rule, sizes: Sizes) -> str | None:
        """What is wrong with the full shape of a parameter as it would be gathered, if anything."""
        dimensions = sizes.dimensions()
        if unknown := [name for name in rule.shape if name not in dimensions]:
            return (f"{rule.megatron} needs the size of {', '.join(unknown)}, which neither the model's config nor args gives; "
                    f"is this really a {'/'.join(self.family.model_types) if self.family else ''} model?")
        expected = tuple(dimensions[name] for name in rule.shape)
        try:
            partition = partition_of(entry.parameter, rule.layout, rule.part, self.at, expected)
        except ValueError as error:
            return f"{entry.name} {error}"
        full = partition.full_shape(entry.parameter.shape)
        fits = len(full) == len(expected) and all(
            have >= want if name == "vocabulary" else have == want
            for name, have, want in zip(rule.shape, full, expected, strict=True))
        if fits:
            return None
        unmarked = "one rank, or not marked tensor_model_parallel" if rule.part == "dense" else \
            f"no dimension is {self.at.etp_size} times too short"
        how = (f"cut along dimension {partition.dim} over {partition.ranks} {partition.group} ranks"
               if partition.ranks > 1 else f"whole on this rank ({unmarked})")
        return (f"{entry.name} is {list(entry.parameter.shape)} here, {how}, so {list(full)} in full; "
                f"the configuration says {list(expected)} ({', '.join(rule.shape)})")

    def _buffer_problem(self, entry: Located, rule: Rule, sizes: Sizes) -> str | None:
        """A buffer that the module's cast (`model.bfloat16()`) has robbed of bits that the checkpoint has."""
        for name in hf_names(rule, entry.name, sizes, expert_of(entry.name)):
            want = self.hf_tensors.get(name)
            if want is not None and entry.parameter.element_size() < want.dtype.itemsize:
                return (f"{entry.name} is {entry.parameter.dtype} in the model and {want.dtype} in the checkpoint ({name}): a "
                        f"cast of the whole module has rounded it. Keep this buffer in {want.dtype}, as Megatron's router does")
        return None


def _layers_beyond(located: Sequence[Located], sizes: Sizes) -> list[str]:
    """Decoder layers that config.json does not have: HF has layers that predict more tokens under their numbers."""
    decoder = {layer for entry in located if entry.name.startswith("decoder.layers.")
               and (layer := layer_of(entry.name)) is not None}
    if sizes.num_layers is None or not (beyond := sorted(layer for layer in decoder if layer >= sizes.num_layers)):
        return []
    return [f"config.json has num_hidden_layers={sizes.num_layers}, but the Megatron model has decoder layers beyond (numbered "
            f"from 0): decoder.layers.{{{','.join(map(str, beyond))}}}; engine and trainer would not be the same model"]
