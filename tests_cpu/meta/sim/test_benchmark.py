"""The benchmark of the simulator runs every world under every explorer, and says where a schedule does not end well."""

from __future__ import annotations

import re

import pytest

from benchmarks import simulator
from harness.sim import Scenario


def test_every_world_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    simulator.main(["--small"])
    printed = capsys.readouterr().out
    for world, scenario in simulator.WORLDS.items():
        row = re.search(rf"^ *{re.escape(world)}  +(.*)$", printed, re.MULTILINE)
        assert row is not None, printed
        *figures, steps, ranks = map(float, row[1].split())
        assert len(figures) == len(simulator.EXPLORERS) + 1 and min(figures) > 0
        assert steps > 20 * scenario.layout.world_size and ranks == scenario.layout.world_size


def test_a_schedule_that_does_not_end_well_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulator.WORLDS, "broken", Scenario(pp=2, mutant="no synchronize"))
    with pytest.raises(AssertionError, match="rule 13"):
        simulator.main(["--small", "--only", "broken"])
