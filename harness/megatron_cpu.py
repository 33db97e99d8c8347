"""What megatron-core 0.16.1 needs to run forward on a CPU without Transformer Engine: each patch with its reason.

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
    from megatron.core.transformer.moe import moe_utils

    # RotaryEmbedding.forward moves its frequencies to the current device; TopKRouter makes its buffers there.
    torch.cuda.current_device = _cpu  # type: ignore[assignment]
    # LanguageModule.setup_embeddings_and_output_layer moves a tied head's weight with `.cuda()` before its all-reduce.
    torch.Tensor.cuda = _stay  # type: ignore[assignment,method-assign]
    # DotProductAttention and dropout enter the tracker of CUDA random states, which cannot be seeded without CUDA.
    random.CudaRNGStatesTracker.fork = _no_fork
    # The all-to-all dispatcher of experts makes a side stream for its copies to the host.
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment,misc]
    # The router asks whether this is None; without Transformer Engine the name does not exist.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _latent_attention()


def _latent_attention() -> None:
    """The local DotProductAttention does not take `k_channels` and `v_channels`, and MLA asks whether its linears are
    instances of a class that is None without Transformer Engine."""
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    stock = DotProductAttention.__init__
    if hasattr(stock, "takes_channels"):
        return

    def init(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if v_channels is not None:  # what it flattens its output to; nothing else depends on it
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    init.takes_channels = True  # type: ignore[attr-defined]
    DotProductAttention.__init__ = init
    mla.HAVE_TE = False
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(mla, name, None), type):
            setattr(mla, name, _NotThere)


class _NotThere:
    """Nothing is an instance of it."""


class _Stream:
    """A CUDA stream where there is none: everything has been done when it is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return self


def _cpu() -> torch.device:
    return torch.device("cpu")


def _stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


@contextlib.contextmanager
def _no_fork(self: Any, name: str = "") -> Iterator[None]:
    yield
