"""What is simulated, as one value: a layout, engines, a model as a table, what is wrong with it. Its `repr` makes it again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from harness.recording.engines import EngineOptions
from harness.recording.model import StubUnit, Table, hf_metas, write_checkpoint
from harness.recording.topology import Layout
from harness.sim.exports import Export
from staged_sync.exporter import Part, TensorMeta

if TYPE_CHECKING:
    from harness.foreign.simulation import ForeignSimulation
    from harness.sim.simulation import Simulation

Receiver: TypeAlias = Literal["vllm", "stock vllm", "stock vllm 0.27", "vime", "named groups"]
"""
vllm             our back ends: one slot, a replaced group is destroyed, `packed` agreed when the group is opened
stock vllm       the same, but the replaced communicator lives on, with nobody at it
stock vllm 0.27  as stock, and `packed` travels with each bucket
vime             as 0.27, behind vime's plain engine methods
named groups     SGLang-like: one group per name, no session
"""

Sends: TypeAlias = Literal["rendezvous", "streams"]
"""rendezvous: a frame is read as a worker takes it. streams: a device reads it when it gets to it; the order is a choice."""

RECEIVERS: dict[Receiver, dict[str, Any]] = {
    "vllm": {}, "stock vllm": {"retain_replaced": True},
    "stock vllm 0.27": {"retain_replaced": True, "packed_in": "update"},
    "vime": {"retain_replaced": True, "packed_in": "update", "plain_vime": True},
    "named groups": {"retain_replaced": True, "packed_in": "update", "plain_vime": True, "named_groups": True},
}


@dataclass(frozen=True, repr=False)
class Scenario:
    """`stages`: (dense, expert) tensors of each pipeline stage, None for one dense tensor each. With `bucket_bytes=1` every
    tensor is a bucket of its own. `mutant`: a name of the zoo. `connects`: every schedule begins with connect, in a fresh
    world; otherwise the worlds are connected once and every schedule is one more update. `fault`: see harness/sim/faulty.py.
    `export`: see harness/sim/exports.py; with anything but `raw` the kinds of tensors are all one.
    `impl`: somebody else's class, `package.module:Class`, and `adapter`: what is said about it, `package.module:NAME`.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    stages: tuple[tuple[int, int], ...] | None = None
    engines: tuple[int, ...] = (1,)
    receiver: Receiver = "vllm"
    sends: Sends = "rendezvous"
    export: Export = "raw"
    bucket_bytes: int = 1
    packed: bool = False
    packed_buffer_bytes: int = 64
    connects: bool = False
    mutant: str = ""
    impl: str = ""
    adapter: str = ""
    fault: str = ""

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Scenario({', '.join(said)})"

    @property
    def ends_by_deadline(self) -> bool:
        """Whether a wait that only a deadline ends belongs to it: elsewhere that is a deadlock."""
        return bool(self.fault) or self.export == "declared wrongly"

    @property
    def layout(self) -> Layout:
        return Layout(self.tp, self.pp, self.dp, self.cp, self.ep, self.etp)

    @property
    def table(self) -> Table:
        return make_table(self.stages or ((1, 0),) * self.pp, self.vpp)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """HF names by stage."""
        return tuple(tuple(hf_metas([units])) for units in self.table)

    def engine_options(self) -> list[EngineOptions]:
        return [EngineOptions(workers=workers, fixed_buffer_bytes=self.packed_buffer_bytes, **RECEIVERS[self.receiver])
                for workers in self.engines]

    def simulate(self) -> Simulation | ForeignSimulation:
        from harness.foreign.simulation import ForeignSimulation  # both need scenarios
        from harness.sim.simulation import Simulation
        if self.impl and self.export not in ("raw", "bridge"):
            raise ValueError(f"export must be 'raw' or 'bridge' with an implementation of somebody else (got {self.export!r})")
        return ForeignSimulation(self) if self.impl else Simulation(self)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """With its mutant in place."""
        with ExitStack() as stack:
            if self.mutant:
                from harness.mutants.zoo import named  # the zoo imports the tests' scenarios in turn
                stack.enter_context(named(self.mutant).apply())
            yield


@lru_cache(maxsize=512)
def make_table(stages: tuple[tuple[int, int], ...], vpp: int) -> Table:
    """Units of one tensor each, in the order of the stage's virtual chunks. Shapes all differ, but those of a stage's experts:
    real ones are alike, or their shards could not be gathered over expert-parallel ranks."""
    return tuple((*(_unit(stage, vpp, "dense", i, dense) for i in range(dense)),
                  *(_unit(stage, vpp, "expert", i, expert) for i in range(expert)))
                 for stage, (dense, expert) in enumerate(stages))


def _unit(stage: int, vpp: int, part: Part, i: int, count: int) -> StubUnit:
    chunk = "" if vpp == 1 else f".v{i * vpp // count}"
    label = f"s{stage}{chunk}.{part}{i}"
    shape = (1 + stage, 2 + i, 3) if part == "dense" else (1 + stage, 2, 5)
    return StubUnit(label, part, (TensorMeta(f"hf.{label}", torch.bfloat16, shape),))


@lru_cache(maxsize=512)
def checkpoint_folder(stages: tuple[tuple[int, int], ...], vpp: int) -> Path:
    """The HF checkpoint of a table; written once, gone when the process ends."""
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    return write_checkpoint(folder, hf_metas(make_table(stages, vpp)).values())


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sim-")
