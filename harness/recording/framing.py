"""How a bucket becomes broadcasts: one per tensor, or packed into chunks by vLLM's rule.

Written from the wire format, not from the library: a chunk is closed by the tensor that takes it *over* the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.recording.network import Specs
from staged_sync.errors import TransportError
from staged_sync.seam import Wire


def chunks(sizes: Sequence[int], wire: Wire) -> list[list[int]]:
    """Indices of the tensors of each broadcast, given their byte counts."""
    if not wire.packed:
        return [[i] for i in range(len(sizes))]
    result: list[list[int]] = []
    filled = wire.packed_buffer_size_bytes + 1
    for i, size in enumerate(sizes):
        if filled > wire.packed_buffer_size_bytes:
            result.append([])
            filled = 0
        result[-1].append(i)
        filled += size
    return result


def frames(tensors: Sequence[torch.Tensor], wire: Wire) -> list[torch.Tensor]:
    """The bytes of each broadcast. Unpacked frames are the sender's own memory, read when a worker takes them."""
    refuse_strided(tensors)
    parts = [as_bytes(tensor) for tensor in tensors]
    plan = chunks([part.numel() for part in parts], wire)
    return [parts[c[0]] if not wire.packed else torch.cat([parts[i] for i in c]) for c in plan]


def refuse_strided(tensors: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise TransportError(f"tensor {i} of {len(tensors)} in this send is not contiguous (strides {tensor.stride()}): "
                                 f"gloo would ship wrong bytes")


def specs(tensors: Sequence[torch.Tensor], wire: Wire) -> list[Specs]:
    """What each of the `frames` is made of."""
    each = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    return [tuple(each[i] for i in c) for c in chunks([tensor.numel() * tensor.element_size() for tensor in tensors], wire)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
