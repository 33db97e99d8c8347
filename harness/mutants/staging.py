"""Defects of the order of an update: who opens when, who meets where, what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from staged_sync import connect, transfer_group, update
from staged_sync.control import Deadline
from staged_sync.exporter import NamedTensor
from staged_sync.plan import Barrier, Close, Open, Step
from staged_sync.session import Fleet
from staged_sync.update import Update
from staged_sync.waiting import call_engine, wait_all

Steps = tuple[Step, ...]


def changed_plan(change: Callable[[Steps], Steps]) -> AbstractContextManager[Any]:
    """Every update follows `change(plan)`."""
    real = connect.plan_update
    return patch.object(connect, "plan_update", lambda *args, **kwargs: change(real(*args, **kwargs)))


def _opened_first(steps: Steps) -> Steps:
    opens = tuple(step for step in steps if isinstance(step, Open))
    rest = tuple(step for step in steps if not isinstance(step, Open))
    at = next(i for i, step in enumerate(rest) if isinstance(step, Barrier) and step.stage == 0)
    return (*rest[:at], *opens, *rest[at:])


def old_behaviour() -> AbstractContextManager[Any]:
    """As before staged sync: every stage's source opens its own group at once, and keeps it."""
    return changed_plan(lambda steps: _opened_first(tuple(step for step in steps if not isinstance(step, Close))))


def no_deferral() -> AbstractContextManager[Any]:
    """Every stage's source opens its group at once, before the first stage has sent."""
    return changed_plan(_opened_first)


def group_not_closed() -> AbstractContextManager[Any]:
    """A source leaves its group open at the end of its turn."""
    return changed_plan(lambda steps: tuple(step for step in steps if not isinstance(step, Close)))


def inactive_rank_skips_a_barrier() -> AbstractContextManager[Any]:
    """Ranks of other stages think that the expert pass of stage 0 does not concern them."""
    real = Update._meet

    def meet(self: Update, step: Barrier) -> None:
        if step.label != "stage 0 expert" or self._rank.seam.coordinates().pp == 0:
            real(self, step)
    return patch.object(Update, "_meet", meet)


def completeness_off_at_connect() -> AbstractContextManager[Any]:
    """Nobody compares what the stages announce with the checkpoint."""
    return patch.object(connect, "coverage_problems", lambda *args, **kwargs: [])


def completeness_off_per_update() -> AbstractContextManager[Any]:
    """Nobody compares what was sent with what was announced."""
    return patch.object(update, "judge", lambda report, announced: None)


def version_with_the_first_bucket() -> AbstractContextManager[Any]:
    """The version travels with the weights, so it is public before the last of them has arrived."""
    real = transfer_group.OpenGroup.send_bucket

    def send(self: transfer_group.OpenGroup, bucket: list[NamedTensor], deadline: Deadline) -> None:
        real(self, bucket, deadline)
        for i, engine in enumerate(self.fleet.engines):
            call = call_engine(self._seam, self._trace, i, engine, "update_weight_version", weight_version="1")
            wait_all(self._seam, self._trace, [call], deadline)
    return patch.object(transfer_group.OpenGroup, "send_bucket", send)


@contextmanager
def engines_compared_by_number() -> Iterator[None]:
    """As many engines as before are taken for the same engines, and nobody asks them which group they hold."""
    inspect = connect._inspect_engines
    with (patch.object(Fleet, "same_as", lambda self, engines, counts, lock: len(engines) == len(self.engines)),
          patch.object(connect, "_inspect_engines", lambda *args: inspect(*args) | {"group_held": True})):
        yield
