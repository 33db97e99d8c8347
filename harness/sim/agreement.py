"""What receivers do, as a table: one scenario, its steps, and how each must end. Run on the simulated receiver (tests_cpu) and on
a real vLLM worker (tests_gpu/vllm/test_model_agrees.py): where both agree with the table, they agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

OK = "ok"


class Driver(Protocol):
    """One engine with one worker. Everything returns `OK`, or the text of the error."""

    tensors: Mapping[str, torch.Tensor]
    """HF name -> tensor of the engine's model: all of it."""

    def ask(self, method: str, **kwargs: Any) -> str: ...

    def open(self, name: str, *, packed: bool = False) -> Any:
        """Open a transfer group to the engine; the source's end of it. Raises where that fails."""

    def update(self, group: Any, names: Sequence[str], tensors: Sequence[torch.Tensor], *, dtypes: Sequence[Any] | None = None,
               shapes: Sequence[Any] | None = None, packed: bool = False, sends: bool = True) -> str:
        """Announce a bucket, send it (or not) over `group`, and say what the engine answered."""

    def close(self, group: Any) -> None: ...


@dataclass(frozen=True)
class Agreed:
    """`steps(driver)` yields how each step ended; `expects` are regular expressions for them, in order."""

    name: str
    steps: Callable[[Driver], list[str]]
    expects: tuple[str, ...]


BEFORE = ("pause_generation", "flush_cache", "start_weight_update")


def _started(d: Driver) -> None:
    for method in BEFORE:
        d.ask(method)


def _some(d: Driver, count: int) -> tuple[list[str], list[torch.Tensor]]:
    names = list(d.tensors)[:count]
    return names, [d.tensors[name] for name in names]


def _whole(d: Driver, group: Any, **options: Any) -> str:
    return d.update(group, list(d.tensors), list(d.tensors.values()), **options)


def _complete_update(d: Driver) -> list[str]:
    _started(d)
    return [_whole(d, d.open("g")), d.ask("finish_weight_update"), d.ask("continue_generation")]


def _packed_update(d: Driver) -> list[str]:
    _started(d)
    return [_whole(d, d.open("g", packed=True), packed=True), d.ask("finish_weight_update"), d.ask("continue_generation")]


def _two_stages(d: Driver) -> list[str]:
    _started(d)
    names = list(d.tensors)
    half, said = len(names) // 2, []
    for stage, part in enumerate((names[:half], names[half:])):
        group = d.open(f"vime-pp_{stage}")
        said.append(d.update(group, part, [d.tensors[name] for name in part]))
        d.close(group)
    return [*said, d.ask("finish_weight_update"), d.ask("continue_generation")]


def _any_name_will_do(d: Driver) -> list[str]:
    """The group's name in an update is not looked at."""
    _started(d)
    group = d.open("vime-pp_1")
    return [_whole(d, group), d.ask("finish_weight_update"), d.ask("continue_generation")]


def _start_twice(d: Driver) -> list[str]:
    _started(d)
    return [d.ask("start_weight_update")]


def _finish_without_start(d: Driver) -> list[str]:
    return [d.ask("finish_weight_update")]


def _finish_twice(d: Driver) -> list[str]:
    _started(d)
    return [_whole(d, d.open("g")), d.ask("finish_weight_update"), d.ask("finish_weight_update")]


def _update_before_start(d: Driver) -> list[str]:
    names, tensors = _some(d, 1)
    return [d.update(d.open("g"), names, tensors, sends=False)]


def _update_before_init(d: Driver) -> list[str]:
    _started(d)
    names, tensors = _some(d, 1)
    return [d.update(None, names, tensors, sends=False), d.ask("finish_weight_update")]


def _wrong_count(d: Driver) -> list[str]:
    """Rejected while it is parsed, and the session is gone: how a session is abandoned."""
    _started(d)
    names, tensors = _some(d, 1)
    return [d.update(d.open("g"), names, tensors, dtypes=[], shapes=[], sends=False), d.ask("finish_weight_update")]


def _unknown_name(d: Driver) -> list[str]:
    _started(d)
    _, tensors = _some(d, 1)
    return [d.update(d.open("g"), ["model.no_such.weight"], tensors), d.ask("finish_weight_update")]


def _wrong_shape(d: Driver) -> list[str]:
    _started(d)
    names, tensors = _some(d, 1)
    wrong = torch.zeros(*tensors[0].shape[:-1], tensors[0].shape[-1] + 1, dtype=tensors[0].dtype)
    return [d.update(d.open("g"), names, [wrong]), d.ask("finish_weight_update")]


def _recovery(d: Driver) -> list[str]:
    """A whole session after a rejected one is exact."""
    _unknown_name(d)
    return [d.ask("start_weight_update"), _whole(d, d.open("again")), d.ask("finish_weight_update"), d.ask("continue_generation")]


def _partial_then_finish(d: Driver) -> list[str]:
    _started(d)
    names, tensors = _some(d, 2)
    return [d.update(d.open("g"), names, tensors), d.ask("finish_weight_update")]


def _nothing_then_finish(d: Driver) -> list[str]:
    _started(d)
    return [d.ask("finish_weight_update")]


def _shutdown_in_session(d: Driver) -> list[str]:
    _started(d)
    d.open("g")
    return [d.ask("destroy_weights_update_group", group_name="g")]


def _dead_peer(d: Driver) -> list[str]:
    """The source goes away where the engine waits for its bytes."""
    _started(d)
    group = d.open("g")
    names, tensors = _some(d, 1)
    d.close(group)
    return [d.update(group, names, tensors, sends=False), d.ask("finish_weight_update")]


def _double_init(d: Driver) -> list[str]:
    """The second group replaces the first: what is sent over the second arrives."""
    _started(d)
    first = d.open("first")
    second = d.open("second")
    said = _whole(d, second)
    d.close(first)
    return [said, d.ask("finish_weight_update"), d.ask("continue_generation")]


def _duplicate_name(d: Driver) -> list[str]:
    _started(d)
    group = d.open("g")
    names, tensors = _some(d, 1)
    return [d.update(group, names, tensors), _whole(d, group), d.ask("finish_weight_update"), d.ask("continue_generation")]


CLEARED = "finish_weight_update called without a matching start_weight_update"
ERROR = "(?s)(?!ok$).*"
"""Any error: the two say it in their own words."""

TABLE: tuple[Agreed, ...] = (
    Agreed("complete update", _complete_update, (OK, OK, OK)),
    Agreed("packed update", _packed_update, (OK, OK, OK)),
    Agreed("two stages in one session", _two_stages, (OK, OK, OK, OK)),
    Agreed("any group name", _any_name_will_do, (OK, OK, OK)),
    Agreed("start twice", _start_twice, ("already active",)),
    Agreed("finish without start", _finish_without_start, (CLEARED,)),
    Agreed("finish twice", _finish_twice, (OK, OK, CLEARED)),
    Agreed("update before start", _update_before_start, ("start_weight_update must be called before update_weights",)),
    Agreed("update before init", _update_before_init, ("not initialized|holds no transfer group", CLEARED)),
    Agreed("update with the wrong count", _wrong_count, ("should be of the same size as `names`", CLEARED)),
    Agreed("update with an unknown name", _unknown_name, ("There is no module or parameter named", CLEARED)),
    Agreed("update with the wrong shape", _wrong_shape, (ERROR, CLEARED)),
    Agreed("a whole session after a rejected one", _recovery, (OK, OK, OK, OK)),
    Agreed("partial update, then finish", _partial_then_finish, (OK, OK)),
    Agreed("nothing, then finish", _nothing_then_finish, (OK,)),
    Agreed("shutdown in a session", _shutdown_in_session, ("Cannot release a trainer connection during a weight update",)),
    Agreed("dead peer", _dead_peer, (ERROR, CLEARED)),
    Agreed("double init", _double_init, (OK, OK, OK)),
    Agreed("a name sent twice", _duplicate_name, (OK, OK, OK, OK)),
)
