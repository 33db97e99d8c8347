"""docs/bug-coverage.md: every row that this project answers for has a test, named after it, that pytest collects."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROWS = {
    "WIRE": [82, 83, 84, 85, 86, 87, 89, 90, 91, 92, 93],
    "LAYER": [111, 112, 113, 114, 116, 117, 118],
    "SHARED": [119, 121, 123, 124],
    "SHARD": [126, 127, 128, 129],
    "MOE": [132, 133, 135, 136, 137],
    "NAME": [138, 139, 140, 142],
    "DTYPE": [143, 144],
    "MTP": [153, 155],
}
"""All rows of these classes in the collection of reports."""

LINE = re.compile(r"\| B(\d+) \| (\w+) \| [^|]+ \| `([^`]+)` \| ([UW]) \|")


@dataclass(frozen=True)
class Covered:
    row: int
    kind: str
    test: str
    tier: str


def read_table(text: str) -> list[Covered]:
    """The table's lines. Raises ValueError for a line that looks like one and is not."""
    lines = [line for line in text.splitlines() if line.startswith("| B")]
    found = [(LINE.fullmatch(line), line) for line in lines]
    if unreadable := [line for match, line in found if match is None]:
        raise ValueError(f"not a line of the table: {unreadable}")
    return [Covered(int(match[1]), match[2], match[3], match[4]) for match, _ in found if match is not None]


def problems(table: list[Covered], collected: set[str]) -> list[str]:
    """What the table says and the tests do not, and the other way round."""
    rows = {(kind, row) for kind, numbers in ROWS.items() for row in numbers}
    listed = {(covered.kind, covered.row) for covered in table}
    found = [f"B{row} ({kind}) is missing from the table" for kind, row in sorted(rows - listed)]
    found += [f"B{row} ({kind}) is no row of these classes" for kind, row in sorted(listed - rows)]
    for covered in table:
        if covered.test not in collected:
            found.append(f"B{covered.row}: {covered.test} is not collected")
        if not re.search(rf"_b{covered.row}_", covered.test):
            found.append(f"B{covered.row}: {covered.test} is not named after the row")
        if covered.tier != {"tests_cpu": "U", "tests_gpu": "W"}[covered.test.split("/")[0]]:
            found.append(f"B{covered.row}: {covered.test} does not belong to tier {covered.tier}")
    return found


@cache
def table() -> tuple[Covered, ...]:
    return tuple(read_table((ROOT / "docs" / "bug-coverage.md").read_text()))


@cache
def collected() -> frozenset[str]:
    """`file::function` of every test that pytest collects in the files that the table names."""
    files = sorted({covered.test.split("::")[0] for covered in table()})
    run = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files], cwd=ROOT,
                         capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return frozenset(line.split("[")[0] for line in run.stdout.splitlines() if "::" in line)


def test_every_row_has_a_test_that_is_collected_and_named_after_it() -> None:
    assert problems(list(table()), set(collected())) == []


@pytest.mark.parametrize(("change", "said"), [
    ({"row": 999}, "B999 (LAYER) is no row of these classes"),
    ({"test": "tests_cpu/megatron/test_bug_rows.py::test_b111_nothing"}, "test_b111_nothing is not collected"),
    ({"test": "tests_cpu/megatron/test_golden.py::test_megatron_names_become_hf_names"}, "is not named after the row"),
    ({"tier": "W"}, "does not belong to tier W"),
])
def test_a_wrong_line_is_named(change: dict[str, object], said: str) -> None:
    line = next(covered for covered in table() if covered.row == 111 and covered.tier == "U")
    wrong = Covered(**{**line.__dict__, **change})
    found = problems([*table(), wrong], set(collected()))
    assert any(said in text for text in found), found


def test_a_missing_row_is_named() -> None:
    left = [covered for covered in table() if covered.row != 143]
    assert problems(left, set(collected())) == ["B143 (DTYPE) is missing from the table"]


def test_a_line_that_cannot_be_read_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="B111"):
        read_table("| B111 | LAYER | no test | | U |")
