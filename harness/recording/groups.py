"""The trainer's own collectives: control groups and gather groups, matched by order of call as gloo does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from harness.recording.kernel import Kernel, Waiting
from staged_sync.errors import RanksAbsent


class Collective:
    """One group of ranks. The n-th call of each member belongs together; dead for good after the first time-out."""

    def __init__(self, kernel: Kernel, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = tuple(members)
        self.absent: tuple[int, ...] = ()
        self._kernel = kernel
        self._turn: dict[int, int] = dict.fromkeys(self.members, 0)
        self._operations: dict[int, str] = {}
        self._boxes: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def exchange(self, rank: int, value: Any, *, operation: str, timeout_s: float) -> list[Any]:
        """Everybody's value of this turn, by group rank. Raises `RanksAbsent`, naming them, when some do not come."""
        self._kernel.touch((self.name, "absent"), "read")
        if self.absent:
            raise self._broken(operation)
        turn = self._turn[rank]
        self._turn[rank] += 1
        box = self._boxes[turn]
        self._kernel.touch((self.name, turn), "add")
        box[rank] = value
        self._compare(turn, rank, operation)
        self._kernel.wait(lambda: bool(self.absent) or len(box) == len(self.members),
                          Waiting(operation, self.name, missing=lambda: ranks_text(self._missing(box))),
                          deadline_s=self._kernel.now_s + timeout_s)
        self._kernel.touch((self.name, turn), "await")
        if len(box) == len(self.members):
            self._boxes.pop(turn, None)
            self._operations.pop(turn, None)
            return [box[member] for member in self.members]
        self._kernel.touch((self.name, "absent"), "write")
        self.absent = self.absent or self._missing(box)
        raise self._broken(operation, f" within {timeout_s:g} s")

    def count_anew(self) -> None:
        """Between two runs, when nobody is inside: turns are counted from 0 again."""
        self._turn = dict.fromkeys(self.members, 0)

    def _compare(self, turn: int, rank: int, operation: str) -> None:
        first = self._operations.setdefault(turn, operation)
        if operation != first:
            self._kernel.note(f"mismatch: in group {self.name}, turn {turn}, rank {rank} calls '{operation}' where others call "
                              f"'{first}'")

    def _broken(self, operation: str, when: str = ", earlier; the group is dead since") -> RanksAbsent:
        return RanksAbsent(f"{operation} in group {self.name}: {ranks_text(self.absent)} did not come{when}", self.absent)

    def _missing(self, box: dict[int, Any]) -> tuple[int, ...]:
        return tuple(member for member in self.members if member not in box)


class RecordedControlGroup:
    """One rank's end of one generation."""

    def __init__(self, collective: Collective, rank: int) -> None:
        self._collective = collective
        self._rank = rank
        self._closed = False

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if self._closed:
            raise RuntimeError(f"rank {self._rank} uses {self._collective.name} after close()")
        if not isinstance(payload, bytes):
            raise TypeError(f"a status payload is bytes, not {type(payload).__name__}")
        return self._collective.exchange(self._rank, payload, operation="barrier", timeout_s=finite(timeout_s))

    def close(self) -> None:
        self._closed = True


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def finite(timeout_s: float) -> float:
    """Rule 11: no wait without a deadline."""
    if not 0 <= timeout_s < math.inf:
        raise ValueError(f"timeout_s must be finite and not negative (got {timeout_s}): no wait without a deadline")
    return timeout_s
