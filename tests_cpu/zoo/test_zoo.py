"""Every mutant of the zoo is caught, with the message that belongs to it; without it the same test or world is green."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from harness.mutants.mutant import SCHEDULES, CaughtBy, Mutant, NamedTest, NotCaught, assert_caught, assert_green
from harness.mutants.table import HEAD, row, rows_of
from harness.mutants.zoo import ZOO, named
from harness.sim import Scenario
from harness.sim.explore import explore
from harness.sim.schedulers.reduced import Reduced

PAGE = Path(__file__).parents[2] / "docs" / "bug-zoo.md"
CATCHERS: list[CaughtBy] = list({repr(mutant.caught_by): mutant.caught_by for mutant in ZOO}.values())


@pytest.mark.parametrize("mutant", ZOO, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_and_the_page_says_how(mutant: Mutant) -> None:
    caught = assert_caught(mutant)
    assert row(mutant, caught) in rows_of(PAGE), f"{PAGE.name} is out of date: make it again with python -m harness.mutants.table"


@pytest.mark.parametrize("catcher", CATCHERS, ids=str)
def test_what_catches_them_is_green_without_a_defect(catcher: CaughtBy) -> None:
    assert_green(catcher)


@pytest.mark.parametrize("catcher", [c for c in CATCHERS if isinstance(c, Scenario) and not c.fault], ids=str)
def test_and_so_is_a_complete_search_of_their_worlds(catcher: Scenario) -> None:
    assert explore(catcher, Reduced(), schedules=SCHEDULES).check().complete


def test_the_zoo_is_large_and_its_names_and_places_are_its_own() -> None:
    assert len(ZOO) >= 30
    assert len({mutant.name for mutant in ZOO}) == len(ZOO)
    assert all(mutant.reports and 1 <= mutant.rule <= 14 for mutant in ZOO)
    page = PAGE.read_text().splitlines()
    assert [line for line in page if line.startswith("| ") and line not in HEAD.splitlines()] == rows_of(PAGE)
    assert len(rows_of(PAGE)) == len(ZOO)


def test_a_mutant_that_changes_nothing_is_not_called_caught() -> None:
    for name in ("no deferral", "old behaviour"):
        with pytest.raises(NotCaught, match=f"mutant '{name}' lives"):
            assert_caught(replace(named(name), apply=nullcontext))


@pytest.mark.parametrize("name", ["no deferral", "old behaviour"])
def test_a_mutant_caught_for_another_reason_is_not_called_caught(name: str) -> None:
    with pytest.raises(NotCaught, match="another message than 'the moon'"):
        assert_caught(replace(named(name), message="the moon"))


def test_a_name_that_is_not_in_the_zoo_is_answered_with_those_that_are() -> None:
    with pytest.raises(KeyError, match="no mutant 'unicorn' in the zoo; there are: old behaviour, "):
        named("unicorn")


def test_catchers_are_tests_or_worlds() -> None:
    assert {type(catcher) for catcher in CATCHERS} == {NamedTest, Scenario}
