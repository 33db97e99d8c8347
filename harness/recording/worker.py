"""One process of a rollout engine: vLLM's single receiver slot and its weight-update session, with vLLM's errors.

Facts (vllm 0.32.0, gpu_worker.py and nccl_engine.py): `init` overwrites the slot and the wire parameters, whoever comes last;
a receive takes rank 0 of whatever group is held and never looks at a name of a group; an update that raises clears the
session; `finish` of an incomplete session says OK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.recording.framing import chunks
from harness.recording.network import Channel, Network
from staged_sync.exporter import TensorMeta
from staged_sync.seam import Wire

Record = Callable[..., None]
"""`record(event, group=…, bucket=…, detail=…)` in the name of this worker."""


@dataclass(frozen=True)
class Loaded:
    """One weight as it was received, and in which session (0: it was there from the start)."""

    tensor: torch.Tensor | None
    session: int


class StubWorker:
    def __init__(self, network: Network, name: str, model: Mapping[str, TensorMeta], record: Record, *,
                 retain_replaced: bool, named_groups: bool = False) -> None:
        self.name = name
        self.active = False
        self.complete = True
        self.sessions = 0
        self.slot: Channel | None = None
        self.wire = Wire("gloo", packed=False, packed_buffer_size_bytes=0)
        self.weights = {key: Loaded(None, 0) for key in model}
        self._network = network
        self._model = model
        self._record = record
        self._retain_replaced = retain_replaced
        self._named: dict[str, tuple[Channel, int]] | None = {} if named_groups else None
        self._rank = 0
        self._buckets = 0

    # --- the receiver slot ----------------------------------------------------------------------------------------
    def init(self, address: tuple[str, int], rank: int, world_size: int, name: str, wire: Wire) -> None:
        self._record("join", group=name, detail=f"rank {rank} of {world_size}")
        channel = self._network.join(address, rank, world_size, name, self.name)
        self._record("join.done", group=name, detail=f"rank {rank} of {world_size}")
        if self._named is None:
            self._drop_held()
        else:
            self._named[name] = (channel, rank)
        self.slot, self._rank, self.wire, self._buckets = channel, rank, wire, 0

    def destroy(self) -> None:
        """vLLM's shutdown_weight_transfer_engine."""
        if self.active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._leave(self.slot)
        self.slot = None
        if self._named is not None:
            self._named.clear()

    def leave_all(self) -> None:
        """The process is gone: every group it was in loses this end."""
        for channel in self._network.channels:
            for rank, member in channel.members.items():
                if member == self.name:
                    channel.leave(rank)

    # --- the session ----------------------------------------------------------------------------------------------
    def start(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active. "
                               "Call finish_weight_update first.")
        self.active, self.complete = True, False
        self.sessions += 1

    def update(self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]],
               wire: Wire | None = None, group_name: str = "") -> None:
        """Receive one bucket. `wire` where it comes with each bucket (vLLM < 0.29), else what init said. Only a receiver with
        named groups looks at `group_name`."""
        if self._named is not None:
            if group_name not in self._named:
                raise ValueError(f"group {group_name!r} was never initialized; there are {sorted(self._named)}")
            self.slot, self._rank = self._named[group_name]
        elif not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self.wire = wire or self.wire
        try:
            self._receive(names, dtypes, shapes)
        except BaseException:
            self.active = False
            raise

    def finish(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active, self.complete = False, True

    def unfit(self) -> str:
        """Why this worker must not serve; empty if its weights are those of one step."""
        if self.active:
            return f"{self.name} has a session open"
        if not self.complete:
            return f"{self.name} was left in session {self.sessions}: its parameters are on the meta device"
        old = [key for key, loaded in self.weights.items() if loaded.session < self.sessions]
        if not old or len({loaded.session for loaded in self.weights.values()}) == 1:
            return ""
        return f"{self.name} has {len(old)} of {len(self.weights)} weights from before session {self.sessions}, e.g. {old[0]}"

    def untouched(self) -> bool:
        """The last session brought nothing (vLLM finishes it all the same)."""
        return all(loaded.session < self.sessions for loaded in self.weights.values())

    # --- inside ---------------------------------------------------------------------------------------------------
    def _receive(self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> None:
        for what, values in (("dtype_names", dtypes), ("shapes", shapes)):
            if len(values) != len(names):
                raise ValueError(f"`{what}` should be of the same size as `names`: got {len(values)} and {len(names)}")
        if self.slot is None:
            raise RuntimeError("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        metas = [TensorMeta(n, d, tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        about = {"group": self.slot.name, "bucket": self._buckets, "detail": " ".join(names)}
        self._buckets += 1
        self._record("receive", **about)
        for chunk in chunks([meta.nbytes for meta in metas], self.wire):
            self._receive_chunk(self.slot, [metas[i] for i in chunk])
        self._record("receive.done", **about)

    def _receive_chunk(self, channel: Channel, metas: Sequence[TensorMeta]) -> None:
        specs = tuple((meta.dtype, meta.shape) for meta in metas)
        data = self._network.receive(channel, self._rank, sum(meta.nbytes for meta in metas), specs)
        if len(metas) == 1:
            self._load(metas[0], data.view(metas[0].dtype).reshape(metas[0].shape))
            return
        for meta, part in zip(metas, data.split([meta.nbytes for meta in metas]), strict=True):
            self._load(meta, part.clone().view(meta.dtype).reshape(meta.shape))

    def _load(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        if meta.name not in self._model:
            raise ValueError(f"There is no module or parameter named {meta.name!r}")
        if meta.shape != self._model[meta.name].shape:
            raise AssertionError(f"{meta.name}: loaded shape {meta.shape}, parameter {self._model[meta.name].shape}")
        self.weights[meta.name] = Loaded(tensor, self.sessions)

    def _drop_held(self) -> None:
        if self.slot is None:
            return
        self._record("replace", group=self.slot.name, detail="live" if self.slot.live else "closed")
        if not self._retain_replaced:
            self._leave(self.slot)

    def _leave(self, channel: Channel | None) -> None:
        if channel is not None:
            channel.leave(self._rank)
