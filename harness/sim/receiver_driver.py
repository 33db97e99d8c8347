"""The table's driver for the simulated receiver: to be used inside a rank of a world with one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.recording.seam import RecordedTransferGroup
from harness.recording.world import RankContext
from harness.sim.agreement import OK
from staged_sync.seam import Wire, Work

LONG_S = 60.0


class SimulatedDriver:
    def __init__(self, context: RankContext, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._context = context
        self._seam = context.seam
        self._engine = context.world.handles[0]

    def ask(self, method: str, **kwargs: Any) -> str:
        return self._answer(self._seam.call(self._engine, method, **kwargs))

    def open(self, name: str, *, packed: bool = False) -> RecordedTransferGroup:
        wire = Wire("gloo", packed, 1 << 16)
        listener = self._seam.listen(address=None, port_range=None)
        dial = self._seam.open_transfer_group(listener, name=name, world_size=2, wire=wire, timeout_s=LONG_S)
        join = self._seam.call(self._engine, "init_weights_update_group", master_address=listener.host, master_port=listener.port,
                               rank_offset=1, world_size=2, group_name=name, backend="gloo", packed=packed,
                               packed_buffer_size_bytes=wire.packed_buffer_size_bytes)
        self._wait(dial)
        self._wait(join)
        join.result()
        return dial.result()

    def update(self, group: RecordedTransferGroup | None, names: Sequence[str], tensors: Sequence[torch.Tensor], *,
               dtypes: Sequence[Any] | None = None, shapes: Sequence[Any] | None = None, packed: bool = False,
               sends: bool = True) -> str:
        reply = self._seam.call(
            self._engine, "update_weights_from_distributed", names=list(names), group_name="any", packed=packed,
            dtypes=[t.dtype for t in tensors] if dtypes is None else dtypes,
            shapes=[tuple(t.shape) for t in tensors] if shapes is None else shapes)
        if group is not None and sends:
            group.send(tensors)
        return self._answer(reply)

    def close(self, group: RecordedTransferGroup) -> None:
        group.close(timeout_s=LONG_S)

    def _answer(self, reply: Work[Any]) -> str:
        self._wait(reply)
        try:
            reply.result()
        except Exception as error:
            return str(error)
        return OK

    def _wait(self, work: Work[Any]) -> None:
        while not work.poll():
            self._seam.wait_any([work], timeout_s=LONG_S)
