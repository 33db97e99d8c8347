"""What the benchmarks share: interleaved rounds, what is said of the samples, and how it is shown.

Machines are shared and busy: contestants take turns in every round, so that a busy second hits all of them alike, ratios are
taken within a round, and every table says under which load it was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm


# --- samples ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Samples:
    """What one contestant took, in seconds, round by round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: how little the median says on this machine just now."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s if self.median_s else 0.0

    def times(self, other: Samples) -> float:
        """How many times as long as `other`: the median over the rounds of the quotient within a round."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"median_s": self.median_s, "spread": self.spread, "seconds": list(self.seconds)}


def interleave(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Every contestant once in every round, each round beginning with another one. A contestant returns the seconds it took:
    it knows what belongs to it, and what is preparation."""
    names = list(contestants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with progress(rounds * len(names), "measuring") as bar:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                bar.set_postfix_str(name)
                taken[name].append(contestants[name]())
                bar.update()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def seconds_of(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def progress(total: int, what: str) -> Any:
    """A bar on a terminal, nothing elsewhere. Without tqdm's helper thread: some benchmarks fork."""
    tqdm.monitor_interval = 0
    return tqdm(total=total, desc=what, leave=False, disable=None)


# --- the machine --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """What figures depend on besides the code."""

    cores: int
    load_before: float
    text: str

    @classmethod
    def look(cls, device: str = "CPU") -> Machine:
        """Now, before anything is measured."""
        cores = len(os.sched_getaffinity(0))
        return cls(cores, os.getloadavg()[0], f"{cores} cores ({platform.machine()}), {device}, torch {torch.__version__}, "
                                              f"Python {platform.python_version()}")

    def caption(self) -> str:
        """`load`: how many processes wanted a core, over the last minute. Afterwards it counts the benchmark's own, too."""
        return f"{self.text}; load {self.load_before:.1f} before, {os.getloadavg()[0]:.1f} after"

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.text, "cores": self.cores, "load_before": self.load_before, "load_after": os.getloadavg()[0]}


def checkpoint_folders(stack: contextlib.ExitStack) -> dict[str, Path]:
    """Where checkpoints are written: in memory, where the system has a folder for that, and on disk. Gone with `stack`."""
    found = {"memory": Path("/dev/shm"), "disk": Path(tempfile.gettempdir())}
    return {what: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
            for what, where in found.items() if where.is_dir()}


# --- the command line ---------------------------------------------------------------------------------------------------
def options(name: str, doc: str, *, rounds: int) -> argparse.ArgumentParser:
    """`python -m benchmarks.<name>` with what all benchmarks take."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a size that ends in seconds: whether it runs, not how fast")
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"rounds that medians are taken over (default {rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to this file")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


# --- showing ------------------------------------------------------------------------------------------------------------
WIDTH = 200
"""More than any row needs: a row that is cut says nothing."""


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """A table on stdout; the first column says what, the others are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, color_system=None, width=WIDTH)
    console.print(table)
    if caption:
        print(caption)


def write_json(path: Path | None, benchmark: str, machine: Machine, used: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Everything that was measured, for machines. Nothing without a path."""
    if path is None:
        return
    settings = {name: value for name, value in vars(used).items() if name != "json"}
    path.write_text(json.dumps({"benchmark": benchmark, **machine.to_json(), "options": settings, "figures": figures},
                               indent=1, default=str))


def in_units(value: float, unit: str) -> str:
    """`0.00123 s` as `1.23 ms`, `3200000 B` as `3.2 MB`: three digits that a person can read."""
    scales = {"s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")), "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))}[unit]
    scale, name = next(((scale, name) for scale, name in scales if abs(value) >= scale), scales[-1])
    return f"{value / scale:.3g} {name}" if value / scale < 1000 else f"{value / scale:,.0f} {name}"
