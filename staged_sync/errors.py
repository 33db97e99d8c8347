"""Errors for a tired person at 3 a.m.: what was expected, what was found, where, and what to do next.

Every error of this library derives from `StagedSyncError`. What one rank meets is described by a `Failure`, travels in the
next status barrier, and is raised on every trainer rank as `UpdateFailed` with the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class StagedSyncError(RuntimeError):
    """Base of every error this library raises on purpose. Travels between processes (trainer ranks as Ray actors) as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the constructor with the message, which is not what the constructors below take.
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[StagedSyncError], args: tuple[Any, ...], attributes: dict[str, Any]) -> StagedSyncError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ConfigurationError(StagedSyncError):
    """Everything that is wrong with args, model, checkpoint and engines, in one error, before anything is paused."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(bullets("weight sync cannot be set up:", self.problems))


class CompletenessError(StagedSyncError):
    """What the stages export is not what the HF checkpoint names: missing, extra, duplicate or wrongly shaped tensors."""


class DeadlineExceeded(StagedSyncError):
    """A wait took longer than it may. The text says on what, for how long, and which setting bounds it.

    `owed_by`: who has not answered what, as far as known: ("engine0", "update_weights_from_distributed").
    """

    owed_by: tuple[tuple[str, str], ...] = ()


class RanksAbsent(DeadlineExceeded):
    """Some trainer ranks did not come to a status barrier in time. `absent` is None where it could not be found out."""

    def __init__(self, message: str, absent: tuple[int, ...] | None) -> None:
        self.absent = absent
        super().__init__(message)


class EngineError(StagedSyncError):
    """A rollout engine answered with an error, refused, or died."""

    def __init__(self, engine: int, method: str, reason: str) -> None:
        self.engine = engine
        super().__init__(f"rollout engine {engine} failed in {method}: {reason}")


class TransportError(StagedSyncError):
    """A transfer group cannot be opened or cannot move bytes."""


class GatherError(StagedSyncError):
    """A gather inside the trainer failed: the group cannot be used again in this update, so the export is not drained."""


class UpdateInProgress(StagedSyncError):
    """`update_weights` was called while another one runs on this rank."""


Aftermath = Literal["untouched", "poisoned", "published"]
"""What a failed update leaves behind: the old weights everywhere; possibly a mixture on paused engines; the new version on
all engines."""


class UpdateFailed(StagedSyncError):
    """An update (or a connect) failed on some rank or engine; raised on every trainer rank with the same text."""

    def __init__(self, failures: Sequence[Failure], *, state: Aftermath, aftermath: str, what: str = "weight update") -> None:
        self.failures = tuple(failures)
        self.state = state
        super().__init__("\n".join([bullets(f"{what} failed:", [f.text() for f in self.failures]), aftermath]))


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on one trainer rank, and where it stood: what a status barrier carries. `rank` is None for a failure
    of the barrier itself, which belongs to no one rank."""

    rank: int | None
    where: str
    kind: str
    message: str

    def text(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank} "
        return f"{who}({self.where}): {self.kind}: {self.message}"


def bullets(title: str, lines: Iterable[str], *, limit: int = 50) -> str:
    """`title`, then one line each, cut after `limit` with the number of lines left out."""
    lines = list(lines)
    shown = [f"  - {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  … and {len(lines) - limit} more")
    return "\n".join([title, *shown])
