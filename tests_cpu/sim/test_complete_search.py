"""Ours, in every order that can matter: free of deadlock, every rule kept. The search says itself that it saw everything."""

from __future__ import annotations

import pytest

from harness.sim import Scenario, explore
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform

ENGINES = {"1 engine of 1": (1,), "1 engine of 2": (2,), "2 engines of 1": (1, 1), "1 and 2 workers": (1, 2),
           "2 engines of 2": (2, 2)}
STAGES: dict[int, tuple[tuple[int, int], ...]] = {1: ((2, 1),), 2: ((3, 1), (1, 0)), 3: ((1, 2), (4, 0), (0, 1))}
"""(dense, expert) buckets of each stage: none alike."""


@pytest.mark.parametrize("receiver", ["vllm", "stock vllm", "stock vllm 0.27", "vime"])
@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("pp", STAGES)
def test_no_order_of_steps_deadlocks_or_breaks_a_rule(pp: int, engines: str, receiver: str) -> None:
    scenario = Scenario(pp=pp, stages=STAGES[pp], engines=ENGINES[engines], receiver=receiver)  # type: ignore[arg-type]
    assert explore(scenario, Reduced(), schedules=1000).check().complete


@pytest.mark.parametrize("scenario", [
    Scenario(pp=2, stages=((0, 0), (2, 1))), Scenario(pp=3, stages=((1, 1), (0, 0), (2, 0)), engines=(1, 1)),
    Scenario(tp=2, pp=2, stages=((2, 1), (1, 1)), engines=(1, 2)), Scenario(dp=2, ep=2, pp=2, stages=((1, 2), (0, 1))),
    Scenario(tp=2, dp=2, ep=2, etp=1, pp=2, stages=((1, 1), (2, 1))), Scenario(tp=2, cp=2, pp=2, stages=((1, 1), (1, 2))),
    Scenario(pp=2, stages=((3, 0), (2, 1)), packed=True, bucket_bytes=1 << 20), Scenario(pp=2, vpp=2, stages=((4, 0), (2, 2))),
    Scenario(pp=2, stages=((2, 1), (1, 0)), connects=True), Scenario(stages=((2, 1),), engines=(1, 2), connects=True),
], ids=repr)
def test_nor_with_gather_groups_empty_stages_packed_streams_or_connecting(scenario: Scenario) -> None:
    assert explore(scenario, Reduced(), schedules=1000).check().complete


@pytest.mark.parametrize("scenario", [Scenario(pp=2), Scenario(stages=((2, 1),)), Scenario(tp=2)], ids=repr)
def test_nor_where_every_look_that_came_too_early_is_tried_as_well(scenario: Scenario) -> None:
    """The same without the assumption that a wait for several results may be woken once it is decided."""
    assert explore(scenario, Reduced(eager=True), schedules=1000).check().complete


def test_the_reduction_leaves_nothing_out_that_a_random_search_finds() -> None:
    for mutant in ("no deferral", "group not closed"):
        scenario = Scenario(pp=2, engines=(1, 1), mutant=mutant)
        sampled, searched = explore(scenario, Uniform(7), schedules=100), explore(scenario, Reduced(), schedules=1000)
        assert searched.complete
        assert set(sampled.outcomes) <= set(searched.outcomes)
