"""The one ordered event log: views of it, and assertions on call sequences that print both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from staged_sync.trace import Event

Expected: TypeAlias = str | Callable[[str], bool]
"""One line of a story: the literal text, or a predicate on it."""


def calls(events: Iterable[Event], rank: int, *, leave_out: Sequence[str] = ("phase",)) -> list[str]:
    """What one trainer rank did, one line each, without the `.done` of what it waited for."""
    return [e.text() for e in events if e.rank == rank and not e.event.endswith(".done") and e.event not in leave_out]


def actor_calls(events: Iterable[Event], actor: str) -> list[str]:
    """The same for `engine<i>` or `engine<i>/worker<j>`."""
    return [e.text() for e in events if e.actor == actor and not e.event.endswith(".done")]


def order(events: Iterable[Event], *names: str) -> list[str]:
    """`actor: text` of the events called `names`, over all actors: who came before whom."""
    return [f"{e.actor}: {e.text()}" for e in events if e.event in names]


def assert_story(found: Sequence[str], expected: Sequence[Expected], *, strict: bool = True) -> None:
    """`found` is `expected`, line for line; with `strict=False`, `expected` appears in `found` in this order.

    Whole literal stories only where the order is the point: they cost upkeep.
    """
    if isinstance(expected, str) or not all(isinstance(line, str) or callable(line) for line in expected):
        raise TypeError(f"a story is a list of texts or predicates, not {expected!r}")
    rows, matched = _align(found, expected, strict)
    if not matched:
        raise AssertionError("\n".join(["the story differs (> marks where)", *rows]))


def _align(found: Sequence[str], expected: Sequence[Expected], strict: bool) -> tuple[list[str], bool]:
    if strict:
        return _side_by_side(found, expected)
    return _subsequence(found, expected)


def _side_by_side(found: Sequence[str], expected: Sequence[Expected]) -> tuple[list[str], bool]:
    width = max([len("expected"), *(len(_shown(line)) for line in expected)])
    rows, same = [f"  {'expected':{width}} | found"], True
    for i in range(max(len(found), len(expected))):
        left = _shown(expected[i]) if i < len(expected) else "(nothing)"
        right = found[i] if i < len(found) else "(nothing)"
        equal = i < len(expected) and i < len(found) and _matches(expected[i], found[i])
        same = same and equal
        rows.append(f"{' ' if equal else '>'} {left:{width}} | {right}")
    return rows, same


def _subsequence(found: Sequence[str], expected: Sequence[Expected]) -> tuple[list[str], bool]:
    lines = iter(found)
    for i, wanted in enumerate(expected):
        if not any(_matches(wanted, line) for line in lines):
            rows = ["expected, in this order:", *(f"{'>' if j == i else ' '} {_shown(e)}" for j, e in enumerate(expected)),
                    "found:", *(f"  {line}" for line in found)]
            return rows, False
    return [], True


def _matches(expected: Expected, line: str) -> bool:
    return expected == line if isinstance(expected, str) else expected(line)


def _shown(expected: Expected) -> str:
    return expected if isinstance(expected, str) else f"<{getattr(expected, '__name__', 'predicate')}>"
