"""What a rank brings into the gathers of a pass, in few lines that must be equal on all gather peers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from staged_sync.megatron.families.common import expert_of, layer_of, template_of
from staged_sync.megatron.units import RawUnit


def signature(units: Sequence[RawUnit]) -> list[str]:
    """One line per kind of parameter (name, layers, local experts, shape and dtype of the shard), then one for the order.

    Short whatever the size of the model, since every rank sends it to every other one at connect.
    """
    kinds: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
    order = hashlib.sha256()
    for unit in units:
        moving = [piece for piece in unit.pieces if piece.partition.groups]
        for piece in moving:
            shard = f"{list(piece.parameter.shape)} {str(piece.parameter.dtype).removeprefix('torch.')}"
            layers, experts = kinds.setdefault((template_of(piece.name), shard), (set(), set()))
            layers.update(number for number in [layer_of(piece.name)] if number is not None)
            experts.update(number for number in [expert_of(piece.name)] if number is not None)
        order.update("\n".join([*(piece.name for piece in moving), "unit\n"]).encode() if moving else b"")
    lines = [f"{template.replace('{layer}', _ranges(layers)).replace('{expert}', _ranges(experts))} {shard}"
             for (template, shard), (layers, experts) in kinds.items()]
    return [*lines, f"order and units {order.hexdigest()[:16]}"] if lines else []


def _ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "{0-2,5}"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) + "}"
