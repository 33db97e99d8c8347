"""Foreign implementations in the simulator, shown on six that the harness brings: each is right where it says so, and every
mistake that is made in one of them on purpose (mistaken.py) is found, and told so that it can be mended."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.foreign import dist
from harness.foreign.active import here
from harness.foreign.adapter import Adapter
from harness.foreign.examples import adapters
from harness.foreign.stubs import installed
from harness.sim import Scenario, explore, replay
from harness.sim.explore import run_once
from harness.sim.schedule import encode
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from harness.sim.struck import strike_everywhere
from tests_cpu.conftest import mark_listed
from tests_cpu.sim.protocol import FAULTS, STRUCK, WORLDS, Implementation

ROOT = Path(__file__).parents[2]
EXAMPLES = "harness.foreign.examples"
HERE = "tests_cpu.sim.test_foreign"


def example(name: str) -> Implementation:
    return Implementation(f"{EXAMPLES}.{name}:UpdateWeightFromDistributed", f"{EXAMPLES}.adapters:{name.upper()}")


@pytest.mark.parametrize("name", ["old_style", "deferred", "named_groups"])
def test_with_one_stage_all_of_them_are_right(name: str) -> None:
    world = example(name).world("one stage, engines of 1 and 2")
    assert explore(world, Reduced(), schedules=100).check().complete
    explore(world, Uniform(1), schedules=40).check()


@pytest.mark.parametrize(("name", "world"), [
    (name, world) for name, capability in (("experts", "moe"), ("bridged", "bridge"))
    for world, (_, needed) in WORLDS.items() if capability in needed and not example(name).lacks(world)])
def test_experts_and_bridges_are_gathered_by_those_who_say_so(name: str, world: str) -> None:
    scenario = example(name).world(world)
    assert explore(scenario, Reduced(), schedules=100).check().complete
    explore(scenario, Uniform(1), schedules=20).check()


def test_the_old_style_hangs_with_two_stages_and_the_table_names_both_groups() -> None:
    world = example("old_style").world("two stages")
    found = explore(world, Uniform(1), schedules=40)
    assert "well" not in found.outcomes, found.text()
    hang = next(f for f in found.failures if f.outcome.kind == "deadlock")
    assert hang.number <= 40 and "vime-pp_0" in hang.outcome.text and "vime-pp_1" in hang.outcome.text
    assert replay(world, hang.schedule).outcome == hang.outcome


@pytest.mark.parametrize("name", [
    n for n, (_, needs) in WORLDS.items() if "deferral" in needs and not example("deferred").lacks(n)])
def test_deferral_is_all_it_needed(name: str) -> None:
    world = example("deferred").world(name)
    assert explore(world, Reduced(), schedules=200).check().complete
    explore(world, Uniform(1), schedules=30).check()


def test_named_groups_serve_two_stages_at_once_but_two_engines_can_be_asked_in_opposite_order() -> None:
    one, two = example("named_groups").world("two stages"), example("named_groups").world("two stages, engines of 1 and 2")
    assert explore(one, Reduced(), schedules=500).check().complete
    found = explore(two, Reduced(), schedules=500)
    deadlocks = [f.outcome for f in found.failures if f.outcome.kind == "deadlock"]
    assert deadlocks and all("in join vime-pp_0" in str(d.waits) and "in join vime-pp_1" in str(d.waits) for d in deadlocks)


ADAPTER_FILE = """
from harness.foreign import dist, model
from harness.foreign.adapter import Adapter

ADAPTER = Adapter(frozenset({"session", "packed"}), replace={
    "elsewhere.sync.get_gloo_group": dist.gloo_group, "elsewhere.sync.free_port": model.free_port,
    "elsewhere.sync.hf_tensors": model.named_tensors})
"""


def test_an_implementation_is_taken_unmodified_from_its_own_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "elsewhere"
    tree.mkdir()
    (tree / "__init__.py").touch()
    (tree / "sync.py").write_text((ROOT / "harness/foreign/examples/old_style.py").read_text())
    (tmp_path / "their_adapter.py").write_text(ADAPTER_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = Implementation("elsewhere.sync:UpdateWeightFromDistributed", "their_adapter:ADAPTER")
    assert explore(theirs.world("one stage, packed"), Reduced(), schedules=100).check().complete
    assert "well" not in explore(theirs.world("two stages"), Uniform(1), schedules=10).outcomes


def test_what_an_adapter_has_forgotten_is_said_with_the_line_that_wants_it() -> None:
    forgets = Scenario(impl=example("old_style").impl, adapter=f"{HERE}:FORGETS")
    text = explore(forgets, Uniform(1), schedules=1).failures[0].outcome.text
    assert re.fullmatch(r"rank 0: NotImplementedError: made by the framework \(old_style.py:\d+ in get_gloo_group\)", text), text


def test_a_replacement_of_a_name_that_is_not_there_is_refused() -> None:
    wrong = Scenario(impl=example("old_style").impl, adapter=f"{HERE}:MISSPELT")
    with pytest.raises(AttributeError, match=r"the adapter replaces .*old_style.gloo, but .*old_style has no 'gloo'"):
        explore(wrong, Uniform(1), schedules=1)


FORGETS = Adapter()
MISSPELT = Adapter(replace={f"{EXAMPLES}.old_style.gloo": dist.gloo_group})


def test_a_rule_that_an_implementation_does_not_claim_is_not_asked_of_it() -> None:
    """`ray.get` without a time-out is a violation of rule 11 for those who declare deadlines."""
    claims = Scenario(impl=f"{EXAMPLES}.old_style:UpdateWeightFromDistributed", adapter="tests_cpu.sim.test_foreign:CLAIMS")
    found = explore(claims, Uniform(1), schedules=1)
    assert "rule 11: rank0 waits without a deadline in ray.get" in found.failures[0].outcome.text


@pytest.mark.parametrize(("fields", "text"), [
    ({"capabilities": frozenset({"magic"})}, r"unknown capabilities \['magic'\]; there are: session: "),
    ({"capabilities": frozenset({"deadlines"})}, r"patience_s belongs to the capability deadlines: .*\(got None\)"),
    ({"patience_s": 10.0}, r"patience_s belongs to the capability deadlines"),
    ({"capabilities": frozenset({"deadlines"}), "patience_s": float("inf")}, r"patience_s must be positive and finite"),
    ({"capabilities": frozenset({"recovery"})}, r"recovery needs deadlines"),
])
def test_what_an_adapter_cannot_mean_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Adapter(**fields)


# --- mistakes -----------------------------------------------------------------------------------------------------------
def mistaken(name: str, adapter: str) -> Implementation:
    return Implementation(f"tests_cpu.sim.mistaken:{name}", adapter)


@pytest.mark.parametrize(("name", "adapter", "world", "texts"), [
    ("OneReplicaExports", "EXPERTS", "experts over two replicas",
     [r"rank0 +all_gather_object +ep\[0,1\] .* rank 1 ", r"rank1 +barrier +gloo .* rank 0 "]),
    ("LocalNumbers", "EXPERTS", "experts over two replicas", [r"rule 6 .*receive.done of hf.s0.expert0, once too often"]),
    ("RanksSwapped", "EXPERTS", "experts over two replicas",
     [r"rule 12: .*hf.s0.expert0: other bytes than step 1, those of hf.s0.expert2"]),
    ("ExpertsNotGathered", "EXPERTS", "experts over two replicas, tensor parallel",
     [r"rank 0: ValueError: .*experts.linear.weight0: 5 elements were gathered, all shards have 10: .* \(mistaken.py:"]),
    ("SourceRaises", "OLD_STYLE", "bridge, one stage", [
        r"^rank 0: ValueError: no bucket today \(mistaken.py:\d+ in broadcast\)",
        r"also: the others: deadlock: nobody can run", r"rank1 +barrier +gloo .* rank 0 "]),
    ("OneStageIterates", "BRIDGED", "bridge, two stages",
     [r"rank0 +bridge hf.s0.dense0 +pp\[0,1\] .* rank 1 ", r"rank1 +barrier +gloo .* rank 0 "]),
])
def test_a_mistake_is_found_and_told(name: str, adapter: str, world: str, texts: list[str]) -> None:
    scenario = mistaken(name, f"{EXAMPLES}.adapters:{adapter}").world(world)
    found = explore(scenario, Uniform(1), schedules=10)
    assert "well" not in found.outcomes
    for text in texts:
        assert re.search(text, found.failures[0].outcome.text), found.failures[0].outcome.text
    assert replay(scenario, found.failures[0].schedule).outcome == found.failures[0].outcome


# --- failures -----------------------------------------------------------------------------------------------------------
CLAIMS = replace(adapters.OLD_STYLE, capabilities=adapters.OLD_STYLE.capabilities | {"deadlines"}, patience_s=600.0)
IMPATIENT = replace(adapters.BOUNDED, patience_s=500.0)
GATHERS = {"group_timeout_s": 300.0, "patience_s": 1200.0}  # first in a gather, then in a meeting
BOUNDED_EXPERTS = replace(adapters.EXPERTS, capabilities=adapters.BOUNDED.capabilities | {"moe"}, **GATHERS)
BOUNDED_BRIDGE = replace(adapters.BOUNDED, capabilities=adapters.BOUNDED.capabilities | {"bridge"}, **GATHERS)

WITH_DEADLINES = {
    "one stage, engines of 1 and 2": example("bounded"), "two stages, engines of 1 and 2": example("bounded"),
    "experts over two replicas": mistaken("BoundedExperts", f"{HERE}:BOUNDED_EXPERTS"),
    "bridge, two stages": mistaken("BoundedBridge", f"{HERE}:BOUNDED_BRIDGE"),
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


UPDATE = "update_weights_from_distributed"


@pytest.mark.parametrize(("name", "adapter", "fault", "texts"), [
    ("ErrorsOfEnginesIgnored", f"{EXAMPLES}.adapters:OLD_STYLE", f"engine0 raises {UPDATE}#1", [
        r"rule 9: engine0 serves a mixture: engine0/worker0: hf.s0.dense1: never received"]),
    ("ResumesInFinally", f"{EXAMPLES}.adapters:BOUNDED", f"engine0 raises {UPDATE}#0", [
        r"rule 9: engine0 generates with unfit weights"]),
    ("VersionWithBuckets", f"{EXAMPLES}.adapters:BOUNDED", f"engine1 raises {UPDATE}#0", [
        r"rule 9: engine0 publishes version 1 with other weights: .*hf.s1.dense0: never received"]),
    ("OnlyTheLeadRaises", f"{EXAMPLES}.adapters:BOUNDED", f"engine0 silent {UPDATE}#0", [
        r"rule 8: rank 1 went on as if nothing had happened"]),
    ("SessionLeftOpen", f"{EXAMPLES}.adapters:BOUNDED", f"engine0 raises {UPDATE}#1", [
        r"rule 10: the next update fails on rank 0: .*start_weight_update called while a weight update is already active"]),
])
def test_a_failure_path_with_a_mistake_is_found_and_told(name: str, adapter: str, fault: str, texts: list[str]) -> None:
    world = STRUCK[0] if name == "ErrorsOfEnginesIgnored" else STRUCK[1]
    scenario = replace(mistaken(name, adapter).world(world), fault=fault)
    run = run_once(scenario, Uniform(3))
    for text in texts:
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


def test_a_rank_that_waits_longer_than_its_owner_says_is_found() -> None:
    late = replace(example("bounded").world(STRUCK[1]), adapter=f"{HERE}:IMPATIENT", fault="rank1 dies gather#1")
    assert run_once(late, Uniform(1)).outcome.text.startswith(
        "nobody can run and the next deadline, at 800 s, comes after 500 s, when nobody may still wait")


def test_faults_are_not_looked_for_where_it_does_not_go_well_without_them() -> None:
    with pytest.raises(AssertionError, match=r"deadlock in schedule 1 \(round robin, without a fault\)"):
        strike_everywhere(example("old_style").world("two stages"), Uniform)


STUBBED = ("ray", "vllm", "megatron", "mbridge")


def test_the_stubs_are_gone_afterwards_and_say_what_they_lack() -> None:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in STUBBED}
    with installed({"ray.serve": {"answer": 42}}):
        import ray  # type: ignore[import-not-found, unused-ignore]
        with pytest.raises(AttributeError, match=r"the stub of ray has no 'init'.*adapter's `stubs`"):
            ray.init()
        from ray.serve import answer  # type: ignore[import-not-found, unused-ignore]
        assert answer == 42
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] in STUBBED}
    assert after == before


def test_a_stub_outside_of_a_simulation_says_so() -> None:
    with pytest.raises(RuntimeError, match="no simulation is running"):
        here()


def command(tmp_path: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    under_test = example(name)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests_cpu/sim/test_protocol.py", "--impl", under_test.impl, "--adapter",
         under_test.adapter, "-p", "no:cacheprovider", "-k", "random and stages and (two or one) and not packed", *more],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_that_a_stranger_types_names_what_is_under_test_and_what_is_skipped(tmp_path: Path) -> None:
    done = command(tmp_path, "old_style")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ["implementation under test: harness.foreign.examples.old_style:UpdateWeightFromDistributed (adapter ",
                 "capabilities: packed, session\n", "receiver model: stock vllm 0.27", "bounds: ", "seed: 2026",
                 "not declared: moe (experts are exported and gathered in the expert groups): worlds skipped: 'experts over"]:
        assert line in done.stdout, done.stdout
    assert re.search(r"SKIPPED .* not declared: deferral$", done.stdout, re.MULTILINE), done.stdout


def test_known_failures_are_listed_in_a_file_and_an_id_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    listed = tmp_path / "xfails"
    node = "tests_cpu/sim/test_protocol.py::test_random_schedules_end_well[two stages, engines of 1 and 2]"
    listed.write_text(f"# two engines can wait for each other\n{node}\n")
    done = command(tmp_path, "named_groups", "--xfails-file", str(listed))
    assert done.returncode == 0 and "1 xfailed" in done.stdout, done.stdout + done.stderr
    with pytest.raises(pytest.UsageError, match=r"fit no test: .*test_random_schedules"):
        mark_listed([], str(listed), pytest.mark.skip)
