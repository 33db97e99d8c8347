"""Status barriers, deadlines, and the generations of the control group they run on.

A status barrier is one logical call on all trainer ranks: everybody brings its status, everybody learns all of them. After
one time-out a gloo group is dead for good, so a group that failed is reported broken to all ranks and replaced, by number,
at the next update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from staged_sync.errors import DeadlineExceeded, Failure, RanksAbsent
from staged_sync.seam import ControlGroup, Seam
from staged_sync.trace import Trace


class Deadline(NamedTuple):
    """A point on the seam's clock, and the setting that put it there (for the error text)."""

    at_s: float
    setting: str

    def within(self, now_s: float, seconds: float, setting: str) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return self if self.at_s <= now_s + seconds else Deadline(now_s + seconds, setting)

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.at_s - now_s)

    def expired(self, where: str, waiting_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer in time ({where}): still waiting for {waiting_for}. The deadline is "
                                f"args.{self.setting}; see the hang report for who waits for whom")


class Status(NamedTuple):
    """What one rank brings to a status barrier. An empty one costs no bytes."""

    failure: Failure | None = None
    data: Mapping[str, Any] = MappingProxyType({})

    def encode(self) -> bytes:
        if self.failure is None and not self.data:
            return b""
        failure = None if self.failure is None else [self.failure.rank, self.failure.where, self.failure.kind,
                                                     self.failure.message]
        return json.dumps({"failure": failure, "data": dict(self.data)}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Status:
        if not payload:
            return NOTHING_TO_SAY
        fields = json.loads(payload.decode())
        return cls(None if fields["failure"] is None else Failure(*fields["failure"]), fields["data"])


NOTHING_TO_SAY = Status()

CALL = "call"
"""In the first status of every call of the library: which one it is."""


def different_calls(statuses: Sequence[Status]) -> str:
    """Who is in which call, where not all ranks are in the same one; else empty. Asked of the first statuses of a call."""
    firsts: dict[str, int] = {}
    for rank, status in enumerate(statuses):
        firsts.setdefault(status.data[CALL], rank)
    if len(firsts) == 1:
        return ""
    return (f"{', '.join(f'rank {rank} is in {call}' for call, rank in firsts.items())}. Each is a collective over all trainer "
            f"ranks: call connect_rollout_engines() on every rank, then update_weights() on every rank")


class Control:
    """This rank's end of the control group, over all its generations."""

    def __init__(self, seam: Seam, trace: Trace) -> None:
        self._seam = seam
        self._trace = trace
        self._group: ControlGroup | None = None
        self._generation = -1
        self._attempt = 0  # of connecting or updating: counted alike on all ranks

    def ensure_open(self, *, timeout_s: float) -> None:
        """Open the control group, or the next generation if any rank reported the current one broken. A collective then.

        Raises `RanksAbsent` where some rank does not come.
        """
        self._attempt += 1
        wanted = self._seam.broken_control_generation() + 1
        if self._group is not None and self._generation >= wanted:
            return
        if self._group is not None:
            self._hear_who_left()
        self.close()
        self._generation = wanted
        with self._trace.waiting("barrier", detail=f"control group {wanted}"):
            try:
                self._group = self._seam.open_control_group(wanted, timeout_s=timeout_s)
            except RanksAbsent as error:
                raise self._broken(error) from error

    def barrier(self, label: str, status: Status, *, timeout_s: float) -> list[Status]:
        """Meet all ranks; every rank's status by rank. Raises `RanksAbsent` with one text on all ranks."""
        with self._trace.waiting("barrier", detail=label):
            return self._exchange(label, status, timeout_s)

    def keep_pace(self, label: str, status: Status, *, timeout_s: float) -> list[Status]:
        """As `barrier`, inside one pass: how often depends on the bytes that are exported, so it is no step of the plan and no
        event of the trace."""
        with self._trace.waits_for(label):
            return self._exchange(label, status, timeout_s)

    def _exchange(self, label: str, status: Status, timeout_s: float) -> list[Status]:
        if self._group is None:
            raise RanksAbsent(f"status barrier '{label}': the control group is closed after an earlier failure; it is "
                              f"reopened by the next update_weights() or connect_rollout_engines()", None)
        try:
            payloads = self._group.exchange(status.encode(), timeout_s=timeout_s)
        except RanksAbsent as error:
            raise self._broken(error, label) from error
        statuses = {payload: Status.decode(payload) for payload in set(payloads)}  # mostly all ranks say the same
        return [statuses[payload] for payload in payloads]

    def give_up(self, reason: str) -> None:
        """This rank will not come to the next barrier: close the group and tell the others why. They open the next
        generation at their next update, and so does this rank."""
        if self._group is not None:
            # First: closing would look like a lost connection.
            self._seam.report_broken_control(self._generation, f"{self._this_attempt()}{reason}")
            self.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _hear_who_left(self) -> None:
        """The group was reported broken while this rank thought it well: a rank left after the last barrier of an earlier
        attempt, which is over, or before the first one of this attempt, which cannot go on without it."""
        reason = self._seam.report_broken_control(self._generation, "a rank left without saying why")
        if reason.startswith(self._this_attempt()):
            self.close()
            raise RanksAbsent(reason, None)

    def _this_attempt(self) -> str:
        return f"weight sync call {self._attempt}: "

    def _broken(self, error: RanksAbsent, label: str = "opening the control group") -> RanksAbsent:
        self.close()
        reason = self._seam.report_broken_control(self._generation, f"status barrier '{label}': {error}")
        return RanksAbsent(reason, error.absent)
