"""How one schedule ended: one of eight kinds, each with its own text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from harness.recording.kernel import Deadlock, StepBound
from harness.sim.invariants import Violation

Kind: TypeAlias = Literal["well", "deadlock", "step bound", "mismatch", "invariant", "leak", "error", "not as planned"]
"""
well            every rank returned, every rule held
deadlock        nobody can go on, or only a deadline would end it
step bound      no end: somebody polls for ever
mismatch        two parties of one operation differ in operation, group, root, shape or dtype
invariant       a rule of design.md section 4 was broken
leak            a transfer group is still open after the update
error           a rank raised
not as planned  a planted fault did not fire, or what must fail did not
"""


_NUMBERS = re.compile(r" \(after event .*\)| at event \d+")
"""Where in the trace it showed: differs between schedules that fail alike."""


@dataclass(frozen=True)
class Outcome:
    """`text` is for people; `summary` is the same for all schedules that fail alike: who waits where, or the first line."""

    kind: Kind
    text: str = ""
    waits: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        if self.waits:
            return f"{self.kind}: {', '.join(self.waits)}"
        return f"{self.kind}: {_NUMBERS.sub('', self.text.splitlines()[0])}" if self.text else self.kind


@dataclass(frozen=True)
class Findings:
    """All that was seen in one schedule."""

    stopped: Deadlock | StepBound | None = None
    noted: Sequence[str] = ()
    """What engines and groups noted on the way: "rule 1: …", "mismatch: …"."""
    broken: Sequence[Violation] = ()
    leaked: Sequence[str] = ()
    raised: Sequence[str] = ()
    unplanned: Sequence[str] = ()

    def outcome(self) -> Outcome:
        """The kind that explains most, and below it everything else that was seen."""
        kind, first = self._first()
        rest = [line for line in self._all() if line not in first]
        if kind == "well":
            return Outcome("well")
        waits = self.stopped.waits if isinstance(self.stopped, Deadlock) else ()
        return Outcome(kind, "\n".join([first, *(f"also: {line}" for line in rest)]), waits)

    def _first(self) -> tuple[Kind, str]:
        mismatches = [text.removeprefix("mismatch: ") for text in self.noted if text.startswith("mismatch: ")]
        # Sorted: which of two independent parties showed it first is no difference between schedules.
        rules = [*sorted(text for text in self.noted if text.startswith("rule ")), *map(rule_text, self.broken)]
        if isinstance(self.stopped, Deadlock):
            return "deadlock", str(self.stopped).removeprefix("deadlock: ")
        if self.stopped is not None:
            return "step bound", str(self.stopped)
        for kind, found in _by_weight(mismatches, rules, self):
            if found:
                return kind, found[0]
        return "well", ""

    def _all(self) -> list[str]:
        return [*self.noted, *map(rule_text, self.broken), *self.leaked, *self.raised, *self.unplanned]


def _by_weight(mismatches: Sequence[str], rules: Sequence[str], seen: Findings) -> list[tuple[Kind, Sequence[str]]]:
    return [("mismatch", mismatches), ("invariant", rules), ("leak", seen.leaked), ("error", seen.raised),
            ("not as planned", seen.unplanned)]


def rule_text(violation: Violation) -> str:
    where = f" at event {violation.at}" if violation.at >= 0 else ""
    return f"rule {violation.rule}{where}: {violation.text}"
