"""Deferral, with parameters gathered as public code gathers them: over the tensor-parallel ranks, and, for experts, over the
expert-tensor-parallel and the expert-parallel ranks. All ranks of a stage gather; its source sends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from harness.foreign.examples import deferred
from harness.foreign.examples.old_style import NamedTensor


def local_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """This rank's parameters under Megatron's names: experts are numbered from 0 on every expert-parallel rank."""
    raise NotImplementedError("made by the framework")


def convert_to_hf(args: Any, model_name: str, name: str, param: torch.Tensor) -> list[NamedTensor]:
    raise NotImplementedError("made by the framework")


def gathered(param: Any, group: Any) -> torch.Tensor:
    if not param.tensor_model_parallel:
        return param
    shards = [torch.empty_like(param) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, param, group=group)
    return torch.cat(shards, dim=param.partition_dim)


def is_expert(name: str) -> bool:
    return ".experts." in name


class UpdateWeightFromDistributed(deferred.UpdateWeightFromDistributed):
    def exported(self) -> Iterator[NamedTensor]:
        params = list(local_parameters(self.model))
        for name, param in params:
            if not is_expert(name):
                yield from convert_to_hf(self.args, "", name, gathered(param, mpu.get_tensor_model_parallel_group()))
        local = sum(is_expert(name) for name, _ in params)
        for name, param in params:
            if is_expert(name):
                full = gathered(param, mpu.get_expert_tensor_parallel_group())
                yield from self.of_all_expert_ranks(self.global_name(name, local), full)

    def global_name(self, name: str, local: int) -> str:
        """`local`: how many experts this rank has."""
        offset = mpu.get_expert_model_parallel_rank() * local
        return re.sub(r"\d+$", lambda number: str(int(number[0]) + offset), name)

    def of_all_expert_ranks(self, name: str, param: torch.Tensor) -> Iterator[NamedTensor]:
        group, size = mpu.get_expert_model_parallel_group(), mpu.get_expert_model_parallel_world_size()
        names: list[Any] = [None] * size
        dist.all_gather_object(names, name, group=group)
        params = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(params, param, group=group)
        for each, tensor in zip(names, params, strict=True):
            yield from convert_to_hf(self.args, "", each, tensor)
