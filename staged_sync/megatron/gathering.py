"""From one rank's shard to the full Megatron tensor: how a parameter is cut over its group, the gather, and the
joining.

How a parameter is cut is read from its own attributes, as megatron/core/tensor_parallel/layers.py sets them
(`tensor_model_parallel`, `partition_dim`, `partition_stride`), not from its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from staged_sync.errors import GatherError
from staged_sync.exporter import Part
from staged_sync.megatron.families.common import Layout
from staged_sync.seam import Coordinates, GatherGroup, Seam

GROUPS: dict[Part, GatherGroup] = {"dense": "tp", "expert": "etp"}


@dataclass(frozen=True, slots=True)
class Partition:
    """How a parameter is cut: along `dim` over the `ranks` of `group`, each holding a slice of each of `blocks` equal
    blocks.

    `ranks == 1` means that this rank has all of it: nothing is gathered.
    """

    group: GatherGroup
    ranks: int = 1
    dim: int = 0
    blocks: int = 1

    def full_shape(self, shard: torch.Size) -> tuple[int, ...]:
        return tuple(size * (self.ranks if dim == self.dim else 1) for dim, size in enumerate(shard))


def partition_of(parameter: torch.Tensor, layout: Layout, part: Part, at: Coordinates) -> Partition:
    """How `parameter` is cut in this world. Raises ValueError with a sentence where its attributes make no sense."""
    group = GROUPS[part]
    ranks = at.tp_size if group == "tp" else at.etp_size
    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Partition(group)
    dim = getattr(parameter, "partition_dim", None)
    if not isinstance(dim, int) or not 0 <= dim < parameter.dim():
        raise ValueError(f"is marked tensor_model_parallel with partition_dim {dim!r}, which is not one of its "
                         f"{parameter.dim()} dimensions")
    # megatron-core before 0.16 marks a gated fc1 with stride 1, and lays it out in the same way: the layout decides.
    stride = getattr(parameter, "partition_stride", 1)
    if stride not in (1, layout.interleaved):
        raise ValueError(f"has partition_stride {stride}, but its layout gives each rank {layout.interleaved} block(s)")
    return Partition(group, ranks, dim, layout.interleaved)


def gather_shards(seam: Seam, name: str, parameter: torch.Tensor, partition: Partition, *,
                  timeout_s: float) -> list[torch.Tensor]:
    """The shards of all ranks of the partition's group, by group rank. A collective, except where nothing is cut."""
    shard = parameter.detach()
    if shard.numel() == 0:
        # GatherError, although nothing was entered: this rank cannot join any gather of it, so the export is over here.
        raise GatherError(f"{name} has no storage on this rank (shape {list(shard.shape)}): it was offloaded after the "
                          f"sync was set up. Load the model back to the device before update_weights()")
    if partition.ranks == 1:
        return [shard]
    # Contiguous: gloo and NCCL read the bytes that follow the first element, whatever the strides say.
    shards: list[Any] = seam.all_gather(shard.contiguous(), partition.group, timeout_s=timeout_s)
    return shards


def join_shards(shards: Sequence[torch.Tensor], partition: Partition) -> torch.Tensor:
    """The full Megatron tensor: block by block, the slices of all ranks along the partition dimension."""
    if partition.ranks == 1:
        return shards[0]
    blocks = zip(*(shard.chunk(partition.blocks, partition.dim) for shard in shards), strict=True)
    return torch.cat([piece for block in blocks for piece in block], partition.dim)
