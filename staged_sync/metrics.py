"""Seconds per phase, bytes and buckets of an update, as one flat dict for a metrics logger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

PREFIX = "update_weight/"


class Metrics:
    """Collects until popped. Phases that run more than once in an update (`send`, once per stage) add up."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._values: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self.add(f"{phase}_s", self._now() - began)

    def add(self, name: str, value: float) -> None:
        self._values[name] = self._values.get(name, 0.0) + value

    def get(self, name: str) -> float:
        return self._values.get(name, 0.0)

    def reset(self) -> None:
        self._values = {}

    def pop(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return {PREFIX + name: value for name, value in values.items()}
