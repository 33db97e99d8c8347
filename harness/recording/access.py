"""How a step touches a shared thing, and which touches commute: what a search needs to know to leave out equal orders.

A search that reorders steps (harness/sim/reduced.py) has to try both orders of two steps only where the order can be seen.
Everything that tasks share announces its touches with `kernel.touch(thing, access)`; by default nobody listens.

A result that a task waits for is written once and stays. So a well-ended result (`SET`) commutes with a look that came too
early (`PEEK`): whoever looks too early waits, and then sees the same. A failure does not: it is raised as soon as it is seen.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Access: TypeAlias = Literal["read", "write", "add", "set", "fail", "await", "peek", "enqueue"]
"""
read, write   a plain variable
add           one of several parts that arrive in any order: a member of a barrier, a worker that joins or takes a frame
set, fail     a result is there: well, or as an error
await         a wait for it is over: its writer happened before
peek          it was looked at before it was there
enqueue       a message at the end of a queue: the order of arrival is the order of service
"""

Relation: TypeAlias = Literal["commutes", "ordered", "races"]
"""ordered: the second could not have come first (it waited for the first). races: both orders are possible and may differ."""

_RACES = {frozenset(pair) for pair in (
    ("write",), ("write", "read"), ("write", "add"), ("write", "await"), ("read", "add"), ("fail", "peek"), ("fail", "await"),
    ("enqueue",), ("write", "peek"))}
_ORDERED = {frozenset(pair) for pair in (("set", "await"), ("add", "await"))}


def _related(a: Access, b: Access) -> Relation:
    pair = frozenset((a, b))
    return "races" if pair in _RACES else "ordered" if pair in _ORDERED else "commutes"


_ALL: tuple[Access, ...] = ("read", "write", "add", "set", "fail", "await", "peek", "enqueue")
Relations: TypeAlias = dict[tuple[Access, Access], Relation]

RELATION: Relations = {(a, b): _related(a, b) for a in _ALL for b in _ALL}
"""Of two touches of one thing by two tasks."""

EAGER: Relations = {**RELATION, **{pair: "races" for a in ("set", "add") for b in ("peek", "await")
                                   for pair in ((a, b), (b, a))}}  # type: ignore[dict-item, misc]
"""The same, with every look at a result that is not there yet taken seriously: for judging the relation above by."""
