"""Which simulated rank is asking: the stubs are modules, and modules are shared by all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.recording.groups import Collective
from harness.recording.model import Table
from harness.recording.world import RecordingWorld
from harness.sim.streams import Device
from staged_sync.seam import Coordinates
from staged_sync.trace import Trace


@dataclass(eq=False)
class Active:
    """A world in which foreign code runs. `table`: the model, by stage. `step`: which training step's weights the ranks hold.
    `group_timeout_s`: of the trainer's own groups, where a call names no other."""

    world: RecordingWorld
    table: Table
    step: Callable[[], int]
    group_timeout_s: float
    devices: dict[int, Device] = field(default_factory=dict)
    groups: dict[tuple[int, ...], Collective] = field(default_factory=dict)
    new_groups: Counter[int] = field(default_factory=Counter)
    """How many groups each rank has made: the n-th of all ranks are one group."""

    def device(self, rank: int) -> Device:
        return self.devices[rank]

    def collective(self, members: tuple[int, ...], name: str) -> Collective:
        """One per set of members and name, whoever asks first."""
        key = (hash(name), *members)
        return self.groups.setdefault(key, Collective(self.world.kernel, name, members))


@dataclass(frozen=True)
class Here:
    """The rank that asks."""

    active: Active
    rank: int

    @property
    def world(self) -> RecordingWorld:
        return self.active.world

    @property
    def coordinates(self) -> Coordinates:
        return self.world.layout.ranks[self.rank]

    @property
    def trace(self) -> Trace:
        return self.world.contexts[self.rank].trace

    def record(self, event: str, **about: Any) -> None:
        """In the name of this rank, at its own stage; in which phase, foreign code does not say."""
        with self.trace.at(phase="", stage=self.coordinates.pp):
            self.trace.record(event, **about)


_stack: list[Active] = []


@contextmanager
def running(active: Active) -> Iterator[None]:
    _stack.append(active)
    try:
        yield
    finally:
        _stack.remove(active)


def here() -> Here:
    """Raises RuntimeError outside of a simulated rank."""
    if not _stack:
        raise RuntimeError("no simulation is running: this stub answers simulated trainer ranks only")
    active = _stack[-1]
    name = active.world.kernel.current_name
    if not name.startswith("rank"):
        raise RuntimeError(f"only a trainer rank may ask this, not {name!r}")
    return Here(active, int(name.removeprefix("rank")))
