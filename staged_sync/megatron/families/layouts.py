"""Layouts: how one full Megatron tensor holds one or several HF tensors.

A layout is a pair of pure functions on full (unsharded) tensors of any dtype, on any device including `meta`; both
directions keep every bit. Layouts mirror megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from staged_sync.megatron.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Layout:
    """`split`: full Megatron tensor -> HF tensors; `join`: back.

    `interleaved`: how many blocks of its partition dimension each tensor parallel rank holds a slice of (1: one slice
    of the whole; 2: a slice of the first half, then one of the second).
    """

    split: Callable[[torch.Tensor, Sizes], Sequence[torch.Tensor]]
    join: Callable[[Sequence[torch.Tensor], Sizes], torch.Tensor]
    interleaved: int = 1


def _split_qkv(qkv: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    per_group = sizes.num_attention_heads // sizes.num_query_groups
    groups = qkv.unflatten(0, (sizes.num_query_groups, per_group + 2, sizes.kv_channels))
    return [part.flatten(0, 2) for part in groups.split([per_group, 1, 1], dim=1)]


def _join_qkv(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    return torch.cat([part.unflatten(0, (sizes.num_query_groups, -1, sizes.kv_channels)) for part in parts],
                     dim=1).flatten(0, 2)


WHOLE = Layout(lambda full, sizes: [full], lambda parts, sizes: parts[0])
"""The same tensor on both sides."""

QKV = Layout(_split_qkv, _join_qkv)
"""Rows [group, (queries per group + key + value), head]: the query heads of a group, then its key, then its value head.

`SelfAttention.get_query_key_value_tensors` (megatron/core/transformer/attention.py): "q1 q2 k1 v1 | q3 q4 k2 v2 | …".
Tensor parallel ranks hold equal slices of these rows, also with fewer groups than ranks: then a slice ends inside a
group, and the full tensor is still their concatenation. Weight (qkv, hidden) or bias (qkv,).
"""

GATED = Layout(lambda full, sizes: full.chunk(2), lambda parts, sizes: torch.cat(list(parts)), interleaved=2)
"""Rows [gate | up]; each tensor parallel rank holds [its slice of gate | its slice of up].

`MLP.forward` (megatron/core/transformer/mlp.py) chunks the local output in two; 0.16.1 marks it with
partition_stride=2.
"""

VOCABULARY = Layout(lambda full, sizes: [full[:sizes.vocab_size]], lambda parts, sizes: parts[0])
"""The vocabulary's rows, then padding rows up to a multiple of Megatron's choice, which HF does not have.

`join` returns the rows without padding.
"""
