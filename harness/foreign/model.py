"""The model that foreign code exports: the table of the scenario, for the rank that asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harness.foreign.active import here
from harness.recording.model import StubUnit, Table, values

_state: dict[int, tuple[Table, Any]] = {}


def show(world: object, table: Table, job: Any) -> None:
    """The table of this world, and the job whose `step` counts."""
    _state[id(world)] = (table, job)


def forget(world: object) -> None:
    _state.pop(id(world), None)


def named_tensors(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """HF names and full tensors of this rank's stage: for an adapter, in place of gathering and converting."""
    table, job = _state[id(here().world)]
    for unit in table[here().coordinates.pp]:
        for meta in unit.tensors:
            yield meta.name, values(meta, job.step)


def units() -> tuple[StubUnit, ...]:
    table, _ = _state[id(here().world)]
    return tuple(table[here().coordinates.pp])


def free_port(*args: Any, **kwargs: Any) -> int:
    """The next port, the same in every run: for an adapter, in place of asking the operating system."""
    return here().world.network.next_port()
