"""Defects of the failure path: what is given back, drained, told, abandoned."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from staged_sync import transfer_group
from staged_sync.control import Control, Deadline, Status
from staged_sync.errors import GatherError, RanksAbsent
from staged_sync.rank import FirstFailure
from staged_sync.seam import Seam
from staged_sync.session import Session
from staged_sync.stage import Stage
from staged_sync.trace import Trace
from staged_sync.waiting import Pending


def lock_kept() -> AbstractContextManager[Any]:
    """The lock is given back only where nothing has gone wrong."""
    real = transfer_group._release

    def release(seam: Seam, trace: Trace, lock: Any, grace_s: float) -> None:
        if sys.exc_info()[0] is None:
            real(seam, trace, lock, grace_s)
    return patch.object(transfer_group, "_release", release)


def finish_in_finally() -> AbstractContextManager[Any]:
    """The session is finished on every path, so an incomplete one too."""
    real = Session.abandon

    def abandon(self: Session, deadline: Deadline, engines: Any = None) -> list[str]:
        self.finish(1, deadline, 1.0)
        return real(self, deadline)
    return patch.object(Session, "abandon", abandon)


def resume_in_finally() -> AbstractContextManager[Any]:
    """Generation goes on on every path, with whatever the engines hold."""
    real = Session.abandon

    def abandon(self: Session, deadline: Deadline, engines: Any = None) -> list[str]:
        troubles = real(self, deadline)
        self.resume(deadline, 1.0)
        return troubles
    return patch.object(Session, "abandon", abandon)


def no_draining() -> AbstractContextManager[Any]:
    """A rank that has failed leaves the gathers that its peers are in."""
    real = Stage._gather

    def gather(self: Stage, unit: Any) -> Any:
        if self._failure:
            raise GatherError(f"{unit.label}: gave up")
        return real(self, unit)
    return patch.object(Stage, "_gather", gather)


def barrier_without_status() -> AbstractContextManager[Any]:
    """Ranks meet and do not say how they are."""
    real = Control.barrier

    def barrier(self: Control, label: str, status: Status, *, timeout_s: float) -> list[Status]:
        return real(self, label, status._replace(failure=None), timeout_s=timeout_s)
    return patch.object(Control, "barrier", barrier)


def control_group_reused_after_a_timeout() -> AbstractContextManager[Any]:
    """A gloo group that timed out once is used again."""
    return patch.object(Control, "_broken", lambda self, error, label="": RanksAbsent(str(error), error.absent))


def transfer_group_reused_after_a_failure() -> AbstractContextManager[Any]:
    """The persistent group of a failed update is kept for the next."""
    return patch.object(FirstFailure, "drop_group", lambda self: None)


def session_left_open() -> AbstractContextManager[Any]:
    """Nobody clears the session of a failed update."""
    return patch.object(Session, "abandon", lambda self, deadline, engines=None: [])


def lock_without_deadline() -> AbstractContextManager[Any]:
    """The lock is polled for ever."""
    real = transfer_group.lock_held

    def lock_held(seam: Seam, trace: Trace, lock: Any, deadline: Any, *, grace_s: float) -> Any:
        return real(seam, trace, lock, deadline._replace(at_s=1e12), grace_s=grace_s)
    return patch.object(transfer_group, "lock_held", lock_held)


def replies_not_looked_at() -> AbstractContextManager[Any]:
    """An engine that answers False is taken to have done what it was asked."""
    return patch.object(Pending, "value", lambda self: self.work.result())
