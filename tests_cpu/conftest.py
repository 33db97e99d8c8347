"""The CPU tier: how thorough to be, whose implementation to test, and a header that says so."""

from __future__ import annotations

import pytest

DRAWN = 20_000
"""Schedules over drawn worlds in `nox -s cpu` (tests_cpu/sim/test_drawn_worlds.py)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("staged-sync", "staged-sync simulator (tests_cpu)")
    group.addoption("--thorough", action="store_true", help="also run what is marked `thorough` (nox -s explore)")
    group.addoption("--seed", type=int, default=2026, help="seed of every exploration (default 2026)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: a longer exploration, only with --thorough (nox -s explore)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.thorough:
        return
    later = [item for item in items if item.get_closest_marker("thorough")]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]
