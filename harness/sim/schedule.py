"""A schedule as numbers: at every point where several tasks could run, which of them did.

Candidates are counted from the one that round robin would take, so a schedule of zeros is round robin, and what differs from
zero is what matters. Points where one task alone could run are not counted. After its last number a schedule goes on with zeros.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from harness.recording.kernel import Task

Choices = tuple[int, ...]

_index = attrgetter("index")

_RUN = re.compile(r"(\d+)(?:x(\d+))?")


def encode(choices: Sequence[int], patient: bool = False) -> str:
    """`3-0x12-1`: a 3, twelve zeros, a 1. Zeros at the end are left out; "0" is round robin. A `p` in front: made where waits
    are patient, so that other tasks could run."""
    kept = list(choices)
    while kept and kept[-1] == 0:
        kept.pop()
    runs = [(value, len(list(run))) for value, run in groupby(kept)]
    return ("p" if patient else "") + ("-".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs) or "0")


def decode(text: str) -> tuple[Choices, bool]:
    """The numbers, and whether they were made where waits are patient."""
    choices: list[int] = []
    for part in text.removeprefix("p").split("-"):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"not an encoded schedule: {text!r} (at {part!r}); it must look like '3-0x12-1'")
        choices += [int(match[1])] * int(match[2] or 1)
    return tuple(choices), text.startswith("p")


def in_turn(runnable: Sequence[Task], previous: Task | None) -> list[Task]:
    """The candidates in round robin's order: first who comes after the task that ran last."""
    at = 0 if previous is None else bisect_right(runnable, previous.index, key=_index)
    return [*runnable[at:], *runnable[:at]]
