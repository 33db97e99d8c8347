"""Deadlines nest: what a test waits for < the test's own deadline < pytest-timeout's."""

from __future__ import annotations

from harness.world.world import END_WITHIN_S, ERROR_GRACE_S, SNAPSHOTS_WITHIN_S, START_WITHIN_S

IMPORTS_WITHIN_S = 120.0
"""Ten seconds on an idle machine with a warm page cache; cold disks and busy cores take a minute."""

REPORT_S = ERROR_GRACE_S + SNAPSHOTS_WITHIN_S + END_WITHIN_S
"""From a test's deadline to its failure: snapshots, the table, the end of the world."""

WORLD_GUARD_S = IMPORTS_WITHIN_S + START_WITHIN_S + REPORT_S
"""How much later than a test's own deadline pytest-timeout may strike at the earliest: the first test also pays for the
imports and the start of its world."""


class DeadlinesDoNotNest(ValueError):
    """pytest-timeout would end a test before its hang report is made."""


def check_nesting(test: str, limit_s: float, outer_s: float) -> None:
    """Raises `DeadlinesDoNotNest` where the outer guard `outer_s` leaves no room for what happens inside."""
    if outer_s < limit_s + WORLD_GUARD_S:
        raise DeadlinesDoNotNest(
            f"{test}: timeout({outer_s:g}) must be at least nccl_timeout {limit_s:g} s + {WORLD_GUARD_S:g} s for starting "
            f"the world and reporting a hang; raise it, or leave it out and it is set")
