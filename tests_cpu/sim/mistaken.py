"""The harness' examples put together, and mistakes that people make in them. Imported where the stubs of megatron, ray and vllm
are in place; the adapters are in test_foreign_mistakes.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import mpu

from harness.foreign.examples import bounded, bridged, experts, old_style
from harness.foreign.examples.old_style import NamedTensor


# --- experts ------------------------------------------------------------------------------------------------------------
class OneReplicaExports(experts.UpdateWeightFromDistributed):
    """The source's data-parallel replica exports alone, though the other one holds half of the experts."""

    def send_stage(self) -> None:
        if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
            super().send_stage()


class LocalNumbers(experts.UpdateWeightFromDistributed):
    """Experts are called by their number on the rank that holds them."""

    def global_name(self, name: str, local: int) -> str:
        return name


class RanksSwapped(experts.UpdateWeightFromDistributed):
    """Names and tensors of the expert-parallel ranks are put together in opposite order."""

    def of_all_expert_ranks(self, name: str, param: torch.Tensor) -> Iterator[NamedTensor]:
        named = list(super().of_all_expert_ranks(name, param))
        for (hf_name, _), (_, tensor) in zip(named, reversed(named), strict=True):
            yield hf_name, tensor


class ExpertsNotGathered(experts.UpdateWeightFromDistributed):
    """The expert-tensor-parallel shard of the source is taken for the whole expert."""

    def exported(self) -> Iterator[NamedTensor]:
        for name, param in experts.local_parameters(self.model):
            if experts.is_expert(name):
                yield from self.of_all_expert_ranks(self.global_name(name, 1), param)
            else:
                full = experts.gathered(param, mpu.get_tensor_model_parallel_group())
                yield from experts.convert_to_hf(self.args, "", name, full)


# --- bridge -------------------------------------------------------------------------------------------------------------
class OneStageIterates(bridged.UpdateWeightFromDistributed):
    """The first public description of staged sync: inactive stages go to the barrier without iterating."""

    def send_stage(self) -> None:
        if mpu.get_pipeline_model_parallel_rank() == 0:
            super().send_stage()


class SourceIterates(bridged.UpdateWeightFromDistributed):
    """Ranks that do not send do not iterate."""

    def send_stage(self) -> None:
        if self.is_source():
            super().send_stage()


# --- failures -----------------------------------------------------------------------------------------------------------
class SourceRaises(old_style.UpdateWeightFromDistributed):
    """The others learn nothing of it."""

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        raise ValueError("no bucket today")


class ErrorsOfEnginesIgnored(old_style.UpdateWeightFromDistributed):
    def get(self, references: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            return ray.get(references)


class ResumesInFinally(bounded.UpdateWeightFromDistributed):
    def update_weights(self) -> None:
        try:
            super().update_weights()
        finally:
            if dist.get_rank() == 0:
                self.get([engine.continue_generation.remote() for engine in self.engines])


class VersionWithBuckets(bounded.UpdateWeightFromDistributed):
    def announced(self, bucket: list[NamedTensor]) -> dict[str, Any]:
        return {**super().announced(bucket), "weight_version": str(self.weight_version)}


class OnlyTheLeadRaises(bounded.UpdateWeightFromDistributed):
    def update_weights(self) -> None:
        with contextlib.nullcontext() if dist.get_rank() == 0 else contextlib.suppress(RuntimeError):
            super().update_weights()


class SessionLeftOpen(bounded.UpdateWeightFromDistributed):
    def abandon(self) -> None:
        pass


# --- put together -------------------------------------------------------------------------------------------------------
class BoundedExperts(bounded.UpdateWeightFromDistributed, experts.UpdateWeightFromDistributed):
    """A rank that stays away from a gather costs the others the time-out of their group, and then they meet."""


class BoundedBridge(bounded.UpdateWeightFromDistributed, bridged.UpdateWeightFromDistributed):
    """All ranks iterate in the turn of stage 0; the other turns are empty."""

    open_group = old_style.UpdateWeightFromDistributed.open_group

    def take_turn(self, stage: int) -> None:
        if stage == 0:
            self.send_stage()
