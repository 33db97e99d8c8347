"""Byte for byte: what arrived against what the checkpoint holds.

Compares `uint8` views, never values: NaN equals NaN, and -0.0 is not 0.0. `total` is always the number of tensors expected,
so "N/N" cannot be reached by sending less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Comparison:
    """`equal` of `total` expected tensors are bit-exact; `problems` says what is wrong with each other one."""

    total: int
    equal: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return self.equal == self.total and not self.problems

    def text(self) -> str:
        lines = [f"{self.equal}/{self.total} tensors bit-exact", *self.problems]
        return "\n  - ".join(lines)


def compare(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> Comparison:
    """Every tensor of `want` must be in `got` with the same bytes, and nothing else may be there."""
    result = Comparison(total=len(want))
    for name, expected in want.items():
        problem = f"{name}: missing" if name not in got else difference(name, got[name], expected)
        if problem is None:
            result.equal += 1
        else:
            result.problems.append(problem)
    result.problems += [f"{name}: not in the checkpoint, but here" for name in got if name not in want]
    return result


def compare_arrivals(arrivals: Iterable[tuple[str, torch.Tensor]], want: Mapping[str, torch.Tensor]) -> Comparison:
    """As `compare`, for tensors in the order in which they came: one that comes twice is a problem even where it is right."""
    got: dict[str, torch.Tensor] = {}
    twice = []
    for name, tensor in arrivals:
        if name in got:
            twice.append(f"{name}: came more than once")
        got[name] = tensor
    result = compare(got, want)
    result.problems += twice
    return result


def difference(name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Where two tensors differ first: shape, dtype, or index and both values. None where they are bit-equal."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name}: expected {_kind(want)}, found {_kind(got)}"
    one, other = _bytes(got), _bytes(want)
    if torch.equal(one, other):
        return None
    wrong = (one != other).any(dim=1)
    first = int(wrong.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), want.shape)) if want.dim() else ()
    return (f"{name} {_kind(want)}: {int(wrong.sum())} of {want.numel()} elements differ, the first at {list(index)}: "
            f"expected {_value(want, first)}, found {_value(got, first)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(elements, bytes per element), on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())


def _value(tensor: torch.Tensor, position: int) -> str:
    raw = bytes(_bytes(tensor)[position].tolist())
    return f"{tensor.detach().cpu().reshape(-1)[position].item()!r} (0x{raw[::-1].hex()})"


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
