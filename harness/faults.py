"""Faults by builder, counted: a test plants one at a named place and asserts that it really happened.

    faults = Faults().fail_at(rank=3, event="gather", stage=1).engine_error(engine=0, method="start_weight_update")
    …
    faults.assert_all_fired()

The same object serves recorded, simulated and real worlds: each asks `on_event` (trainer ranks, with every trace event) and
`on_call` (engines, with every RPC they take up) and acts on the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from staged_sync.trace import Event

Action = Literal["raises", "never answers", "dies"]


class InjectedFailure(RuntimeError):
    """A planted failure: its own class, so that a real error is never mistaken for it."""


@dataclass(frozen=True)
class Place:
    """Where a fault strikes: the `nth` matching event of a rank, or the `nth` call of a method of an engine."""

    kind: Literal["rank", "engine"]
    index: int
    what: str
    stage: int | None = None
    bucket: int | None = None
    nth: int = 0

    def text(self) -> str:
        at = "".join(f" {name} {value}" for name, value in (("stage", self.stage), ("bucket", self.bucket))
                     if value is not None)
        return f"{self.kind} {self.index} at {self.what}{at} (nth={self.nth})"

    def matches(self, kind: str, index: int, what: str, stage: int | None = None, bucket: int | None = None) -> bool:
        return ((self.kind, self.index, self.what) == (kind, index, what)
                and self.stage in (None, stage) and self.bucket in (None, bucket))


@dataclass(frozen=True)
class Fault:
    place: Place
    action: Action
    reply: Any = None

    def text(self) -> str:
        return f"injected: {self.place.text()}"

    def answer(self) -> Any:
        """What an engine answers instead of doing its work: the given reply, or the failure itself."""
        if self.reply is not None:
            return self.reply
        raise InjectedFailure(self.text())


class Faults:
    """Planted faults and how often each has fired."""

    def __init__(self) -> None:
        self.fired: dict[Place, int] = {}
        self._faults: dict[Place, Fault] = {}
        self._seen: dict[Place, int] = {}

    def __bool__(self) -> bool:
        """Whether anything is planted."""
        return bool(self._faults)

    # --- planting -------------------------------------------------------------------------------------------------
    def fail_at(self, *, rank: int, event: str, stage: int | None = None, bucket: int | None = None, nth: int = 0) -> Faults:
        """Trainer rank `rank` raises `InjectedFailure` as it records `event` (`gather`, `send`, `gather.done`, …)."""
        return self._plant(Fault(Place("rank", rank, event, stage, bucket, nth), "raises"))

    def rank_dies(self, *, rank: int, event: str, stage: int | None = None, bucket: int | None = None, nth: int = 0) -> Faults:
        """Trainer rank `rank` is gone from `event` on: no `finally`, no message."""
        return self._plant(Fault(Place("rank", rank, event, stage, bucket, nth), "dies"))

    def engine_error(self, *, engine: int, method: str, nth: int = 0, reply: Any = None) -> Faults:
        """The engine does nothing and raises `InjectedFailure`; or answers `reply` (`False`, `{"success": False}`)."""
        return self._plant(Fault(Place("engine", engine, method, nth=nth), "raises", reply))

    def never_answers(self, *, engine: int, method: str, nth: int = 0) -> Faults:
        """The engine takes the call up and never comes back."""
        return self._plant(Fault(Place("engine", engine, method, nth=nth), "never answers"))

    def engine_dies(self, *, engine: int, method: str, nth: int = 0) -> Faults:
        """The engine's process ends as it takes the call up."""
        return self._plant(Fault(Place("engine", engine, method, nth=nth), "dies"))

    # --- striking -------------------------------------------------------------------------------------------------
    def on_event(self, event: Event) -> Fault | None:
        """The fault that strikes a trainer rank at this event, if any."""
        if event.rank is None:
            return None
        return self._strike("rank", event.rank, event.event, event.stage, event.bucket)

    def on_call(self, engine: int, method: str) -> Fault | None:
        """The fault that strikes an engine at this call, if any."""
        return self._strike("engine", engine, method)

    def assert_all_fired(self) -> None:
        """Every planted fault struck exactly once: a test whose fault never happens tests nothing."""
        wrong = [f"{place.text()}: fired {self.fired.get(place, 0)} times" for place in self._faults
                 if self.fired.get(place, 0) != 1]
        if wrong:
            raise AssertionError("\n".join(["planted faults that did not fire exactly once:", *wrong]))

    def _plant(self, fault: Fault) -> Faults:
        if fault.place in self._faults:
            raise ValueError(f"two faults at one place: {fault.place.text()}")
        self._faults[fault.place] = fault
        return self

    def _strike(self, kind: str, index: int, what: str, stage: int | None = None, bucket: int | None = None) -> Fault | None:
        struck = None
        for place, fault in self._faults.items():
            if not place.matches(kind, index, what, stage, bucket):
                continue
            seen = self._seen[place] = self._seen.get(place, -1) + 1
            if seen == place.nth:
                self.fired[place] = self.fired.get(place, 0) + 1
                struck = fault
        return struck
