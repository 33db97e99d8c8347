"""The protocol suite on the implementation under test: `--impl package.module:Class --adapter package.module:NAME`, else ours."""

from __future__ import annotations

import pytest

from harness.sim import Scenario, explore
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from tests_cpu.sim.protocol import WORLDS, Implementation

pytestmark = pytest.mark.protocol


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Scenario:
    option = request.config.option
    under_test = Implementation(option.impl, option.adapter)
    if lacks := under_test.lacks(request.param):
        pytest.skip(f"not declared: {', '.join(lacks)}")
    return under_test.world(request.param)


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_no_order_that_can_matter_deadlocks_or_breaks_a_rule(world: Scenario) -> None:
    found = explore(world, Reduced(), schedules=500, stop_at_first=True).check()
    assert found.complete, f"the search hit its bound: {found.text()}"


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_random_schedules_end_well(world: Scenario, request: pytest.FixtureRequest) -> None:
    explore(world, Uniform(request.config.option.seed), schedules=60, stop_at_first=True).check()


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_schedules_with_one_rank_late_end_well(world: Scenario, request: pytest.FixtureRequest) -> None:
    explore(world, Pct(request.config.option.seed, 3), schedules=60, stop_at_first=True).check()
