"""Every mutant of the zoo turns its named test red, with the message that belongs to it; without it the test is green."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from harness.mutants.mutant import Mutant, NotCaught, assert_caught
from harness.mutants.zoo import ZOO, named


@pytest.mark.parametrize("mutant", ZOO, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_by_its_test_with_its_message(mutant: Mutant) -> None:
    mutant.run_test()  # green without the defect
    assert_caught(mutant)
    mutant.run_test()  # and the defect is gone again


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ZOO}) == len(ZOO)


def test_a_mutant_that_changes_nothing_is_not_called_caught() -> None:
    with pytest.raises(NotCaught, match="mutant 'no deferral' lives"):
        assert_caught(replace(named("no deferral"), apply=nullcontext))


def test_a_mutant_caught_for_another_reason_is_not_called_caught() -> None:
    with pytest.raises(NotCaught, match="another message than 'the moon'"):
        assert_caught(replace(named("no deferral"), message="the moon"))
