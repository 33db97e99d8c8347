"""Every benchmark of the weight sync runs to its end at its small size, with real processes: whether, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.beyond_main_job, pytest.mark.timeout(180)]


def run(name: str, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What it says, and the figures that it writes down."""
    file = folder / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--rounds", "1", "--json", str(file), *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    written = json.loads(file.read_text())
    assert written["benchmark"] == name
    return ended.stdout, written["figures"]


def test_transfer(tmp_path: Path) -> None:
    said, figures = run("transfer", tmp_path, "--receivers", "3", "--buckets", "1", "64")
    medians = {name: figure["median_s"] for name, figure in figures.items() if isinstance(figure, dict)}
    assert len([name for name in medians if name.startswith("staged-sync")]) == 4
    assert all(seconds > 0 for seconds in medians.values()) and "of the limit" in said


def test_scale(tmp_path: Path) -> None:
    said, figures = run("scale", tmp_path)
    counted = {row[0]: row[1:] for row in figures["counted"]}
    assert counted["status barriers"] == ["69", "4", "–", "69"]
    assert sorted(figures["worlds"]) == ["2", "4"]
    assert "EXTRAPOLATED" in said


def test_update(tmp_path: Path) -> None:
    """One engine in each world; both updates are compared to the last bit before they are timed."""
    said, figures = run("update", tmp_path)
    assert {name: len(costs[0]) for name, costs in figures["barriers_s"].items()} == {"pipeline 1": 7, "pipeline 2": 13}
    assert "every tensor and token was compared" in said
