"""The CPU tier: how thorough to be, whose implementation to test, and a header that says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from harness.foreign.adapter import Adapter
from tests_cpu.sim.protocol import Implementation

BOUNDS = "reduced search up to 500 or 1,000 schedules a world, 60,000 steps a schedule, worlds of at most 16 ranks"

settings.register_profile("any machine", deadline=None)  # a busy one takes its time
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("staged-sync", "staged-sync simulator (tests_cpu)")
    group.addoption("--thorough", action="store_true", help="also run what is marked `thorough` (nox -s explore)")
    group.addoption("--seed", type=int, default=2026, help="seed of every exploration (default 2026)")
    group.addoption("--impl", default="", metavar="MODULE:CLASS", help="run the protocol suite on this implementation instead")
    group.addoption("--adapter", default="", metavar="MODULE:NAME", help="what the suite must know about --impl")
    group.addoption("--skips-file", metavar="FILE", help="node ids, one a line, that are not run")
    group.addoption("--xfails-file", metavar="FILE", help="node ids, one a line, that are known to fail")
    group.addoption("--impl-path", default="", metavar="FOLDER", help="where --impl and --adapter are imported from")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: a longer exploration, only with --thorough (nox -s explore)")
    config.addinivalue_line("markers", "protocol: the suite that any implementation can be run against (--impl)")
    config.addinivalue_line("markers", "only_others: of the protocol suite, what is asked of ours in other tests")
    if config.option.impl_path:
        sys.path.insert(0, str(Path(config.option.impl_path).resolve()))


def pytest_report_header(config: pytest.Config) -> list[str]:
    option = config.option
    under_test = Implementation(option.impl, option.adapter)
    receiver = under_test.declared().receiver if option.impl else "vllm, stock vllm, stock vllm 0.27, vime"
    lines = [f"receiver model: {receiver}", f"bounds: {BOUNDS}", f"seed: {option.seed}"]
    if option.impl:
        declared = ", ".join(sorted(under_test.capabilities())) or "none"
        lines = [f"implementation under test: {option.impl} (adapter {option.adapter or 'none'})", f"capabilities: {declared}",
                 *under_test.not_declared(), *_time_outs(under_test.declared()), *lines]
    return lines


def _time_outs(adapter: Adapter) -> list[str]:
    lines = [f"time-out of the trainer's own groups: {adapter.group_timeout_s:g} s"]
    return lines if adapter.patience_s is None else [*lines, f"no rank waits after {adapter.patience_s:g} s"]


def mark_listed(items: list[pytest.Item], file: str | None, marker: pytest.MarkDecorator) -> None:
    """Mark the tests that `file` lists; an id that fits no test is an error, because it is a typo or out of date."""
    lines = Path(file).read_text().splitlines() if file else []
    listed = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(marker)
    if unknown := listed - {item.nodeid for item in items}:
        raise pytest.UsageError(f"ids in {file} that fit no test: {', '.join(sorted(unknown))}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`thorough` on demand only; with `--impl`, the protocol suite only: all other tests are about ours."""
    def wanted(item: pytest.Item) -> bool:
        if config.option.impl and not item.get_closest_marker("protocol"):
            return False
        if item.get_closest_marker("only_others") and not config.option.impl:
            return False
        return config.option.thorough or not item.get_closest_marker("thorough")

    skips, xfails = config.option.skips_file, config.option.xfails_file
    mark_listed(items, skips, pytest.mark.skip(reason=f"listed in {skips}"))
    mark_listed(items, xfails, pytest.mark.xfail(reason=f"listed in {xfails}", strict=True))
    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]
