"""All ranks of one stage in one thread: greenlets that stop in a gather until every member of the group has come.

What a rank puts into a gather is taken as a transport takes it: the bytes that follow the first element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

from staged_sync.seam import Coordinates

T = TypeVar("T")


class Lockstep:
    """Runs ranks against each other. Raises AssertionError where they would hang, with who waits where."""

    def __init__(self) -> None:
        self._hub: greenlet | None = None
        self._slots: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._moved = False

    def run(self, ranks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Every rank's result. A rank's exception is raised at once."""
        self._hub = getcurrent()
        results: dict[int, T] = {}
        tasks = {rank: greenlet(function) for rank, function in ranks.items()}
        while tasks:
            self._moved = False
            for rank, task in list(tasks.items()):
                value = task.switch()
                if task.dead:
                    results[rank] = value
                    del tasks[rank]
                    self._moved = True
            if tasks and not self._moved:
                waiting = {key: sorted(slot) for key, slot in self._slots.items() if len(slot) < key[-1]}
                raise AssertionError(f"ranks {sorted(tasks)} wait for ever; who has come to which gather: {waiting}")
        return results

    def all_gather(self, at: Coordinates, tensor: torch.Tensor, group: str) -> list[torch.Tensor]:
        member, size, others = group_of(at, group)
        name = (group, *others)
        number = self._counts[at.rank, name] = self._counts.get((at.rank, name), -1) + 1
        slot = self._slots.setdefault((*name, number, size), {})
        slot[member] = shipped(tensor)
        self._moved = True
        while len(slot) < size:
            assert self._hub is not None
            self._hub.switch()
        gathered = [slot[rank] for rank in range(size)]
        assert len({(t.shape, t.dtype) for t in gathered}) == 1, f"gather {name} of different shapes or dtypes"
        return gathered


def group_of(at: Coordinates, group: str) -> tuple[int, int, tuple[int, ...]]:
    """A rank's place in one of its groups, the group's size, and what tells this group from others of its kind."""
    return {"tp": (at.tp, at.tp_size, (at.pp, at.dp)),
            "etp": (at.etp, at.etp_size, (at.pp, at.ep, at.edp)),
            "ep": (at.ep, at.ep_size, (at.pp, at.etp, at.edp))}[group]


def shipped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transport sends: the bytes that follow the first element, whatever the strides say."""
    count = tensor.numel()
    available = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.detach().as_strided((min(count, available),), (1,)).clone()
    return flat.resize_(count).view(tensor.shape)
