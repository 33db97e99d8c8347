"""From one rank's shard to the full Megatron tensor: how a parameter is cut over its group, the gather, and the
joining.

How a dense parameter is cut is read from its own attributes, as megatron/core/tensor_parallel/layers.py sets them
(`tensor_model_parallel`, `partition_dim`, `partition_stride`), not from its name. Experts are cut where their shape says so:
Transformer Engine's grouped linears and Megatron's grouped container carry no attributes under expert tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from staged_sync.errors import GatherError
from staged_sync.exporter import Part
from staged_sync.megatron.families.layouts import Layout
from staged_sync.packing import as_bytes, unpack
from staged_sync.seam import Coordinates, GatherGroup

Shards = list[torch.Tensor]
"""One parameter's shards: by tensor parallel rank; for experts by expert parallel rank, then by expert tensor parallel rank."""

Collective = Callable[[torch.Tensor, GatherGroup], list[torch.Tensor]]
"""An all-gather in one of this rank's groups: every member's tensor, by group rank."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How a parameter is cut: along `dim` over the `ranks` of `group`, each holding a slice of each of `blocks` equal
    blocks; and over how many expert parallel ranks (`ep`) the parameters of this name are different experts.

    `ranks == 1` means that this rank has all of it.
    """

    group: GatherGroup
    ranks: int = 1
    dim: int = 0
    blocks: int = 1
    ep: int = 1

    def full_shape(self, shard: torch.Size) -> tuple[int, ...]:
        return tuple(size * (self.ranks if dim == self.dim else 1) for dim, size in enumerate(shard))

    @property
    def groups(self) -> tuple[GatherGroup, ...]:
        """Where this parameter is gathered, in this order; empty if this rank has all there is."""
        cut: tuple[GatherGroup, ...] = (self.group,) if self.ranks > 1 else ()
        return (*cut, "ep") if self.ep > 1 else cut


def partition_of(parameter: torch.Tensor, layout: Layout, part: Part, at: Coordinates,
                 expected: Sequence[int] | None = None) -> Partition:
    """How `parameter` is cut in this world; `expected` is an expert's full shape. Raises ValueError with a sentence where its
    attributes make no sense."""
    if part == "expert":
        return _partition_of_expert(parameter, layout, at, expected)
    if at.tp_size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Partition("tp")
    dim = getattr(parameter, "partition_dim", None)
    if not isinstance(dim, int) or not 0 <= dim < parameter.dim():
        raise ValueError(f"is marked tensor_model_parallel with partition_dim {dim!r}, which is not one of its "
                         f"{parameter.dim()} dimensions")
    # megatron-core before 0.16 marks a gated fc1 with stride 1, and lays it out in the same way: the layout decides.
    stride = getattr(parameter, "partition_stride", 1)
    if stride not in (1, layout.interleaved):
        raise ValueError(f"has partition_stride {stride}, but its layout gives each rank {layout.interleaved} block(s)")
    return Partition("tp", at.tp_size, dim, layout.interleaved)


def _partition_of_expert(parameter: torch.Tensor, layout: Layout, at: Coordinates, expected: Sequence[int] | None) -> Partition:
    """Cut along the one dimension that is `etp_size` times too short; whole where none is (then the shape is checked)."""
    short = [dim for dim, (have, want) in enumerate(zip(parameter.shape, expected or (), strict=False)) if have != want]
    if at.etp_size > 1 and len(short) == 1 and expected and parameter.shape[short[0]] * at.etp_size == expected[short[0]]:
        return Partition("etp", at.etp_size, short[0], layout.interleaved, at.ep_size)
    return Partition("etp", ep=at.ep_size)


def gather_shards(all_gather: Collective, name: str, parameters: Sequence[torch.Tensor], partitions: Sequence[Partition]
                  ) -> list[Shards]:
    """The shards of each parameter. One collective per group for all of them together; none where nothing is cut.

    Everything is prepared before the first collective is entered. What fails after that is a `GatherError`: the peers have
    gone on, so that this gather cannot be joined again.
    """
    for parameter in parameters:
        if parameter.numel() == 0:
            # GatherError, although nothing was entered: this rank cannot join any gather of it, so the export is over here.
            raise GatherError(f"{name} has no storage on this rank (shape {list(parameter.shape)}): it was offloaded after the "
                              f"sync was set up. Load the model back to the device before update_weights()")
    shards = [[parameter.detach()] for parameter in parameters]
    by_groups: dict[tuple[GatherGroup, ...], list[int]] = {}
    for index, partition in enumerate(partitions):
        if partition.groups:
            by_groups.setdefault(partition.groups, []).append(index)
    sent = {groups: sendable([shards[index][0] for index in indices]) for groups, indices in by_groups.items()}
    entered = False
    try:
        for groups, indices in by_groups.items():
            gathered, members = [sent.pop(groups)], 1
            for group in groups:
                gathered = all_gather(gathered[0] if len(gathered) == 1 else torch.cat(gathered), group)
                entered, members = True, members * len(gathered)
            for index, mine in zip(indices, _taken_apart(gathered, members, [shards[i][0] for i in indices]), strict=True):
                shards[index] = mine
    except GatherError:
        raise
    except Exception as error:
        if entered:
            raise GatherError(f"{name}: failed between two gathers of one unit: {error}") from error
        raise
    return shards


def sendable(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What goes into one collective for all of `tensors`. Contiguous: gloo and NCCL read the bytes that follow the first
    element, whatever the strides say."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])


def _taken_apart(gathered: Sequence[torch.Tensor], members: int, mine: Sequence[torch.Tensor]) -> list[Shards]:
    """What `sendable` of all `members` has put together, by tensor and member. Views, except where bytes are misaligned."""
    pieces = [as_bytes(piece) for one in gathered for piece in one.chunk(members // len(gathered))]
    specs = [(tensor.dtype, tensor.shape) for tensor in mine]
    return [list(shards) for shards in zip(*(unpack(piece, specs) for piece in pieces), strict=True)]


def join_shards(shards: Sequence[torch.Tensor], partition: Partition) -> torch.Tensor:
    """The full Megatron tensor: block by block, the slices of all ranks along the partition dimension."""
    if partition.ranks == 1:
        return shards[0]
    blocks = zip(*(shard.chunk(partition.blocks, partition.dim) for shard in shards), strict=True)
    return torch.cat([piece for block in blocks for piece in block], partition.dim)
