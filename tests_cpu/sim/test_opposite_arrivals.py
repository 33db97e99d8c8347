"""THUDM/slime#2331 (B02): stage 0's join reaches engine 0 first, stage 1's engine 1, and each waits for the other."""

from __future__ import annotations

import pytest

from harness.sim import Scenario, explore
from harness.sim.schedulers.base import Explorer
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform

BOTH_AT_ONCE = Scenario(pp=2, engines=(1, 1), receiver="stock vllm", mutant="no deferral")


def circular(text: str) -> bool:
    """Both engines are inside a join, of different groups, and neither group is complete."""
    joins = [row.split()[2] for row in text.splitlines() if row.startswith("engine") and "/worker" in row.split()[0]
             and row.split()[1] == "join"]
    return len(set(joins)) == 2


@pytest.mark.parametrize("explorer", [Reduced(), Uniform(3)], ids=["reduced", "random"])
def test_where_stages_open_their_groups_at_once_two_engines_can_wait_for_each_other(explorer: Explorer) -> None:
    found = explore(BOTH_AT_ONCE, explorer, schedules=300)
    tables = [f.outcome.text for f in found.failures if f.outcome.kind == "deadlock"]
    assert any(circular(text) for text in tables), "\n\n".join(tables)


def test_ours_asks_for_one_group_at_a_time_so_no_order_of_arrival_exists_that_does_it() -> None:
    found = explore(Scenario(pp=2, engines=(1, 1), receiver="stock vllm"), Reduced(), schedules=1000).check()
    assert found.complete
