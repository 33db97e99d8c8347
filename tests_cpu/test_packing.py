"""The packed wire format against a slow decoder that shares no code with it: plain bytes and struct."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staged_sync.packing import as_bytes, misaligned, nbytes_of, pack, plan_chunks, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Element by element, least significant byte first, from the elements' bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    code = {torch.uint8: "B", torch.int16: "h", torch.int32: "i", torch.int64: "q"}[bits]
    return b"".join(struct.pack(f"<{code}", value) for value in tensor.reshape(-1).view(bits).tolist())


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Random bits of any dtype, 0-dim, empty, and views at odd offsets into their storage."""
    made = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=6)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        numel, offset = torch.Size(shape).numel(), draw(st.integers(0, 3))
        content = draw(st.binary(min_size=(numel + offset) * dtype.itemsize, max_size=(numel + offset) * dtype.itemsize))
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        flat = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
        made.append(flat[offset:offset + numel].reshape(shape))
    return made


@given(tensors(), st.integers(1, 40))
@settings(max_examples=300)
def test_packing_and_unpacking_keep_every_bit(bucket: list[torch.Tensor], buffer_size_bytes: int) -> None:
    total = sum(tensor.nbytes for tensor in bucket)
    in_place = list(pack(bucket, buffer_size_bytes, torch.full((total + 3,), 0xFF, dtype=torch.uint8)))
    chunks = list(pack(bucket, buffer_size_bytes))
    assert [bytes_of(chunk) for chunk in in_place] == [bytes_of(chunk) for chunk in chunks]
    assert b"".join(bytes_of(chunk) for chunk in chunks) == b"".join(bytes_of(tensor) for tensor in bucket)
    plan = plan_chunks([tensor.nbytes for tensor in bucket], buffer_size_bytes)
    for chunk, indices in zip(chunks, plan, strict=True):
        for tensor, index in zip(unpack(chunk, [(bucket[i].dtype, bucket[i].shape) for i in indices]), indices, strict=True):
            assert (tensor.dtype, tensor.shape) == (bucket[index].dtype, bucket[index].shape)
            assert bytes_of(tensor) == bytes_of(bucket[index])


@pytest.mark.parametrize(("nbytes", "size", "expected"), [
    ([], 4, []),
    ([4], 4, [[0]]),
    ([4, 4], 4, [[0, 1]]),            # exactly full does not close a chunk; the tensor that takes it over does
    ([5, 4], 4, [[0], [1]]),
    ([2, 2, 1, 4], 4, [[0, 1, 2], [3]]),
    ([100, 1, 1, 100], 4, [[0], [1, 2, 3]]),
    ([0, 0], 4, [[0, 1]]),
    ([5, 0], 4, [[0], [1]]),          # nothing but empty tensors is a chunk of no bytes, on both ends
])
def test_a_chunk_is_closed_by_the_tensor_that_takes_it_over(nbytes: list[int], size: int, expected: list[list[int]]) -> None:
    assert [list(chunk) for chunk in plan_chunks(nbytes, size)] == expected


def test_float32_after_an_odd_number_of_bfloat16() -> None:
    bucket = [torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.5, -2.0])]
    specs = [(tensor.dtype, tensor.shape) for tensor in bucket]
    assert misaligned(specs, 100) == [1]
    assert misaligned(specs, 1) == []  # a chunk of its own begins at its chunk's offset 0
    (chunk,) = pack(bucket, 100)
    assert torch.equal(unpack(chunk, specs)[1], bucket[1])


def test_aligned_tensors_are_views_of_the_chunk() -> None:
    chunk = torch.arange(12, dtype=torch.uint8)
    first, second = unpack(chunk, [(torch.float32, (2,)), (torch.int32, ())])
    assert (first.data_ptr(), second.data_ptr()) == (chunk.data_ptr(), chunk.data_ptr() + 8)


def test_packing_copies() -> None:
    tensor = torch.zeros(4)
    (chunk,) = pack([tensor], 100)
    tensor.fill_(1.0)
    assert not chunk.any()


def test_strided_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        as_bytes(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="not contiguous"):
        list(pack([torch.ones(2, 3).t()], 100))


def test_a_chunk_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a packed chunk of 8 bytes was expected"):
        unpack(torch.zeros(7, dtype=torch.uint8), [(torch.float32, (2,))])
    with pytest.raises(ValueError, match="a packed chunk of 8 bytes was expected"):
        unpack(torch.zeros(2), [(torch.float32, (2,))])


def test_a_buffer_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive, got 0"):
        plan_chunks([1], 0)


def test_sizes_come_from_shape_and_dtype() -> None:
    assert [nbytes_of(spec) for spec in ((torch.bfloat16, (3, 5)), (torch.float32, ()), (torch.int64, (0, 9)))] == [30, 4, 0]
