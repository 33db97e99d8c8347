"""What a mutant is: one defect, put in for the length of a `with` block, and the test that must turn red."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`rule` is the rule of design.md section 4 that it breaks; `reports` are rows of the public reports it comes from."""

    name: str
    rule: int
    reports: tuple[str, ...]
    apply: Callable[[], AbstractContextManager[Any]]
    caught_by: str
    """`package.module:function` of the test that must fail."""
    message: str
    """A fragment of what that test then says."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a parametrized test."""

    def run_test(self) -> None:
        """Run the named test in this process, without pytest around it."""
        module, function = self.caught_by.split(":")
        getattr(importlib.import_module(module), function)(**self.arguments)


class NotCaught(AssertionError):
    """A mutant lives: its test passed, or failed for another reason than the one expected."""


def assert_caught(mutant: Mutant) -> str:
    """Apply `mutant`, run its test, and return what the test said. Raises `NotCaught`."""
    with mutant.apply():
        try:
            mutant.run_test()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        else:
            raise NotCaught(f"mutant '{mutant.name}' lives: {mutant.caught_by} passed")
    if mutant.message not in said:
        raise NotCaught(f"mutant '{mutant.name}' was caught with another message than '{mutant.message}':\n{said}")
    return said
