"""A stub rollout engine with vime's method names: a serial, blocking front of one or more workers.

It never refuses what a real engine would let pass; it notes what must not happen (design.md section 4) as a violation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from harness.faults import Faults
from harness.recording.kernel import Kernel, Task, Waiting
from harness.recording.network import Network
from harness.recording.server import Call, Server
from harness.recording.worker import StubWorker
from staged_sync.exporter import TensorMeta
from staged_sync.seam import Wire
from staged_sync.trace import Event

VIME_METHODS = frozenset({
    "pause_generation", "flush_cache", "continue_generation", "start_weight_update", "finish_weight_update",
    "init_weights_update_group", "update_weights_from_distributed", "destroy_weights_update_group",
})
NEWER_METHODS = frozenset({"update_weight_version", "get_weight_transfer_info"})


@dataclass(frozen=True)
class EngineOptions:
    """What kind of engine. `plain_vime` has neither `get_weight_transfer_info` nor `update_weight_version`."""

    workers: int = 1
    plain_vime: bool = False
    retain_replaced: bool = False
    named_groups: bool = False
    """SGLang-like: one group per name, chosen by each update; no session."""
    packed_in: Literal["init", "update"] = "init"
    """Where `packed` is agreed: when the group is opened (vLLM >= 0.29), or with each bucket (before; plain vime)."""
    fixed_buffer_bytes: int = 1 << 30
    """Chunk size of the packed stream where it is not told at init."""
    dials: bool | None = None
    """None: has no `check_reachable`. True or False: has it, and whether it can reach the trainer."""
    post_processes: bool = False
    """Whether it has vime's `post_process_weights` (compressed-tensors)."""
    info: Mapping[str, Any] | None = None
    """Overrides fields of what `get_weight_transfer_info` answers."""


class StubEngine(Server):
    def __init__(self, kernel: Kernel, network: Network, events: list[Event], index: int, model: Mapping[str, TensorMeta],
                 options: EngineOptions, *, faults: Faults, violation: Callable[[str], None]) -> None:
        super().__init__(kernel, f"engine{index}")
        self.index = index
        self.options = options
        self.methods = VIME_METHODS | {"generate"} | (frozenset() if options.plain_vime else NEWER_METHODS)
        self.methods |= {"post_process_weights"} if options.post_processes else frozenset()
        if options.dials is not None:
            self.methods |= {"check_reachable"}
        self.paused = self.flushed = False
        self.version: Any = None
        self._network = network
        self._events = events
        self._faults = faults
        self._violation = violation
        self._busy: list[Task] = []
        self.workers = [StubWorker(network, f"{self.name}/worker{j}", model, self._recorder(f"{self.name}/worker{j}"),
                                   retain_replaced=options.retain_replaced, named_groups=options.named_groups)
                        for j in range(options.workers)]

    # --- generation -----------------------------------------------------------------------------------------------
    def pause_generation(self) -> None:
        self.paused, self.flushed = True, False

    def flush_cache(self) -> None:
        self._must(self.paused, 3, "flushed before it was paused")
        self._must(not self._session_open(), 3, "flushed inside an open session")
        self.flushed = True

    def continue_generation(self) -> None:
        self.paused = False
        self.generate()

    def generate(self) -> bool:
        """Serve one request with the weights as they are; a paused engine lets it wait (False)."""
        if self.paused:
            return False
        self._record("generate", detail=f"version {self.version}")
        for worker in self.workers:
            self._must(not worker.unfit(), 9, f"generates with unfit weights: {worker.unfit()}")
        return True

    # --- the session ----------------------------------------------------------------------------------------------
    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self._must(self.paused and self.flushed, 3, "a session starts before pause and flush")
        self._on_workers("start", lambda worker: worker.start())

    def post_process_weights(self, restore_weights_before_load: bool, post_process_quantization: bool) -> None:
        self._must(self.paused and not self._session_open(), 3, "post-processes weights while it generates or inside a session")
        self._must(restore_weights_before_load != post_process_quantization, 3, "is told to restore and to quantise at once")

    def update_weights_from_distributed(self, names: Sequence[str], dtypes: Sequence[torch.dtype],
                                        shapes: Sequence[Sequence[int]], group_name: str, packed: bool = False,
                                        weight_version: Any = None) -> None:
        self._must(self.paused or not self._session_open(), 9, "receives weights while it generates")
        wire = None
        if self.options.packed_in == "update":
            wire = Wire("gloo", packed, self.options.fixed_buffer_bytes)
        self._on_workers("update", lambda worker: worker.update(names, dtypes, shapes, wire, group_name))
        if weight_version is not None:  # vime's engines record it at once, on purpose: no violation of theirs
            self.version = weight_version

    def finish_weight_update(self, weight_version: Any = None) -> None:
        self._on_workers("finish", lambda worker: worker.finish())
        if weight_version is not None:
            self._publish(weight_version)

    def update_weight_version(self, weight_version: Any) -> None:
        self._publish(weight_version)

    # --- the transfer group ---------------------------------------------------------------------------------------
    def init_weights_update_group(self, master_address: str, master_port: int, rank_offset: int, world_size: int,
                                  group_name: str, backend: str, packed: bool = False,
                                  packed_buffer_size_bytes: int = 0, timeout_s: float | None = None) -> None:
        for worker in self.workers:
            held = worker.slot
            if held is not None:
                self.kernel.touch((held.thing, "source"), "read")
            self._must(held is None or not held.live, 1,
                       f"{worker.name} is asked to join {group_name} while it holds live group {held and held.name}")
        wire = Wire("nccl" if backend == "nccl" else "gloo", packed, packed_buffer_size_bytes)
        address = (master_address, master_port)
        ranks = {worker.name: rank_offset + j for j, worker in enumerate(self.workers)}
        self._on_workers("join", lambda worker: worker.init(address, ranks[worker.name], world_size, group_name, wire))

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._on_workers("destroy", lambda worker: worker.destroy())

    def get_weight_transfer_info(self) -> dict[str, Any]:
        """What vLLM would tell (staged_sync.engines.info.EngineInfo), with the options' lies on top."""
        first = self.workers[0]
        held = first.slot is not None
        fixed = self.options.fixed_buffer_bytes if self.options.packed_in == "update" else None
        honest = {
            "vllm_version": "0.32.0", "backend": "gloo", "workers": len(self.workers), "packed_in": self.options.packed_in,
            "weight_version": str(self.version), "paused": self.paused, "session_open": self._session_open(),
            "weights_complete": all(worker.complete for worker in self.workers),
            "group_name": first.slot.name if first.slot else None, "packed": first.wire.packed if held else None,
            "packed_buffer_size_bytes": fixed or (first.wire.packed_buffer_size_bytes if held else None)}
        return {**honest, **(self.options.info or {})}

    def check_reachable(self, host: str, port: int, timeout_s: float) -> bool:
        """Dial the trainer once, without joining anything."""
        if not self._network.listens((host, port)):
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        if not self.options.dials:
            raise TimeoutError(f"{self.name} got no answer from {host}:{port} within {timeout_s:g} s")
        return True

    # --- inside ---------------------------------------------------------------------------------------------------
    def perform(self, call: Call) -> Any:
        self._record("handle", detail=call.method)
        fault = self._faults.on_call(self.index, call.method)
        if fault is not None and fault.action == "dies":
            self.kill()
            return None
        if fault is not None and fault.action == "never answers":
            self.stop_answering()
        try:
            if fault is not None:
                return fault.answer()
            reply = super().perform(call)
        except Exception:
            self._record("handle.failed", detail=call.method)
            raise
        self._record("handle.done", detail=call.method)
        return reply

    def kill(self) -> None:
        super().kill()
        for worker in self.workers:
            worker.leave_all()

    def weights(self, worker: int = 0) -> dict[str, torch.Tensor | None]:
        """What a worker holds now, by HF name; None where nothing was received."""
        return {name: loaded.tensor for name, loaded in self.workers[worker].weights.items()}

    def _on_workers(self, what: str, function: Callable[[StubWorker], None]) -> None:
        """A collective RPC: all workers at once, over at the first error; a worker still busy with an earlier one is
        waited for first."""
        busy = self._busy
        self.kernel.wait(lambda: _all_finished(busy), Waiting(what, self.name, missing=self._busy_text))
        tasks = [self.kernel.spawn(worker.name, functools.partial(function, worker), daemon=True) for worker in self.workers]
        self._busy = tasks
        self.kernel.wait(lambda: _all_finished(tasks) or any(t.error for t in tasks),
                         Waiting(what, self.name, missing=self._busy_text))
        for task in tasks:
            self.kernel.touch((task.thing, "ends"), "await" if task.finished else "peek")
            if task.error is not None:
                raise task.error

    def _busy_text(self) -> str:
        return ", ".join(task.name for task in self._busy if not task.finished)

    def _session_open(self) -> bool:
        return any(worker.active for worker in self.workers)

    def _publish(self, version: Any) -> None:
        for worker in self.workers:
            self._must(not worker.unfit(), 9, f"publishes version {version} with unfit weights: {worker.unfit()}")
            self._must(not worker.untouched(), 9, f"publishes version {version} without having received a weight")
        self.version = version

    def _must(self, holds: bool, rule: int, otherwise: str) -> None:
        if not holds:
            self._violation(f"rule {rule}: {self.name} {otherwise}")

    def _record(self, event: str, *, actor: str = "", group: str = "", bucket: int | None = None, detail: str = "") -> None:
        self._events.append(Event(self.kernel.now_s, None, actor or self.name, event, bucket=bucket, group=group,
                                  detail=detail))

    def _recorder(self, actor: str) -> Callable[..., None]:
        return lambda event, **about: self._record(event, actor=actor, **about)


def _all_finished(tasks: Sequence[Task]) -> bool:
    """Asked after every step of anybody, so it is quick."""
    for task in tasks:  # noqa: SIM110 (a generator costs more than all the rest)
        if not task.finished:
            return False
    return True
