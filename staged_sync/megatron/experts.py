"""Experts: which global number a local one has, and Megatron's grouped container taken apart.

Expert parallel rank `r` of `ep` holds experts `r·n … r·n + n - 1`, with n = num_moe_experts / ep (`BaseMoELayer`,
megatron/core/transformer/moe/moe_layer.py, `local_expert_indices`). Megatron builds no other distribution; whoever does
is refused here, because names would be wrong on every rank but the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from staged_sync.megatron.families.common import expert_of, layer_of
from staged_sync.seam import Coordinates

_GROUPED = re.compile(r".*\.experts\.weight([12])")


def take_apart(name: str, parameter: torch.Tensor, container: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The experts inside one parameter of `GroupedMLP` (megatron/core/transformer/moe/experts.py), as views; other
    parameters as they are.

    `weight1` (hidden, n·2·ffn/etp) is read there as (n, hidden, 2·ffn/etp), `weight2` (n·ffn/etp, hidden) as (n, ffn/etp,
    hidden): each expert's matrix is transposed, as a linear layer's is not. The names get the local number: `weight1.0`.
    Raises ValueError where the parameter does not divide into its container's `num_local_experts`.
    """
    if not (grouped := _GROUPED.fullmatch(name)):
        return [(name, parameter)]
    count = getattr(container, "num_local_experts", None)
    if isinstance(count, int) and parameter.numel() == 0:
        return [(f"{name}.{i}", parameter) for i in range(count)]  # offloaded: said elsewhere, by name
    if not isinstance(count, int) or count < 1 or parameter.dim() != 2 or parameter.numel() % count:
        raise ValueError(f"{name} {list(parameter.shape)} does not divide into its container's num_local_experts={count!r}")
    hidden = parameter.shape[0] if grouped[1] == "1" else parameter.shape[1]
    each = (hidden, -1) if grouped[1] == "1" else (-1, hidden)
    matrices = parameter.detach().view(count, *each).transpose(1, 2)
    return [(f"{name}.{i}", matrix) for i, matrix in enumerate(matrices)]


def global_number(local: int, ep_rank: int, at: Coordinates, experts: int) -> int:
    """The number of the expert that is `local` on expert parallel rank `ep_rank`."""
    return ep_rank * (experts // at.ep_size) + local


def distribution_problems(names: Iterable[str], at: Coordinates, experts: int | None) -> list[str]:
    """What is wrong with the experts of this rank, one sentence per kind of layer; empty where there are none."""
    local: dict[tuple[str, int | None], set[int]] = {}
    for name in names:
        if (expert := expert_of(name)) is not None:
            local.setdefault((name.partition("layers.")[0], layer_of(name)), set()).add(expert)
    if not local:
        return []
    if experts is None:
        return ["num_moe_experts is unknown: neither the model's config nor args has it, and the numbers of the experts "
                "depend on it"]
    if experts % at.ep_size:
        return [f"num_moe_experts must be a multiple of the expert parallel size (got {experts} experts over {at.ep_size} "
                f"ranks): which rank holds which expert would be unknown"]
    want = set(range(experts // at.ep_size))
    wrong: dict[tuple[int, ...], list[str]] = {}
    for (prefix, layer), have in local.items():
        if have != want:
            wrong.setdefault(tuple(sorted(have)), []).append(f"{prefix}layers.{layer}")
    return [f"{', '.join(layers)}: this rank (expert parallel rank {at.ep} of {at.ep_size}) holds local experts {list(have)}; "
            f"{experts} experts over {at.ep_size} ranks are {len(want)} on each. Uneven experts are not supported"
            for have, layers in wrong.items()]
