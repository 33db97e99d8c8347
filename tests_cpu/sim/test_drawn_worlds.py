"""At least 20,000 random and PCT schedules over drawn worlds: no deadlock, no rule broken, every byte right, in any of them.

Small worlds get more schedules than large ones: there is more to see in many orders of few ranks per second.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from harness.sim import Scenario, explore
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.uniform import Uniform
from tests_cpu.sim.worlds import MAX_RANKS, scenarios, weight

CHUNKS = 10
PER_CHUNK = 2_000
THOROUGH_CHUNKS = 100


def schedules_of(scenario: Scenario) -> int:
    return max(4, min(400, 1_500_000 // weight(scenario) ** 3))


@pytest.mark.parametrize("chunk", [*range(CHUNKS), *(pytest.param(n, marks=pytest.mark.thorough)
                                                     for n in range(CHUNKS, THOROUGH_CHUNKS))])
def test_every_schedule_of_drawn_worlds_ends_well(chunk: int, request: pytest.FixtureRequest) -> None:
    first_seed = request.config.option.seed * 1000 + chunk
    run: Counter[str] = Counter()

    @seed(first_seed)
    @settings(max_examples=PER_CHUNK // 10, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))
    @given(scenarios())
    def explore_it(scenario: Scenario) -> None:
        if run.total() >= PER_CHUNK:
            return
        count = schedules_of(scenario)
        explorers: list[Explorer] = [Uniform(first_seed), Pct(first_seed, depth=2 + count % 3)]
        for explorer in explorers:
            found = explore(scenario, explorer, schedules=-(-count // 2), stop_at_first=True)
            run[explorer.name.split(",")[0]] += found.schedules
            note(found.text())
            found.check()

    explore_it()
    assert run.total() >= PER_CHUNK and min(run.values()) >= PER_CHUNK // 2 - MAX_RANKS, run
