"""The trainer's own collectives: control groups and gather groups, matched by order of call as gloo does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.recording.kernel import Kernel, Waiting
from staged_sync.errors import RanksAbsent


@dataclass(slots=True, eq=False)
class Meeting:
    """One turn of a group: what each member has brought. `over` is no longer empty once all have come, or never will."""

    thing: tuple[str, int]
    operation: str
    brought: dict[int, Any] = field(default_factory=dict)
    over: list[bool] = field(default_factory=list)


class Collective:
    """One group of ranks. The n-th call of each member belongs together; dead for good after the first time-out."""

    def __init__(self, kernel: Kernel, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = tuple(members)
        self.absent: tuple[int, ...] = ()
        self._kernel = kernel
        self._turn: dict[int, int] = dict.fromkeys(self.members, 0)
        self._meetings: dict[int, Meeting] = {}
        self._dead = (name, "absent")

    def exchange(self, rank: int, value: Any, *, operation: str, timeout_s: float) -> list[Any]:
        """Everybody's value of this turn, by group rank. Raises `RanksAbsent`, naming them, when some do not come."""
        kernel, members = self._kernel, self.members
        kernel.touch(self._dead, "read")
        if self.absent:
            raise self._broken(operation)
        meeting = self._come(rank, value, operation)
        kernel.wait(meeting.over.__len__, Waiting(operation, self.name, lambda: ranks_text(self._missing(meeting))),
                    deadline_s=kernel.now_s + timeout_s)
        kernel.touch(meeting.thing, "await")
        brought = meeting.brought
        if len(brought) == len(members):
            return [brought[member] for member in members]
        kernel.touch(self._dead, "write")
        self.absent = self.absent or self._missing(meeting)
        for unfinished in self._meetings.values():
            unfinished.over.append(True)
        raise self._broken(operation, f" within {timeout_s:g} s")

    def count_anew(self) -> None:
        """Between two runs, when nobody is inside: turns are counted from 0 again."""
        self._turn = dict.fromkeys(self.members, 0)

    def _come(self, rank: int, value: Any, operation: str) -> Meeting:
        turn = self._turn[rank]
        self._turn[rank] = turn + 1
        meeting = self._meetings.get(turn)
        if meeting is None:
            meeting = self._meetings[turn] = Meeting((self.name, turn), operation)
        elif operation != meeting.operation:
            self._kernel.note(f"mismatch: in group {self.name}, turn {turn}, rank {rank} calls '{operation}' where others call "
                              f"'{meeting.operation}'")
        self._kernel.touch(meeting.thing, "add")
        meeting.brought[rank] = value
        if len(meeting.brought) == len(self.members):
            meeting.over.append(True)
            del self._meetings[turn]
        return meeting

    def _broken(self, operation: str, when: str = ", earlier; the group is dead since") -> RanksAbsent:
        return RanksAbsent(f"{operation} in group {self.name}: {ranks_text(self.absent)} did not come{when}", self.absent)

    def _missing(self, meeting: Meeting) -> tuple[int, ...]:
        return tuple(member for member in self.members if member not in meeting.brought)


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
