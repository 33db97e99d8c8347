"""docs/bug-zoo.md, made from the zoo by catching every mutant: `python -m harness.mutants.table`."""

from __future__ import annotations

from inspect import getdoc
from pathlib import Path

from harness.mutants.mutant import SCHEDULES, SEED, Caught, Mutant, NamedTest, assert_caught
from harness.mutants.zoo import ZOO
from harness.sim.simulation import quietly

PAGE = Path(__file__).parents[2] / "docs" / "bug-zoo.md"

TEXT = f"""\
# The bug zoo

Defects that were met in public, each made on purpose in our own code and caught by `nox -s cpu`. This page is generated: every
row was written by catching its mutant (`python -m harness.mutants.table`), and a test compares them again on every run.

*rule*: of design.md section 4. *caught by*: a test that turns red, or a simulated world in which a schedule fails; *after*: how
many random schedules that took (seed {SEED}, at most {SCHEDULES}). The same tests and worlds are green without the defect. A
report without a number is public code that was read. Defects of the export (layer numbers, shards, experts, tied heads, dtypes)
are mutated in `tests_cpu/megatron/test_mutations.py`.

"""

HEAD = """\
| mutant | what it does | rule | seen in | caught by | after | what is said |
|---|---|---|---|---|---|---|"""


def row(mutant: Mutant, caught: Caught) -> str:
    what = (getdoc(mutant.apply) or "").split("\n\n")[0].replace("\n", " ")
    by = f"`{mutant.caught_by}`" if isinstance(mutant.caught_by, NamedTest) else f"`{mutant.caught_by!r}`"
    after = "-" if caught.schedules is None else str(caught.schedules)
    said = " ".join(mutant.message.split())
    return f"| {mutant.name} | {what} | {mutant.rule} | {'; '.join(mutant.reports)} | {by} | {after} | `{said}` |"


def rows_of(page: Path) -> list[str]:
    """The table's rows, as they stand in the page."""
    lines = page.read_text().splitlines() if page.exists() else []
    return [line for line in lines if line.startswith("| ") and line not in HEAD.splitlines()]


def main() -> None:
    with quietly():
        rows = [row(mutant, assert_caught(mutant)) for mutant in ZOO]
    PAGE.write_text(TEXT + "\n".join([HEAD, *rows]) + "\n")


if __name__ == "__main__":
    main()
