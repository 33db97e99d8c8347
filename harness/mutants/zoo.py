"""The bug zoo: each defect, the rule it breaks, where it was seen in public, and who catches it.

A report is `owner/repository#number`; an entry without a number is public code that was read, not a report. docs/bug-zoo.md is
made from this (`python -m harness.mutants.table`).
"""

from __future__ import annotations

from harness.mutants.bridged import BRIDGED
from harness.mutants.mutant import Mutant
from harness.mutants.recorded import RECORDED
from harness.mutants.simulated import SIMULATED

ZOO: tuple[Mutant, ...] = (*SIMULATED, *RECORDED, *BRIDGED)


def named(name: str) -> Mutant:
    """The mutant of this name. Raises KeyError that lists all names."""
    found = next((mutant for mutant in ZOO if mutant.name == name), None)
    if found is None:
        raise KeyError(f"no mutant {name!r} in the zoo; there are: {', '.join(mutant.name for mutant in ZOO)}")
    return found
