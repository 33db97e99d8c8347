"""One stage: its source exports and sends, its gather peers join the gathers, and both drain after a failure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

from tqdm import tqdm

from staged_sync.buckets import Bucketer, Pace, nbytes
from staged_sync.completeness import SentRecord, StageReport
from staged_sync.connect import Connection
from staged_sync.control import Deadline
from staged_sync.errors import CompletenessError, GatherError
from staged_sync.exporter import NamedTensor
from staged_sync.plan import Role, Send, group_name
from staged_sync.rank import FirstFailure, Rank

NOBODY_LOOKS = contextlib.suppress(Exception)
"""Around the progress bar: a terminal that has gone away must not fail an update, nor hide why one failed."""


class Stage:
    """This rank's share in sending `stage`. `call_deadline` gives the deadline of one call inside the running phase,
    `phase_left_s` what is left of the phase; `keep_pace(turn)` waits until all ranks stand before the same bucket, and raises
    where one has failed."""

    def __init__(self, number: int, rank: Rank, link: Connection, failure: FirstFailure, call_deadline: Callable[[], Deadline],
                 phase_left_s: Callable[[], float], keep_pace: Callable[[int], None]) -> None:
        self.number = number
        self._rank = rank
        self._link = link
        self._failure = failure
        self._call_deadline = call_deadline
        self._phase_left_s = phase_left_s
        self._keep_pace = keep_pace
        self._record = SentRecord(number, link.announced[number])
        self._bucket = 0
        self._bar: Any = None

    def open(self) -> None:
        """The source opens vime-pp_{stage}."""
        self._rank.open_group(self._link.fleet, group_name(self.number), self._link.wire, self._call_deadline())

    def synchronize(self) -> None:
        group = self._rank.source.group
        if group is not None:
            with self._rank.trace.at(group=group.name):
                group.synchronize(self._call_deadline())

    def report(self) -> StageReport:
        return self._record.report()

    def end(self) -> None:
        """Take the progress bar away; on every path."""
        if self._bar is not None:
            with NOBODY_LOOKS:
                self._bar.close()
            self._bar = None

    def send(self, part: Send) -> None:
        """Join every gather of `part`; on the source, as long as nothing has failed, convert and send. Keeps what fails.

        Raises `UpdateFailed` where all ranks iterate together and one of them has failed.
        """
        sends = self._link.topology.role(self._rank.number, part.stage, part.part) is Role.SOURCE
        try:
            units = self._link.exporter.units(part.part)
        except Exception as error:
            self._failure.keep(error)
            return  # without its units this rank cannot join any gather: the peers' own deadline applies
        if sends and self._link.announced[self.number]:  # not `units`: an iterator does not say that it is empty
            self._try(self._begin)
        try:
            self._export(units, sends, in_step=part.part == "model")
        except GatherError as error:
            self._failure.keep(error)  # the group is lost: going on would only meet peers that have left it
        finally:
            if isinstance(units, Generator):
                units.close()

    def _export(self, units: Iterable[Any], sends: bool, *, in_step: bool) -> None:
        """Gather every unit; the source sends a bucket whenever one is full. `in_step`: all ranks then wait for it."""
        limit = self._rank.settings.bucket_bytes
        buckets, pace = Bucketer(limit), Pace(limit)
        for unit in units:
            gathered = self._gather(unit)
            if in_step and pace.turns(gathered.nbytes):
                if sends:
                    self._try(self._send_rest, buckets)
                self._keep_pace(pace.turn)
            if sends:
                self._try(self._convert, buckets, unit, gathered)
            del gathered  # or it would still be there while the next unit, as large perhaps, is gathered
        if sends:
            self._try(self._send_rest, buckets)

    def _try(self, function: Callable[..., None], *arguments: Any) -> None:
        """Do something local unless this rank has failed; what it raises is kept for the next barrier."""
        if self._failure:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._failure.keep(error)

    def _convert(self, buckets: Bucketer, unit: Any, gathered: Any) -> None:
        self._send_bucket(buckets.add(list(self._link.exporter.convert(unit, gathered))))

    def _send_rest(self, buckets: Bucketer) -> None:
        self._send_bucket(buckets.flush())

    def _begin(self) -> None:
        if self._rank.source.group is None:
            self.open()  # pp = 1: the persistent group was closed by an earlier failure
        if self._bar is None and sys.stderr.isatty():  # elsewhere nobody sees it, and tqdm starts a thread all the same
            with NOBODY_LOOKS:
                self._bar = tqdm(desc=f"[{group_name(self.number)}] Update weights", unit="B", unit_scale=True, leave=False,
                                 total=sum(meta.nbytes for meta in self._link.announced[self.number]))

    def _gather(self, unit: Any) -> Any:
        """Gather one unit. A failure before the collective was entered is kept, and the collective is joined all the same."""
        gather = self._link.exporter.gather
        try:
            return gather(unit, timeout_s=self._gather_timeout_s())
        except GatherError:
            raise
        except Exception as error:
            self._failure.keep(error)
        try:
            return gather(unit, timeout_s=self._gather_timeout_s())
        except Exception as error:
            raise GatherError(f"{unit.label}: cannot join the gather that its peers are in: {error}") from error

    def _gather_timeout_s(self) -> float:
        """Peers wait here while the source sends a bucket, and a source whose phase is over still has to drain: whoever gave
        up before would leave the group out of step for good. Half the grace, so that a gather that is lost is still told at
        the status barrier."""
        return self._phase_left_s() + self._rank.settings.timeouts.grace_s / 2

    def _send_bucket(self, bucket: list[NamedTensor]) -> None:
        if not bucket:
            return
        rank = self._rank
        if rank.source.group is None:  # a stage that announces nothing opens no group
            raise CompletenessError(f"stage {self.number} announced no tensor at connect and now exports {bucket[0][0]}")
        with rank.trace.at(group=rank.source.group.name, bucket=self._bucket):
            rank.source.group.send_bucket(bucket, self._call_deadline())
        self._record.bucket(bucket)
        self._bucket += 1
        if self._bar is not None:
            with NOBODY_LOOKS:
                self._bar.update(sum(nbytes(tensor) for _, tensor in bucket))
