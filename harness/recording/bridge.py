"""A stub bridge: an iterator of full tensors whose steps are collectives, as Megatron-Bridge's and mbridge's are.

Driven by the library's own `BridgeExporter`. Every tensor is a view of one buffer that the next item overwrites, so that whoever
keeps a view sends wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from harness.recording.args import make_args
from harness.recording.groups import Collective
from harness.recording.model import Table, hf_metas, values
from staged_sync.exporter import Contract, NamedTensor, TensorMeta
from staged_sync.megatron.bridge_export import BridgeExporter, MarkedExport
from staged_sync.trace import Trace

if TYPE_CHECKING:
    from harness.recording.job import RecordingJob
    from harness.recording.world import RankContext

GROUP_TIMEOUT_S = 60.0
"""Of the trainer's own groups, which the collectives inside a bridge end with: nothing of the library bounds them."""

Reach = Literal["pp", "tp"]
"""The groups that a step of the iterator meets in: the whole pipeline, or the stage alone."""


class StubBridge(BridgeExporter):
    """Yields all of `table`, each tensor after its collectives; only this rank's stage of it if it is declared and stage-local.

    `declared`: the contract it declares, whether or not it is the one it has. `together`: how many tensors are brought together
    by the same collectives, ahead of the first of them; the others come out of the rank's own memory. `before(step, name)` is
    called on this rank ahead of `yield` (outside of any collective) and `convert`: a test raises from it. `change` changes what
    is yielded.
    """

    def __init__(self, context: RankContext, table: Table, *, declared: Contract, reach: Sequence[Reach], together: int = 1,
                 step: Callable[[], int] = lambda: 1, folder: str = "", group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        metas = hf_metas(table)
        mine = hf_metas([table[context.coordinates.pp]])
        names = None if declared == "pipeline_collective" else lambda: mine
        super().__init__(make_args(folder), [], MarkedExport("the stub bridge", declared, self._begin, names),
                         seam=context.seam, hf_tensors=metas)
        self.change: Callable[[list[TensorMeta]], list[TensorMeta]] = lambda metas: metas
        self.before: Callable[[str, str], None] = lambda step, name: None
        self._context = context
        self._metas = list((mine if declared == "stage_local" and "pp" not in reach else metas).values())
        self._groups = [context.world.gather_group(context.rank, group) for group in reach]
        self._together = together
        self._step = step
        self._timeout_s = group_timeout_s

    def follow(self, trace: Trace) -> None:
        """Write into the trace of the updater that drives it."""
        self._trace = trace

    def convert(self, unit: object, gathered: object) -> list[NamedTensor]:
        self.before("convert", unit.label)  # type: ignore[attr-defined]
        return super().convert(unit, gathered)  # type: ignore[arg-type]

    def _begin(self) -> Iterator[NamedTensor]:
        metas = self.change(list(self._metas))
        buffer = torch.empty(max((meta.nbytes for meta in metas), default=0), dtype=torch.uint8)
        for number, meta in enumerate(metas):
            self.before("yield", meta.name)
            if number % self._together == 0:
                step_together(self._groups, self._context.rank, meta.name, timeout_s=self._timeout_s)
            raw = values(meta, self._step()).reshape(-1).view(torch.uint8)
            yield meta.name, buffer[:meta.nbytes].copy_(raw).view(meta.dtype).reshape(meta.shape)
            buffer.fill_(0xEE)


def step_together(groups: Sequence[Collective], rank: int, name: str, *, timeout_s: float) -> None:
    """One step of a bridge's iterator: all members of each group must make it, or the others wait inside of it."""
    for collective in groups:
        if len(collective.members) > 1:
            collective.exchange(rank, name, operation=f"bridge {name}", timeout_s=timeout_s)


def bridge(declared: Contract, reach: Sequence[Reach] = ("pp", "tp"), *, together: int = 1,
           group_timeout_s: float = GROUP_TIMEOUT_S) -> Callable[[RankContext, RecordingJob], StubBridge]:
    """For `RecordingJob(make_exporter=…)`."""
    return lambda context, job: StubBridge(context, job.table, declared=declared, reach=reach, together=together,
                                           step=lambda: job.step, folder=job.args.hf_checkpoint,
                                           group_timeout_s=group_timeout_s)
