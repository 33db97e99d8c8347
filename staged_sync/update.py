"""One update on one trainer rank: executes the plan step by step and agrees with all other ranks at every barrier.

An error of this rank is kept, brought to the next status barrier, and raised on all ranks there. Until then the rank goes on
joining every collective that its peers need (draining), sends nothing and asks nobody for anything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

from staged_sync.completeness import StageReport, judge
from staged_sync.connect import Connection
from staged_sync.control import Deadline, Status, different_calls
from staged_sync.errors import Aftermath, CompletenessError, Failure, RanksAbsent, UpdateFailed
from staged_sync.hang_report import report
from staged_sync.in_step import FIRST, TURN, first_words, other_connections, out_of_step, why_absent
from staged_sync.plan import Barrier, Close, Lead, LeadAction, Open, Phase, Send, Step, Synchronize, takes_part
from staged_sync.rank import FirstFailure, Rank
from staged_sync.session import Session
from staged_sync.stage import Stage

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Update:
    """One update. Made anew each time, so that nothing of a failed one is left over.

    `version`: what this rank would publish next; the lead's counts. `may_resume`: engines that hold the last published weights.
    `unclean`: engines that an earlier update has left in a session, or with parts of one. `poisoned`: whether this rank knows of
    a failed update that has not been made good.
    """

    def __init__(self, rank: Rank, link: Connection, version: int, *, may_resume: Collection[int],
                 unclean: Sequence[int], poisoned: bool) -> None:
        self._rank = rank
        self._link = link
        self.version = version
        self._may_resume = may_resume
        self._unclean = unclean
        self._poisoned = poisoned
        self._is_lead = rank.number == link.topology.LEAD
        self._session = Session(rank.seam, rank.trace, link.fleet)
        self._failure = FirstFailure(rank)
        self._update_deadline = rank.deadline(rank.settings.timeouts.update_s, "update_weight_timeout")
        self._phase_deadline = self._update_deadline
        self._phase = ""
        stage = rank.seam.coordinates().pp
        self._stage = Stage(stage, rank, link, self._failure, self._call_deadline,
                            lambda: self._phase_deadline.left_s(rank.seam.now()), self._keep_pace)
        self._is_source = rank.number == link.topology.sources[stage]
        self.reports: list[StageReport] = []

    def run(self) -> None:
        """Execute the plan. Raises `UpdateFailed`, the same on every rank."""
        rank, topology, name_before = self._rank, self._link.topology, self._rank.source.group_name
        try:
            for phase, steps in self._link.phases:
                with rank.metrics.timed(phase.name), rank.trace.at(phase=phase.name, stage=phase.stage):
                    self._try(self._enter, phase)
                    for step in steps:
                        if isinstance(step, Barrier):
                            self._meet(step)
                        elif takes_part(step, topology, rank.number):
                            self._do(step)
        except UpdateFailed:
            raise
        except Exception as error:
            self._leave_alone(error)
            failure = Failure(rank.number, rank.trace.position_of(error).text(), type(error).__name__, str(error))
            raise UpdateFailed([failure], state=self.state(), aftermath=self._what_to_do()) from error
        except BaseException as error:
            self._leave_alone(error)
            raise
        finally:
            self._stage.end()
            rank.set_group_name(name_before)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _do(self, step: Step) -> None:
        if isinstance(step, Send):
            self._stage.send(step)
        elif not self._failure:
            self._try(self._perform, step)

    def _try(self, function: Callable[[T], None], argument: T) -> None:
        """Do something local; what it raises is kept for the next barrier."""
        try:
            function(argument)
        except Exception as error:
            self._failure.keep(error)

    def _perform(self, step: Step) -> None:
        match step:
            case Lead(action):
                self._ask_engines(action)
            case Open():
                self._stage.open()
            case Synchronize():
                self._stage.synchronize()
            case Close():
                self._rank.close_group()
                self._rank.set_group_name(None)

    def _ask_engines(self, action: LeadAction) -> None:
        deadline, grace_s = self._call_deadline(), self._rank.settings.timeouts.grace_s
        session = self._session
        match action:
            case "pause":
                session.pause(deadline, grace_s)
            case "flush":
                if self._unclean:  # under a deadline of its own: else one that does not answer leaves no time for any to flush
                    _warn(session.abandon(self._rank.grace(), self._unclean))
                session.flush(self._call_deadline(), grace_s)
            case "restore":
                session.roll_back(self._unclean, deadline, grace_s)
                session.restore(deadline, grace_s)
            case "start":
                if not self._rank.settings.post_process:  # else it was done before the engines restored their layout
                    session.roll_back(self._unclean, deadline, grace_s)
                session.start(deadline, grace_s)
            case "finish":
                session.finish(self.version, deadline, grace_s)
            case "post_process":
                session.post_process(deadline, grace_s)
            case "publish":
                session.publish(self.version, deadline, grace_s)
            case "resume":
                session.resume(deadline, grace_s)

    def _enter(self, phase: Phase) -> None:
        """Start a phase's clock. `send` is one phase per stage: its deadline bounds a stage, not the model."""
        self._phase, rank = phase.name, self._rank
        self._phase_deadline = self._update_deadline.within(
            rank.seam.now(), rank.settings.timeouts.phase_s, "update_weight_phase_timeout")
        rank.trace.record("phase", detail=phase.name)

    def _call_deadline(self) -> Deadline:
        timeouts = self._rank.settings.timeouts
        return self._phase_deadline.within(self._rank.seam.now(), timeouts.call_s, "update_weight_call_timeout")

    # --- barriers -----------------------------------------------------------------------------------------------------

    def _meet(self, step: Barrier) -> None:
        data: dict[str, Any] = {}
        if step.label == FIRST:
            data = first_words(connection=self._link.serial, version=self.version, poisoned=self._poisoned)
        if step.reports and self._is_source and step.stage == self._stage.number and not self._failure:
            data = {"report": self._stage.report().to_json()}
        statuses = self._agree(self._rank.control.barrier, step.label, data, step)
        if step.reports and step.stage is not None:
            self._judge(StageReport.from_json(statuses[self._link.topology.sources[step.stage]].data["report"]))

    def _keep_pace(self, turn: int) -> None:
        """Between two buckets of an export that all ranks iterate: nobody goes on before the source has sent the last one, so
        that no collective of the trainer is under way while the source waits for engines. A failure ends the pass here."""
        self._agree(self._rank.control.keep_pace, f"bucket {turn} of the export", {TURN: turn})

    def _agree(self, exchange: Callable[..., list[Status]], label: str, data: dict[str, Any],
               step: Barrier | None = None) -> list[Status]:
        """All ranks' statuses. Aborts, on every rank alike, where one is absent, has failed or stands elsewhere."""
        timeouts = self._rank.settings.timeouts
        timeout_s = min(timeouts.phase_s, self._update_deadline.left_s(self._rank.seam.now())) + timeouts.grace_s
        try:
            statuses = exchange(label, Status(self._failure.failure, data), timeout_s=timeout_s)
        except RanksAbsent as error:
            report(error, self._rank.seam, self._rank.trace, self._rank.settings.report_folder)
            why = why_absent(step, error, self._link)
            own = [] if self._failure.failure is None else [self._failure.failure]  # nobody else will tell what happened here
            self._abort([*own, Failure(None, f"status barrier '{label}'", "RanksAbsent", f"{error}{why}")], error)
        failures = [status.failure for status in statuses if status.failure is not None] or out_of_step(statuses)
        if step is not None and step.label == FIRST:
            if calls := different_calls(statuses):
                self._abort([*failures, Failure(None, "comparing calls", "OutOfStep", calls)], None)
            self._poisoned = any(status.data["poisoned"] for status in statuses)
            self.version = statuses[self._link.topology.LEAD].data["version"]
            failures = failures or other_connections(statuses)
        if failures:
            self._abort(failures, None)
        return statuses

    def _judge(self, report: StageReport) -> None:
        """Every rank learns what was sent; the lead decides, and the next barrier carries its verdict."""
        self.reports.append(report)
        if self._is_lead and (problem := judge(report, self._link.announced[report.stage])):
            self._failure.keep(CompletenessError(problem))

    def _abort(self, failures: list[Failure], cause: Exception | None) -> NoReturn:
        """Every rank ends here with the same failures; the lead leaves the engines in a safe state first."""
        self._failure.drop_group()
        self._make_safe()
        raise UpdateFailed(failures, state=self.state(), aftermath=self._what_to_do()) from cause

    def state(self) -> Aftermath:
        """What a failure in this phase leaves behind. Every rank decides alike: it depends on the plan, and on what all ranks
        said at the first barrier."""
        match self._phase:
            case "" | "pause":
                # No engine was asked to start: all of them are as they were before.
                return "poisoned" if self._poisoned else "untouched"
            case "resume":
                return "published"
            case _:
                return "poisoned"

    def _what_to_do(self) -> str:
        return _WHAT_TO_DO[self.state()].format(version=self.version)

    def _leave_alone(self, error: BaseException) -> None:
        """This rank leaves by itself (an interrupt, or an error outside every step): nobody knows at which barrier the others
        are. They must learn why it does not come, and the engines must be safe."""
        self._failure.drop_group()
        where = self._rank.trace.position_of(error).text()
        with contextlib.suppress(Exception):
            self._rank.control.give_up(f"rank {self._rank.number} left the update ({where}): {type(error).__name__}: {error}")
        self._make_safe()

    def _make_safe(self) -> None:
        """The lead leaves the engines in a safe state, as well as it can; whatever does not work is logged."""
        if not self._is_lead:
            return
        try:
            match self.state():
                case "untouched":
                    _warn(self._session.resume_paused(self._may_resume, self._rank.grace()))
                case "poisoned" if self._session.started:
                    _warn(self._session.abandon(self._rank.grace()))
        except Exception:
            logger.warning("clearing up after a failed weight update did not work", exc_info=True)


_WHAT_TO_DO: dict[Aftermath, str] = {
    "untouched": "No weights were touched. Engines that hold the last published weights are told to go on with them; others "
                 "stay paused. Mend the cause and call update_weights() again.",
    "poisoned": "The engines stay paused and version {version} is not published: they may hold a mixture and must not "
                "serve. Mend the cause, reconnect replaced engines with connect_rollout_engines(), and call "
                "update_weights() again: it sends everything anew.",
    "published": "All engines hold and publish version {version}, but some could not be resumed. Mend the cause and call "
                 "update_weights() again.",
}


def _warn(troubles: list[str]) -> None:
    for trouble in troubles:
        logger.warning("while clearing up after a failed weight update: %s", trouble)
