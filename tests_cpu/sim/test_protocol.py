"""The protocol suite on the implementation under test: `--impl package.module:Class --adapter package.module:NAME`, else ours."""

from __future__ import annotations

import pytest

from harness.sim import Scenario, explore
from harness.sim.schedulers.pct import Pct
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from harness.sim.struck import strike_everywhere
from tests_cpu.sim.protocol import FAULTS, STRUCK, WORLDS, Implementation

pytestmark = pytest.mark.protocol


def under_test(request: pytest.FixtureRequest, world: str, fault: str = "") -> Scenario:
    option = request.config.option
    implementation = Implementation(option.impl, option.adapter)
    if lacks := implementation.lacks(world, fault):
        pytest.skip(f"not declared: {', '.join(lacks)}")
    return implementation.world(world)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Scenario:
    return under_test(request, request.param)


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


@pytest.mark.only_others
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", STRUCK)
def test_a_fault_at_any_operation_is_heard_and_nobody_serves_a_mixture(name: str, fault: str,
                                                                       request: pytest.FixtureRequest) -> None:
    """Ours is struck in more layouts by test_faults.py and test_bridge.py."""
    world, seed = under_test(request, name, fault), request.config.option.seed
    struck = strike_everywhere(world, lambda number: Uniform(seed + number), sorts=[fault])
    assert struck.faults and not struck.failures, struck.text()
