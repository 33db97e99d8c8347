"""Foreign implementations in the simulator, shown on three that the harness brings: the old style, the old style with deferral,
and asynchronous broadcasts into named groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.foreign.active import here
from harness.foreign.adapter import Adapter
from harness.foreign.simulation import load
from harness.foreign.stubs import installed
from harness.sim import Scenario, explore, replay
from harness.sim.schedulers.reduced import Reduced
from harness.sim.schedulers.uniform import Uniform
from tests_cpu.conftest import mark_listed
from tests_cpu.sim.protocol import WORLDS, Implementation

ROOT = Path(__file__).parents[2]
EXAMPLES = "harness.foreign.examples"


def example(name: str) -> Implementation:
    return Implementation(f"{EXAMPLES}.{name}:UpdateWeightFromDistributed", f"{EXAMPLES}.adapters:{name.upper()}")


@pytest.mark.parametrize("name", ["old_style", "deferred", "named_groups"])
def test_with_one_stage_all_of_them_are_right(name: str) -> None:
    world = example(name).world("one stage, engines of 1 and 2")
    assert explore(world, Reduced(), schedules=100).check().complete
    explore(world, Uniform(1), schedules=40).check()


def test_the_old_style_hangs_with_two_stages_and_the_table_names_both_groups() -> None:
    world = example("old_style").world("two stages")
    found = explore(world, Uniform(1), schedules=40)
    assert "well" not in found.outcomes, found.text()
    hang = next(f for f in found.failures if f.outcome.kind == "deadlock")
    assert hang.number <= 40 and "vime-pp_0" in hang.outcome.text and "vime-pp_1" in hang.outcome.text
    assert replay(world, hang.schedule).outcome == hang.outcome


@pytest.mark.parametrize("name", [n for n, (_, needs) in WORLDS.items() if "deferral" in needs])
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


def test_a_rule_that_an_implementation_does_not_claim_is_not_asked_of_it() -> None:
    """`ray.get` without a time-out is a violation of rule 11 for those who declare deadlines."""
    claims = Scenario(impl=f"{EXAMPLES}.old_style:UpdateWeightFromDistributed", adapter="tests_cpu.sim.test_foreign:CLAIMS")
    found = explore(claims, Uniform(1), schedules=1)
    assert "rule 11: rank0 waits without a deadline in ray.get" in found.failures[0].outcome.text


CLAIMS = Adapter(load(f"{EXAMPLES}.adapters:OLD_STYLE").capabilities | {"deadlines"},
                 replace=load(f"{EXAMPLES}.adapters:OLD_STYLE").replace)


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown capabilities \['magic'\]; there are: moe: "):
        Adapter(frozenset({"magic"}))


def test_the_stubs_are_gone_afterwards_and_say_what_they_lack() -> None:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("ray", "vllm", "megatron")}
    with installed({"ray.serve": {"answer": 42}}):
        import ray  # type: ignore[import-not-found, unused-ignore]
        with pytest.raises(AttributeError, match=r"the stub of ray has no 'init'.*adapter's `stubs`"):
            ray.init()
        from ray.serve import answer  # type: ignore[import-not-found, unused-ignore]
        assert answer == 42
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("ray", "vllm", "megatron")}
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
                 "capabilities: packed, session; not declared: moe (experts", "receiver model: stock vllm 0.27", "bounds: ",
                 "seed: 2026", "not declared: deferral"]:
        assert line in done.stdout, done.stdout


def test_known_failures_are_listed_in_a_file_and_an_id_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    listed = tmp_path / "xfails"
    node = "tests_cpu/sim/test_protocol.py::test_random_schedules_end_well[two stages, engines of 1 and 2]"
    listed.write_text(f"# two engines can wait for each other\n{node}\n")
    done = command(tmp_path, "named_groups", "--xfails-file", str(listed))
    assert done.returncode == 0 and "1 xfailed" in done.stdout, done.stdout + done.stderr
    with pytest.raises(pytest.UsageError, match=r"fit no test: .*test_random_schedules"):
        mark_listed([], str(listed), pytest.mark.skip)
