"""The packed wire format: a bucket of tensors as a few uint8 chunks. Pure, needs torch only.

Mirrors vllm/distributed/weight_transfer/packed_tensor.py (`pack_tensors`, `packed_nccl_broadcast_consumer`,
`unpack_tensor`): tensors are laid end to end without padding, in the order in which they are announced, and a chunk is
closed by the tensor that takes it *over* `buffer_size_bytes`. So a chunk may be longer than that, by less than one tensor,
and a tensor is never split. Both ends cut by the same sizes; nothing on the wire says where a chunk ends.

One difference, on the receiving side only: without padding, a tensor may begin at an offset that is no multiple of its item
size (a float32 norm after an odd number of bfloat16 values). torch refuses to view such bytes, and vLLM's `unpack_tensor`
raises RuntimeError there. `unpack` copies these tensors instead. `misaligned` finds them beforehand, for receivers that
are stock vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

Spec: TypeAlias = tuple[torch.dtype, Sequence[int]]
"""dtype and shape of one tensor, without its bytes."""


def nbytes_of(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def plan_chunks(nbytes: Sequence[int], buffer_size_bytes: int) -> list[range]:
    """Which tensors share a chunk: index ranges that cover `range(len(nbytes))` in order; none is empty.

    `nbytes` are the tensors' sizes in bytes. Raises ValueError where `buffer_size_bytes` is not positive.
    """
    if buffer_size_bytes <= 0:
        raise ValueError(f"packed buffer size must be positive, got {buffer_size_bytes} bytes")
    chunks: list[range] = []
    start = filled = 0
    for index, size in enumerate(nbytes):
        filled += size
        if filled > buffer_size_bytes:
            chunks.append(range(start, index + 1))
            start, filled = index + 1, 0
    if start < len(nbytes):
        chunks.append(range(start, len(nbytes)))
    return chunks


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-d uint8 view of the same memory (0-dim and empty tensors too).

    Raises ValueError where the tensor is not contiguous: its memory is then not its bytes in order.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8)


def pack(tensors: Sequence[torch.Tensor], buffer_size_bytes: int, memory: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """The chunks of a bucket, one after the other: 1-d uint8 tensors that hold copies. They are fresh ones, or lie one behind
    the other in `memory` (1-d uint8, at least as long as the bucket's bytes).

    Lazy, so that a sender need not hold all copies at once. Raises ValueError where a tensor is not contiguous.
    """
    pieces = [as_bytes(tensor) for tensor in tensors]
    offset = 0
    for chunk in plan_chunks([piece.numel() for piece in pieces], buffer_size_bytes):
        parts = [pieces[index] for index in chunk]
        end = offset + sum(part.numel() for part in parts)
        yield torch.cat(parts) if memory is None else torch.cat(parts, out=memory[offset:end])
        offset = end


def unpack(chunk: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """The tensors laid end to end in `chunk` (1-d uint8): views of it, or copies where the bytes are not aligned.

    Raises ValueError where `chunk` is not exactly as long as `specs` say.
    """
    sizes = [nbytes_of(spec) for spec in specs]
    if chunk.dtype != torch.uint8 or chunk.dim() != 1 or chunk.numel() != sum(sizes):
        raise ValueError(f"a packed chunk of {sum(sizes)} bytes was expected, "
                         f"got {chunk.dtype} of shape {tuple(chunk.shape)}")
    tensors = []
    offset = 0
    for (dtype, shape), size in zip(specs, sizes, strict=True):
        tensors.append(_view(chunk[offset:offset + size], dtype).view(tuple(shape)))
        offset += size
    return tensors


def misaligned(specs: Sequence[Spec], buffer_size_bytes: int) -> list[int]:
    """Indices of the tensors that begin at an offset of their chunk which stock vLLM's `unpack_tensor` cannot view."""
    found = []
    for chunk in plan_chunks([nbytes_of(spec) for spec in specs], buffer_size_bytes):
        offset = 0
        for index in chunk:
            if offset % specs[index][0].itemsize:
                found.append(index)
            offset += nbytes_of(specs[index])
    return found


def _view(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`piece` (1-d uint8) as `dtype`. torch views only at storage offsets that are a multiple of the item size."""
    if piece.storage_offset() % dtype.itemsize or piece.data_ptr() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)
