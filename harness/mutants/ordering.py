"""Defects of the plan: a step left out, moved, or done more often than once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from harness.mutants.staging import Steps, changed_plan
from staged_sync.plan import Barrier, Close, Lead, LeadAction, Open, Send, Step, Synchronize
from staged_sync.update import Update


def _without(action: LeadAction) -> AbstractContextManager[Any]:
    return changed_plan(lambda steps: tuple(step for step in steps if step != Lead(action)))


def _before(step: Step, action: LeadAction, steps: Steps) -> Steps:
    """`action` is moved ahead of `step`."""
    rest = [s for s in steps if s != Lead(action)]
    at = rest.index(step)
    return (*rest[:at], Lead(action), *rest[at:])


def no_pause() -> AbstractContextManager[Any]:
    """Engines generate while their weights change."""
    return _without("pause")


def no_flush() -> AbstractContextManager[Any]:
    """Cached prefixes of the old weights stay."""
    return _without("flush")


def flush_inside_the_session() -> AbstractContextManager[Any]:
    """The cache is flushed after the session has begun."""
    return changed_plan(lambda steps: _before(Barrier("started"), "flush", steps))


def finish_before_the_last_stage() -> AbstractContextManager[Any]:
    """The session is closed when stage 0 is through."""
    return changed_plan(lambda steps: _before(Open(1), "finish", steps))


def resume_before_the_last_stage() -> AbstractContextManager[Any]:
    """Generation goes on while a later stage is still to come."""
    return changed_plan(lambda steps: _before(Open(1), "resume", steps))


def publish_before_finish() -> AbstractContextManager[Any]:
    """The version is public before the engine has taken the weights in."""
    return changed_plan(lambda steps: _before(Lead("finish"), "publish", steps))


def a_session_per_stage() -> AbstractContextManager[Any]:
    """Every stage starts and finishes a session of its own."""
    def change(steps: Steps) -> Steps:
        at = steps.index(Open(1))
        return (*steps[:at], Lead("finish"), Lead("start"), Barrier("again", 0), *steps[at:])
    return changed_plan(change)


def no_synchronize() -> AbstractContextManager[Any]:
    """The group is closed although the device may still be sending."""
    return changed_plan(lambda steps: tuple(step for step in steps if not isinstance(step, Synchronize)))


def closed_at_the_next_turn() -> AbstractContextManager[Any]:
    """A source closes its group only when it comes round again, as vime does."""
    def change(steps: Steps) -> Steps:
        closes = tuple(step for step in steps if isinstance(step, Close))
        return (*(step for step in steps if not isinstance(step, Close)), *closes)
    return changed_plan(change)


def no_barrier_after_open() -> AbstractContextManager[Any]:
    """Peers of the next stage do not wait until the group is there. Harmless for peers, not for the next source."""
    return changed_plan(lambda steps: tuple(
        step for step in steps if not (isinstance(step, Barrier) and step.label in ("stage 0 closed", "stage 1 open"))))


def barriers_by_what_a_rank_owns() -> AbstractContextManager[Any]:
    """A rank without experts does not meet the others after their pass."""
    real = Update._meet

    def meet(self: Update, step: Barrier) -> None:
        owns = any(self._link.exporter.units("expert"))
        if owns or not step.label.endswith("expert"):
            real(self, step)
    return patch.object(Update, "_meet", meet)


def stages_before_their_turn() -> AbstractContextManager[Any]:
    """Stage 1 sends ahead of stage 0."""
    def change(steps: Steps) -> Steps:
        def of(stage: int) -> list[Step]:
            return [s for s in steps if getattr(s, "stage", None) == stage]
        head = list(steps[:steps.index(Open(0))])
        tail = list(steps[steps.index(Barrier("stage 1 closed", 1, reports=True)) + 1:])
        return (*head, *of(1), *of(0), *tail)
    return changed_plan(change)


def expert_pass_left_out() -> AbstractContextManager[Any]:
    """Nobody sends the experts."""
    return changed_plan(lambda steps: tuple(s for s in steps if not (isinstance(s, Send) and s.part == "expert")))


