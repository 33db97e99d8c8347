"""What one trainer rank has at hand during an update, and the first failure it meets."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from staged_sync.config import Settings
from staged_sync.control import Control, Deadline
from staged_sync.errors import DeadlineExceeded, Failure
from staged_sync.hang_report import report
from staged_sync.metrics import Metrics
from staged_sync.seam import Seam, Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.transfer_group import OpenGroup, open_group

logger = logging.getLogger(__name__)


@dataclass
class SourceState:
    """A source's live transfer group and its name; None on ranks without one."""

    group: OpenGroup | None = None
    group_name: str | None = None


@dataclass(frozen=True)
class Rank:
    """This trainer rank's equipment; lives as long as the updater."""

    number: int
    seam: Seam
    trace: Trace
    control: Control
    metrics: Metrics
    settings: Settings
    source: SourceState

    def deadline(self, seconds: float, setting: str) -> Deadline:
        return Deadline(self.seam.now() + seconds, setting)

    def grace(self) -> Deadline:
        """For cleaning up after a failure: outside the phase's deadline, which may be what has failed."""
        return self.deadline(self.settings.timeouts.grace_s, "update_weight_call_timeout")

    def set_group_name(self, name: str | None) -> None:
        if name != self.source.group_name:
            self.source.group_name = name
            self.trace.record("state", detail=f"group_name={name}")

    def open_group(self, fleet: Fleet, name: str, wire: Wire, deadline: Deadline) -> None:
        """Open the transfer group `name` as this rank's live one."""
        self.set_group_name(name)
        with self.trace.at(group=name):
            self.source.group = open_group(self.seam, self.trace, fleet, name, wire, deadline,
                                           timeouts=self.settings.timeouts, address=self.settings.address,
                                           port_range=self.settings.port_range)

    def close_group(self) -> None:
        """Close the live transfer group, if there is one. Bounded; tried again by whoever clears up, if it raises."""
        if self.source.group is not None:
            self.source.group.close()
            self.source.group = None


class FirstFailure:
    """Keeps the first error of this rank until the next status barrier carries it to all others."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.failure: Failure | None = None

    def __bool__(self) -> bool:
        return self.failure is not None

    def keep(self, error: Exception) -> None:
        """Note `error` and close the transfer group, so that no engine waits for a broadcast that will not come."""
        rank = self._rank
        rank.trace.record("error", detail=f"{type(error).__name__}: {error}".splitlines()[0])
        if self.failure is None:
            if isinstance(error, DeadlineExceeded):
                report(error, rank.seam, rank.trace, rank.settings.report_folder)
            where = rank.trace.position_of(error).text()
            self.failure = Failure(rank.number, where, type(error).__name__, str(error))
            logger.error("weight update: rank %d fails (%s)", rank.number, where, exc_info=error)
        self.drop_group()

    def drop_group(self) -> None:
        try:
            self._rank.close_group()
        except Exception:
            logger.warning("the transfer group could not be closed after a failure", exc_info=True)
            self._rank.source.group = None
