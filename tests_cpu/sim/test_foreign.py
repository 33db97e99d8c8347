"""Foreign implementations in the simulator, shown on six that the harness brings: each is right where it says so. What is found
where one is wrong: test_foreign_mistakes.py."""

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
from harness.foreign.job import ForeignJob
from harness.foreign.stubs import installed
from harness.sim import Scenario, explore, replay
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from tests_cpu.conftest import mark_listed
from tests_cpu.sim.protocol import EXAMPLES, WORLDS, Implementation, example

ROOT = Path(__file__).parents[2]
HERE = "tests_cpu.sim.test_foreign"


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


@pytest.mark.parametrize(("name", "rules"), [("named_groups", []), ("old_style", ["rule 1"])])
def test_a_second_group_beside_a_live_one_is_noted_where_receivers_hold_one(name: str, rules: list[str]) -> None:
    job = ForeignJob(example(name).world("one stage"))
    with job.scope():
        assert job.connect().violations == ()
        assert [text[:6] for text in job.connect().violations] == rules
    job.close()


def test_a_replacement_of_a_name_that_is_not_there_is_refused() -> None:
    wrong = Scenario(impl=example("old_style").impl, adapter=f"{HERE}:MISSPELT")
    with pytest.raises(AttributeError, match=r"the adapter replaces .*old_style.gloo, but .*old_style has no 'gloo'"):
        explore(wrong, Uniform(1), schedules=1)


FORGETS = Adapter()
CLAIMS = replace(adapters.OLD_STYLE, capabilities=adapters.OLD_STYLE.capabilities | {"deadlines"}, patience_s=600.0)
MISSPELT = Adapter(replace={f"{EXAMPLES}.old_style.gloo": dist.gloo_group})


def test_a_rule_that_an_implementation_does_not_claim_is_not_asked_of_it() -> None:
    """`ray.get` without a time-out is a violation of rule 11 for those who declare deadlines."""
    claims = Scenario(impl=example("old_style").impl, adapter=f"{HERE}:CLAIMS")
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
