"""CUDA or CPU, decided once and said aloud. Imports nothing heavy: the noxfile asks before torch is installed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

ENGINES = 2
"""Receivers of a test world: every scenario for one engine uses the first, those for two use both."""

DEFAULT_MATRIX = ((1, 1), (1, 2), (2, 1), (2, 2))
"""(tp, pp) of the world tests where the command line names no topology."""


class TooFewGpus(RuntimeError):
    """`--device cuda` was asked for and cannot be had."""


@dataclass(frozen=True, slots=True)
class Device:
    name: Literal["cuda", "cpu"]
    why: str

    def text(self) -> str:
        what = "CUDA with NCCL" if self.name == "cuda" else "CPU with gloo, vLLM's CPU build"
        return f"device: {what} ({self.why})"


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, without importing torch or touching a device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def gpus_needed(tp: int | None, pp: int | None, ep: int | None = None) -> int:
    """One GPU per trainer rank and per engine of the largest world that the options ask for."""
    matrix = DEFAULT_MATRIX if tp is None and pp is None and ep is None else ((tp or 1, pp or 1),)
    return max(tp * pp * replicas(tp, ep or 1) for tp, pp in matrix) + ENGINES


def replicas(tp: int, ep: int) -> int:
    """The data parallel size that a stage needs at least: its ranks must be whole expert parallel groups."""
    return ep // math.gcd(tp, ep)


def choose(requested: str, needed: int, found: int | None = None) -> Device:
    """`auto` takes CUDA where there are enough GPUs; `cuda` fails where there are too few, it never falls back."""
    found = count_gpus() if found is None else found
    have = f"{needed} GPUs needed, {found} found"
    if requested == "cpu":
        return Device("cpu", "asked for with --device cpu")
    if requested == "cuda":
        if found < needed:
            raise TooFewGpus(f"--device cuda: {have}. Run on a larger machine, ask for a smaller topology "
                             "(--tp, --pp), or use --device cpu")
        return Device("cuda", f"asked for with --device cuda; {have}")
    return Device("cuda" if found >= needed else "cpu", f"--device auto; {have}")
