"""What a mutant is: one defect, put in for the length of a `with` block, and what must notice it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from harness.sim.explore import explore
from harness.sim.scenario import Scenario
from harness.sim.schedulers.uniform import Uniform

SEED, SCHEDULES = 2026, 100
"""How long a world is explored for a mutant."""

GREEN_SCHEDULES = 40
"""And without one: ten times as many as the slowest mutant needs."""


@dataclass(frozen=True)
class NamedTest:
    """`where` is `package.module:function`; `arguments` are those of a parametrized test."""

    where: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """In this process, without pytest around it."""
        module, function = self.where.split(":")
        getattr(importlib.import_module(module), function)(**self.arguments)

    def __str__(self) -> str:
        return self.where.rsplit(".", 1)[-1]


CaughtBy: TypeAlias = NamedTest | Scenario
"""A test that must fail, or a world in which some schedule must."""


@dataclass(frozen=True)
class Mutant:
    """`rule` is the rule of design.md section 4 that it breaks; `reports` are public reports it comes from. `message`: a
    fragment of what whoever catches it must say."""

    name: str
    rule: int
    reports: tuple[str, ...]
    apply: Callable[[], AbstractContextManager[Any]]
    caught_by: CaughtBy
    message: str


@dataclass(frozen=True)
class Caught:
    """How a mutant was caught. `schedules`: how many it took, None for a test that runs one story."""

    said: str
    schedules: int | None = None


class NotCaught(AssertionError):
    """A mutant lives: nothing failed, or something else than expected did."""


def assert_caught(mutant: Mutant) -> Caught:
    """Apply `mutant` and let it be caught. Raises `NotCaught`."""
    by = mutant.caught_by
    caught = _by_test(mutant, by) if isinstance(by, NamedTest) else _by_world(mutant, by)
    if mutant.message not in caught.said:
        raise NotCaught(f"mutant '{mutant.name}' was caught with another message than '{mutant.message}':\n{caught.said}")
    return caught


def _by_test(mutant: Mutant, test: NamedTest) -> Caught:
    with mutant.apply():
        try:
            test.run()
        except Exception as error:
            return Caught(f"{type(error).__name__}: {error}")
    raise NotCaught(f"mutant '{mutant.name}' lives: {test.where} passed")


def _by_world(mutant: Mutant, world: Scenario) -> Caught:
    """The first schedule that says what is expected; otherwise all that was said."""
    with mutant.apply():
        found = explore(world, Uniform(SEED), schedules=SCHEDULES, until=lambda failure: mutant.message in failure.outcome.text)
    if not found.failures:
        raise NotCaught(f"mutant '{mutant.name}' lives: {SCHEDULES} schedules of {world!r} ended well")
    fitting = [f for f in found.failures if mutant.message in f.outcome.text]
    return Caught("\n\n".join(f.text() for f in fitting or found.failures), (fitting or found.failures)[0].number)


def assert_green(caught_by: CaughtBy) -> None:
    """Without a defect, the same test passes, and schedules of the same world end well."""
    if isinstance(caught_by, NamedTest):
        caught_by.run()
    else:
        explore(caught_by, Uniform(SEED), schedules=GREEN_SCHEDULES).check()
