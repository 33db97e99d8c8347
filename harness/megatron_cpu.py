"""What megatron-core 0.16.1 needs to run forward on a CPU: three calls that insist on CUDA, each with its reason.

`install()` once per process, before models are built. It does nothing where CUDA is available.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def install() -> None:
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    # RotaryEmbedding.forward moves its frequencies to the current device.
    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    # LanguageModule.setup_embeddings_and_output_layer moves a tied head's weight with `.cuda()` before its all-reduce.
    torch.Tensor.cuda = _stay  # type: ignore[assignment,method-assign]
    # DotProductAttention and dropout enter the tracker of CUDA random states, which cannot be seeded without CUDA.
    random.CudaRNGStatesTracker.fork = _no_fork


def _cpu() -> torch.device:
    return torch.device("cpu")


def _stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


@contextlib.contextmanager
def _no_fork(self: Any, name: str = "") -> Iterator[None]:
    yield
