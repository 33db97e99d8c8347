"""Every mistake that is made on purpose in one of the harness' examples (mistaken.py) is found, and told so that it can be
mended: in every kind of world, and for every kind of fault."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.foreign.examples import adapters
from harness.sim import Scenario, explore, replay
from harness.sim.explore import run_once
from harness.sim.schedule import encode
from harness.sim.schedulers.uniform import Uniform
from harness.sim.struck import strike_everywhere
from tests_cpu.sim.protocol import EXAMPLES, FAULTS, STRUCK, Implementation, example

HERE = "tests_cpu.sim.test_foreign_mistakes"
GATHERS = {"group_timeout_s": 300.0, "patience_s": 1200.0}  # first in a gather, then in a meeting
BOUNDED_EXPERTS = replace(adapters.EXPERTS, capabilities=adapters.BOUNDED.capabilities | {"moe"}, **GATHERS)
BOUNDED_BRIDGE = replace(adapters.BOUNDED, capabilities=adapters.BOUNDED.capabilities | {"bridge"}, **GATHERS)
CLAIMS = replace(adapters.OLD_STYLE, capabilities=adapters.OLD_STYLE.capabilities | {"deadlines"}, patience_s=600.0)
IMPATIENT = replace(adapters.BOUNDED, patience_s=500.0)
IMPATIENT_EXPERTS = replace(BOUNDED_EXPERTS, patience_s=1000.0)
IMPATIENT_BRIDGE = replace(BOUNDED_BRIDGE, patience_s=1000.0)


def mistaken(name: str, adapter: str, module: str = f"{EXAMPLES}.adapters") -> Implementation:
    return Implementation(f"tests_cpu.sim.mistaken:{name}", f"{module}:{adapter}")


# --- without a fault ----------------------------------------------------------------------------------------------------
STAYS_AWAY = [r"rank0 +all_gather_object +ep\[0,1\] .* rank 1 ", r"rank1 +barrier +gloo .* rank 0 "]


@pytest.mark.parametrize(("name", "adapter", "world", "texts"), [
    ("OneReplicaExports", "EXPERTS", "experts over two replicas", STAYS_AWAY),
    ("OneReplicaExports", "EXPERTS", "two stages, experts over two replicas", STAYS_AWAY),
    ("LocalNumbers", "EXPERTS", "experts over two replicas", [
        r"rule 6 .*receive.done of hf.s0.expert0, once too often", r"hf.s0.expert2 is missing from what was received"]),
    ("LocalNumbers", "EXPERTS", "two stages, experts over tensor-parallel ranks", [
        r"rule 6 .*receive.done of hf.s1.expert0, once too often", r"hf.s1.expert1 is missing from what was received"]),
    ("RanksSwapped", "EXPERTS", "experts over two replicas", [
        r"rule 12: .*hf.s0.expert0: other bytes than step 1, those of hf.s0.expert2"]),
    ("ExpertsNotGathered", "EXPERTS", "experts over two replicas, tensor parallel", [
        r"rank 0: ValueError: .*experts.linear.weight0: 5 elements were gathered, all shards have 10: .* \(mistaken.py:"]),
    ("SourceIterates", "BRIDGED", "bridge, one stage", [
        r"rank0 +bridge hf.s0.dense0 +tp\[0,1\] .* rank 1 ", r"rank1 +barrier +gloo .* rank 0 "]),
    ("OneStageIterates", "BRIDGED", "bridge, two stages", [
        r"rank0 +bridge hf.s0.dense0 +pp\[0,1\] .* rank 1 ", r"rank1 +barrier +gloo .* rank 0 "]),
    ("OneStageIterates", "BRIDGED", "bridge, two stages, experts", [
        r"rank0 +bridge hf.s0.dense0 +pp\[0,2\] .* rank 2 ", r"rank2 +barrier +gloo .* ranks 0, 1 "]),
    ("SourceRaises", "OLD_STYLE", "bridge, one stage", [
        r"^rank 0: ValueError: no bucket today \(mistaken.py:\d+ in broadcast\)",
        r"also: the others: deadlock: nobody can run", r"rank1 +barrier +gloo .* rank 0 "]),
])
def test_a_mistake_is_found_and_told(name: str, adapter: str, world: str, texts: list[str]) -> None:
    scenario = mistaken(name, adapter).world(world)
    found = explore(scenario, Uniform(1), schedules=10)
    assert "well" not in found.outcomes
    for text in texts:
        assert re.search(text, found.failures[0].outcome.text), found.failures[0].outcome.text
    assert replay(scenario, found.failures[0].schedule).outcome == found.failures[0].outcome


# --- with one -----------------------------------------------------------------------------------------------------------
WITH_DEADLINES = {
    "one stage, engines of 1 and 2": example("bounded"), "two stages, engines of 1 and 2": example("bounded"),
    "experts over two replicas": mistaken("BoundedExperts", "BOUNDED_EXPERTS", HERE),
    "bridge, two stages": mistaken("BoundedBridge", "BOUNDED_BRIDGE", HERE),
}


@pytest.mark.parametrize("world", STRUCK)
def test_with_deadlines_every_fault_is_heard_in_time_and_the_next_update_is_exact(world: str) -> None:
    under_test = WITH_DEADLINES[world]
    assert not any(under_test.lacks(world, fault) for fault in FAULTS)
    struck = strike_everywhere(under_test.world(world), Uniform)
    assert struck.faults > 80 and not struck.failures, struck.text()


@pytest.mark.parametrize(("name", "world"), [
    ("old_style", "one stage, engines of 1 and 2"), ("named_groups", "one stage, engines of 1 and 2"),
    ("deferred", "two stages, engines of 1 and 2"), ("experts", "experts over two replicas"), ("bridged", "bridge, two stages")])
def test_without_deadlines_an_engine_that_fails_is_still_heard_and_nobody_serves_a_mixture(name: str, world: str) -> None:
    sorts = [fault for fault in FAULTS if not example(name).lacks(world, fault)]
    struck = strike_everywhere(example(name).world(world), Uniform, sorts=sorts)
    assert sorts == ["engine raises", "engine dies"] and struck.faults > 10 and not struck.failures, struck.text()


ONE, TWO = STRUCK[:2]
UPDATE = "update_weights_from_distributed"
IGNORED = r"rule 9: engine0 serves a mixture: engine0/worker0: hf.s0.dense1: never received"
SILENT = r"rule 8: rank 1 went on as if nothing had happened"


@pytest.mark.parametrize(("name", "adapter", "world", "fault", "text"), [
    ("ErrorsOfEnginesIgnored", "OLD_STYLE", ONE, f"engine0 raises {UPDATE}#1", IGNORED),
    ("ErrorsOfEnginesIgnored", "OLD_STYLE", ONE, "engine0 dies flush_cache#0",
     r"rule 8: no rank raised, and not every engine serves the new weights"),
    ("ResumesInFinally", "BOUNDED", TWO, f"engine0 raises {UPDATE}#0", r"rule 9: engine0 generates with unfit weights"),
    ("VersionWithBuckets", "BOUNDED", TWO, f"engine1 raises {UPDATE}#0",
     r"rule 9: engine0 publishes version 1 with other weights: .*hf.s1.dense0: never received"),
    ("OnlyTheLeadRaises", "BOUNDED", TWO, f"engine0 silent {UPDATE}#0", SILENT),
    ("OnlyTheLeadRaises", "BOUNDED", TWO, f"engine1 dies {UPDATE}#0", SILENT),
    ("OnlyTheLeadRaises", "BOUNDED", TWO, "rank0 raises rpc#2", SILENT),
    ("OnlyTheLeadRaises", "BOUNDED", TWO, "rank0 dies rpc#2", SILENT),
    ("SessionLeftOpen", "BOUNDED", TWO, f"engine0 raises {UPDATE}#1",
     r"rule 10: the next update fails on rank 0: .*start_weight_update called while a weight update is already active"),
])
def test_a_failure_path_with_a_mistake_is_found_and_told(name: str, adapter: str, world: str, fault: str, text: str) -> None:
    scenario = replace(mistaken(name, adapter).world(world), fault=fault)
    run = run_once(scenario, Uniform(3))
    assert re.search(text, run.outcome.text), run.outcome.text
    assert replay(scenario, encode(run.choices)).outcome == run.outcome


def test_the_old_style_that_claims_deadlines_is_shown_where_it_waits() -> None:
    """For an engine that never answers; the time-out of torch's barrier on the other rank is longer than was promised."""
    claims = Scenario(tp=2, impl=example("old_style").impl, adapter=f"{HERE}:CLAIMS", fault=f"engine0 silent {UPDATE}#0")
    outcome = run_once(claims, Uniform(1)).outcome
    first, *table = outcome.text.splitlines()
    assert outcome.kind == "deadlock" and first == (
        "nobody can run and the next deadline, at 1800 s, comes after 600 s, when nobody may still wait")
    assert any(re.match(rf"rank0 +ray.get .*{UPDATE} of engine0", row) for row in table), outcome.text
    assert any(re.match(r"rank1 +barrier +gloo .* rank 0 ", row) for row in table), outcome.text


@pytest.mark.parametrize(("implementation", "world", "meets_s", "patience_s"), [
    (Implementation(example("bounded").impl, f"{HERE}:IMPATIENT"), TWO, 800, 500),
    (mistaken("BoundedExperts", "IMPATIENT_EXPERTS", HERE), "experts over two replicas", 1100, 1000),
    (mistaken("BoundedBridge", "IMPATIENT_BRIDGE", HERE), "bridge, two stages", 1100, 1000)])
def test_a_rank_that_waits_longer_than_its_owner_says_is_found(implementation: Implementation, world: str, meets_s: int,
                                                               patience_s: int) -> None:
    late = replace(implementation.world(world), fault="rank1 dies gather#1")
    outcome = run_once(late, Uniform(1)).outcome
    why = f"nobody can run and the next deadline, at {meets_s} s, comes after {patience_s} s, when nobody may still wait"
    assert outcome.text.startswith(why), outcome.text
    assert re.search(r"\nrank0 +all_gather_object +group1 .* rank 1 ", outcome.text), outcome.text


def test_faults_are_not_looked_for_where_it_does_not_go_well_without_them() -> None:
    with pytest.raises(AssertionError, match=r"deadlock in schedule 1 \(round robin, without a fault\)"):
        strike_everywhere(example("old_style").world("two stages"), Uniform)
