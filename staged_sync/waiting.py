"""Waiting for several pieces of work at once: the first failure is seen while the others are still under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from staged_sync.control import Deadline
from staged_sync.errors import DeadlineExceeded, EngineError, TransportError
from staged_sync.seam import Seam, Work
from staged_sync.trace import Trace

SPEAK_S = 0.5
"""How long an engine has to say what is wrong, once its transport has failed under it."""

SLICE_S = 1.0
"""Longest single wait: also a seam whose works finish outside its own wait is looked at this often."""


class Pending(NamedTuple):
    """One piece of work and how to speak of it. `engine` is set for RPCs, so that errors name the engine."""

    label: str
    work: Work[Any]
    engine: int | None = None

    def value(self) -> Any:
        """The result; an engine's error becomes an `EngineError`, as does a reply that says no."""
        if self.engine is None:
            return self.work.result()
        try:
            reply = self.work.result()
        except (EngineError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an engine in this process may answer with SystemExit: its end is not ours
            raise EngineError(self.engine, self.label, f"{type(error).__name__}: {error}") from error
        if reply is False or (isinstance(reply, dict) and not reply.get("success", True)):
            raise EngineError(self.engine, self.label, f"it answered {reply!r}")
        return reply

    def name(self) -> str:
        return self.label if self.engine is None else f"{self.label} of rollout engine {self.engine}"


def call_engine(seam: Seam, trace: Trace, engine: int, handle: Any, method: str, **kwargs: Any) -> Pending:
    """Start one RPC. A handle that refuses on the spot (no such method, dead actor) is an `EngineError` as well."""
    trace.record("rpc", detail=f"{method} engine{engine}")
    try:
        return Pending(method, seam.call(handle, method, **kwargs), engine)
    except Exception as error:
        raise EngineError(engine, method, f"the call could not be made: {type(error).__name__}: {error}") from error


def wait_all(seam: Seam, trace: Trace, pending: Sequence[Pending], deadline: Deadline) -> list[Any]:
    """Values of all `pending`, in order. Raises the first failure at once; `DeadlineExceeded` names what is still open.

    A transport's own error only says that a connection is gone: the engines get a moment to say why, and those that do not
    are named.
    """
    values: dict[int, Any] = {}
    open_ = dict(enumerate(pending))
    while open_:
        for i in [i for i, p in open_.items() if p.work.poll()]:
            ended = open_.pop(i)
            try:
                values[i] = ended.value()
            except Exception as error:
                if ended.engine is None:
                    _let_engines_speak(seam, error, [p for p in open_.values() if p.engine is not None])
                raise
        if not open_:
            break
        left_s = deadline.left_s(seam.now())
        if left_s <= 0:
            expired = deadline.expired(trace.position.text(), ", ".join(p.name() for p in open_.values()))
            expired.owed_by = _owed_by(open_.values())
            raise expired
        seam.wait_any([p.work for p in open_.values()], timeout_s=min(left_s, SLICE_S))
    return [values[i] for i in range(len(pending))]


def _let_engines_speak(seam: Seam, error: Exception, replies: Sequence[Pending]) -> None:
    """Raise an engine's own error instead of the transport's, or the transport's with the engines that have not answered."""
    end_s = seam.now() + SPEAK_S
    # At a deadline the engines that are still silent are the cause; what they say once the transport is gone is its effect.
    while replies and not isinstance(error, DeadlineExceeded):
        for reply in [p for p in replies if p.work.poll()]:
            try:
                reply.value()
            except Exception as reason:
                raise reason from error
        replies = [p for p in replies if not p.work.poll()]
        if not replies or seam.now() >= end_s:
            break
        seam.wait_any([p.work for p in replies], timeout_s=max(0.0, end_s - seam.now()))
    if replies:
        text = f"{error} (no answer yet to {', '.join(p.name() for p in replies)})"
        if not isinstance(error, DeadlineExceeded):
            raise TransportError(text) from error
        late = DeadlineExceeded(text)
        late.owed_by = _owed_by(replies)
        raise late from error


def _owed_by(pending: Iterable[Pending]) -> tuple[tuple[str, str], ...]:
    return tuple((f"engine{p.engine}", p.label) for p in pending if p.engine is not None)


def settle(seam: Seam, pending: Sequence[Pending], deadline: Deadline) -> list[Any | Exception]:
    """How each of `pending` ended, as a value or an exception; what is still open at the deadline is a `DeadlineExceeded`."""
    outcomes: list[Any | Exception] = []
    for p in pending:
        while not p.work.poll() and (left_s := deadline.left_s(seam.now())) > 0:
            seam.wait_any([p.work], timeout_s=min(left_s, SLICE_S))
        try:
            outcomes.append(p.value() if p.work.poll() else deadline.expired("settling", p.name()))
        except Exception as error:
            outcomes.append(error)
    return outcomes
