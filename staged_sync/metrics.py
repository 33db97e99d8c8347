"""Seconds per phase, bytes and buckets of an update, as one flat dict for a metrics logger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

PREFIX = "update_weight/"


class Metrics:
    """Collects until popped. Phases that run more than once in an update (`send`, once per stage) add up."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._values: dict[str, float] = {}

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Add the seconds that the block takes to those of `phase`, on every path."""
        return _Timed(self, phase, self._now)

    def add(self, name: str, value: float) -> None:
        self._values[name] = self._values.get(name, 0.0) + value

    def get(self, name: str) -> float:
        return self._values.get(name, 0.0)

    def reset(self) -> None:
        self._values = {}

    def pop(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return {PREFIX + name: value for name, value in values.items()}


class _Timed:
    __slots__ = ("_began_s", "_metrics", "_now", "_phase")

    def __init__(self, metrics: Metrics, phase: str, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._phase = phase
        self._now = now

    def __enter__(self) -> None:
        self._began_s = self._now()

    def __exit__(self, *exception: object) -> None:
        self._metrics.add(f"{self._phase}_s", self._now() - self._began_s)
