"""The one way in which the harness counts time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that a wait may not pass."""

    ends_s: float
    limit_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """`seconds` from now. Endless waits are refused: a hang must become a report."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a deadline must be a finite number of seconds, at least 0 (got {seconds})")
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_s - time.monotonic())

    @property
    def left_ms(self) -> int:
        """For pollers: rounded up, so that a poller does not return just before the end and spin."""
        return math.ceil(self.left_s * 1000)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.ends_s

    def at_most(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now where that is earlier."""
        return self if self.left_s <= seconds else Deadline.after(seconds)
