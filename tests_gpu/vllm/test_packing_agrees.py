"""Our packed wire format against vLLM's own code, byte for byte."""

from __future__ import annotations

import pytest
import torch

from staged_sync.packing import misaligned, pack, plan_chunks, unpack

pytestmark = pytest.mark.beyond_main_job

TENSORS = [torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.tensor(2.5), torch.ones(5, dtype=torch.bfloat16),
           torch.zeros(0, 4, dtype=torch.bfloat16), torch.arange(9, dtype=torch.int64), torch.ones(3, dtype=torch.uint8),
           torch.linspace(0, 1, 40, dtype=torch.float16)]
SPECS = [(t.dtype, t.shape) for t in TENSORS]


def vllm_chunks(buffer_size_bytes: int) -> list[object]:
    from vllm.distributed.weight_transfer import packed_tensor

    named, chunks = iter([(str(i), t) for i, t in enumerate(TENSORS)]), []
    while (chunk := packed_tensor.pack_tensors(named, lambda item: item[1], buffer_size_bytes)) is not None:
        chunks.append(chunk)
    return chunks


@pytest.mark.filterwarnings("ignore:Tensor '.*' has size:UserWarning")  # vLLM warns where one tensor is over the size
@pytest.mark.parametrize("buffer_size_bytes", [1, 10, 48, 52, 63, 200, 1 << 20])
def test_chunks_are_vllms(buffer_size_bytes: int, vllm_cpu: None) -> None:
    theirs = vllm_chunks(buffer_size_bytes)
    ours = list(pack(TENSORS, buffer_size_bytes))
    assert len(ours) == len(theirs)
    for mine, chunk in zip(ours, theirs, strict=True):
        assert torch.equal(mine, chunk.packed_tensor)
    plan = plan_chunks([t.nbytes for t in TENSORS], buffer_size_bytes)
    assert [[str(i) for i in chunk] for chunk in plan] == [chunk.names for chunk in theirs]


@pytest.mark.filterwarnings("ignore:Tensor '.*' has size:UserWarning")
@pytest.mark.parametrize("buffer_size_bytes", [1, 10, 48, 52, 63, 200, 1 << 20])
def test_vllm_unpacks_what_we_do_not_call_misaligned(buffer_size_bytes: int, vllm_cpu: None) -> None:
    """And raises where we do: an int64 after five bfloat16 begins at an offset that torch refuses to view."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    bad = set(misaligned(SPECS, buffer_size_bytes))
    for chunk, theirs in zip(plan_chunks([t.nbytes for t in TENSORS], buffer_size_bytes), vllm_chunks(buffer_size_bytes),
                             strict=True):
        arguments = (theirs.packed_tensor, theirs.names, theirs.shapes, theirs.dtypes, theirs.tensor_sizes)
        if bad & set(chunk):
            with pytest.raises(RuntimeError, match="storage_offset"):
                unpack_tensor(*arguments)
            continue
        ours = unpack(theirs.packed_tensor, [SPECS[i] for i in chunk])
        for (name, tensor), mine in zip(unpack_tensor(*arguments), ours, strict=True):
            assert torch.equal(tensor, mine) and torch.equal(tensor, TENSORS[int(name)])


def test_there_are_misaligned_tensors_in_this_test() -> None:
    assert misaligned(SPECS, 1 << 20) == [4, 6]
