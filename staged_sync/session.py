"""The session's RPCs, all made by the lead: pause, flush, start, finish, publish, resume; and how a failed one is left.

Fail-stop: once `start_weight_update` has been asked for, an engine's old weights are gone from vLLM's point of view (its
parameters are on the meta device), so after a failure every session is abandoned and the engines stay paused until a complete
update. Only engines that were paused and not yet started are resumed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from staged_sync.control import Deadline
from staged_sync.errors import DeadlineExceeded, EngineError
from staged_sync.seam import Seam
from staged_sync.trace import Trace
from staged_sync.vllm import abandon
from staged_sync.waiting import Pending, call_engine, settle, wait_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fleet:
    """The rollout engines of one connection: handles, workers per engine, the lock, and what each engine can do."""

    engines: tuple[Any, ...]
    counts: tuple[int, ...]
    lock: Any
    packed_in_init: tuple[bool, ...]
    """Per engine: whether `packed` is agreed when the group is opened (vLLM >= 0.29) rather than with each bucket."""

    def same_as(self, engines: Sequence[Any], counts: Sequence[int], lock: Any) -> bool:
        """Whether these are the very same engines and lock: identity, not number (a replaced engine is another one)."""
        return (len(engines) == len(self.engines) and tuple(counts) == self.counts and (lock is self.lock or lock == self.lock)
                and all(a is b or a == b for a, b in zip(engines, self.engines, strict=True)))


class Session:
    """One update's session on every engine, driven by the lead."""

    def __init__(self, seam: Seam, trace: Trace, fleet: Fleet) -> None:
        self._seam = seam
        self._trace = trace
        self._fleet = fleet
        self._paused: dict[int, Any] = {}  # how each engine's pause ended: a value, or an exception
        self.started = False
        """Whether any engine was asked to start: its old weights are out of reach from then on."""

    def pause(self, deadline: Deadline, grace_s: float) -> None:
        self._ask("pause_generation", deadline, grace_s, outcomes=self._paused)

    def flush(self, deadline: Deadline, grace_s: float) -> None:
        self._ask("flush_cache", deadline, grace_s)

    def restore(self, deadline: Deadline, grace_s: float) -> None:
        """Have the engines bring their weights back into the checkpoint's layout (vime: compressed-tensors, before the session).
        Engines without the call do so by themselves when a session starts (vLLM >= 0.29)."""
        self.started = True
        self._post_process(deadline, grace_s, restore_weights_before_load=True, post_process_quantization=False)

    def post_process(self, deadline: Deadline, grace_s: float) -> None:
        """Have the engines quantise what they have loaded, after the session."""
        self._post_process(deadline, grace_s, restore_weights_before_load=False, post_process_quantization=True)

    def _post_process(self, deadline: Deadline, grace_s: float, **what: Any) -> None:
        engines = [i for i in self._indices() if self._seam.has_method(self._fleet.engines[i], "post_process_weights")]
        self._ask("post_process_weights", deadline, grace_s, engines=engines, **what)

    def start(self, deadline: Deadline, grace_s: float) -> None:
        self.started = True
        try:
            self._ask("start_weight_update", deadline, grace_s, is_checkpoint_format=True)
        except EngineError as error:
            if "already active" not in str(error):
                raise
            # Somebody else's session, from before this trainer was started: nobody will ever finish it.
            logger.warning("%s; clearing every engine's session and starting again", error)
            for trouble in self.abandon(deadline):
                logger.warning("while clearing it: %s", trouble)
            self.roll_back(self._indices(), deadline, grace_s)
            self._ask("start_weight_update", deadline, grace_s, is_checkpoint_format=True)

    def finish(self, version: int, deadline: Deadline, grace_s: float) -> None:
        """Close the session. An engine that cannot publish separately is told the version here: less than atomic."""
        late = {i: {} if self._publishes(i) else {"weight_version": str(version)} for i in self._indices()}
        self._ask("finish_weight_update", deadline, grace_s, per_engine=late)

    def publish(self, version: int, deadline: Deadline, grace_s: float) -> None:
        engines = [i for i in self._indices() if self._publishes(i)]
        self._ask("update_weight_version", deadline, grace_s, engines=engines, weight_version=str(version))

    def resume(self, deadline: Deadline, grace_s: float) -> None:
        self._ask("continue_generation", deadline, grace_s)

    def resume_paused(self, allowed: Collection[int], deadline: Deadline) -> list[str]:
        """After a failure before start: resume the engines that were paused and may serve; what went wrong, as text. One whose
        pause is still under way is told too, and not waited for: it takes its calls one after the other."""
        for i in sorted(set(allowed)):
            if isinstance(self._paused.get(i), DeadlineExceeded):
                with contextlib.suppress(Exception):
                    call_engine(self._seam, self._trace, i, self._fleet.engines[i], "continue_generation")
        engines = [i for i in sorted(set(allowed)) if i in self._paused and not isinstance(self._paused[i], Exception)]
        return self._best_effort(engines, "continue_generation", {}, deadline, _objection)

    def abandon(self, deadline: Deadline, engines: Sequence[int] | None = None) -> list[str]:
        """Clear the engines' sessions without communication; what went wrong, as text. Harmless where none is open."""
        chosen = list(self._indices() if engines is None else engines)
        return self._best_effort(chosen, abandon.METHOD, abandon.request(), deadline, abandon.objection)

    def roll_back(self, engines: Sequence[int], deadline: Deadline, grace_s: float) -> None:
        """Make engines forget what an abandoned session has left behind in them. After the flush, before the start.

        vLLM keeps what such a session had loaded into an unfinished layer, and would count the next session's weights on top of
        it. Our own adapter rolls that back at its start; for other engines an empty session does (start, finish: nothing is
        generated in between, no version is given).
        """
        foreign = [i for i in engines if not self._seam.has_method(self._fleet.engines[i], "get_weight_transfer_info")]
        if foreign:
            self.started = True
            self._ask("start_weight_update", deadline, grace_s, engines=foreign, is_checkpoint_format=True)
            self._ask("finish_weight_update", deadline, grace_s, engines=foreign)

    def _indices(self) -> range:
        return range(len(self._fleet.engines))

    def _publishes(self, engine: int) -> bool:
        return self._seam.has_method(self._fleet.engines[engine], "update_weight_version")

    def _ask(self, method: str, deadline: Deadline, grace_s: float, *, engines: Sequence[int] | None = None,
             per_engine: dict[int, dict[str, Any]] | None = None, outcomes: dict[int, Any] | None = None,
             **kwargs: Any) -> None:
        """Ask engines for `method`, all at once. The first failure is raised after the others had `grace_s` to answer, so that
        what is asked of them next does not meet it. `outcomes` learns how it ended on each."""
        pending: list[Pending] = []
        try:
            with self._trace.waits_for(f"{method} of the rollout engines"):
                for i in self._indices() if engines is None else engines:
                    extra = (per_engine or {}).get(i, {})
                    pending.append(call_engine(self._seam, self._trace, i, self._fleet.engines[i], method, **kwargs, **extra))
                wait_all(self._seam, self._trace, pending, deadline)
        except DeadlineExceeded:
            grace_s = 0.0  # all of them had the whole deadline
            raise
        finally:
            ended = settle(self._seam, pending, Deadline(self._seam.now() + grace_s, deadline.setting))
            if outcomes is not None:
                outcomes |= {p.engine: outcome for p, outcome in zip(pending, ended, strict=True) if p.engine is not None}

    def _best_effort(self, engines: Sequence[int], method: str, kwargs: dict[str, Any], deadline: Deadline,
                     objection: Callable[[Any], str | None]) -> list[str]:
        pending, troubles = [], []
        for i in engines:
            try:
                pending.append(call_engine(self._seam, self._trace, i, self._fleet.engines[i], method, **kwargs))
            except Exception as error:
                troubles.append(str(error))
        outcomes = settle(self._seam, pending, deadline)
        return troubles + [f"{p.name()}: {trouble}" for p, outcome in zip(pending, outcomes, strict=True)
                           if (trouble := objection(outcome))]


def _objection(outcome: Any) -> str | None:
    return str(outcome) if isinstance(outcome, Exception) else None
