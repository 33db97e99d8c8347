"""What the harness sees inside an engine's workers, in whichever process they live.

vLLM gives every worker the methods of `WorkerProbe` (`worker_extension_cls`, vllm/v1/worker/worker_base.py `init_worker`), and
`llm.collective_rpc(name)` asks all of them: one worker in the receiver's own process, or several in processes of their own where
the engine is tensor parallel.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from harness.checkpoints import read_checkpoint
from harness.compare import Comparison, compare_arrivals
from harness.world.process import die_with_parent
from harness.world.readback import ReadBack, read_model, record_unpacked_weights
from staged_sync.vllm.gloo_engine import GlooWeightTransferEngine

EXTENSION = f"{__name__}.WorkerProbe"

RECEIVER = "STAGED_SYNC_RECEIVER_PID"
"""Environment variable: the process whose engines' workers this module is imported in."""


@dataclass(slots=True)
class Arrivals:
    """What came over the wire since the last `forget`, copied before vLLM loads it."""

    before: Callable[[str], None] = lambda method: None
    """Told of every broadcast (`receive`), and may raise in its place: planted faults, in the receiver's own process."""
    stopped: bool = False
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def on_receive(self, _engine: Any, group: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.before("receive")
        if self.stopped:
            return
        self.groups.append("" if group is None else group.terms.name)
        self.tensors += [(name, tensor.clone()) for name, tensor in tensors]


@dataclass(frozen=True, slots=True)
class Arrived:
    """One worker's arrivals against a checkpoint; transfer groups in the order of their first broadcast."""

    comparison: Comparison
    groups: list[str]
    bytes: int


ARRIVALS = Arrivals()
"""Of the engine under test, of which a process has one."""


class WorkerProbe:
    """Becomes a base of vLLM's worker class."""

    rank: int
    get_model: Callable[[], torch.nn.Module]

    def probe_forget(self, stop: bool) -> None:
        """Start a new recording, or stop recording."""
        ARRIVALS.tensors.clear()
        ARRIVALS.groups.clear()
        ARRIVALS.stopped = stop

    def probe_die(self, worker: int, broadcast: int) -> None:
        """Have worker number `worker` killed as its `broadcast`-th (from 0) broadcast from now arrives, before it is loaded."""
        if self.rank != worker:
            return
        to_come = iter(range(broadcast))

        def before(_method: str) -> None:
            if next(to_come, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        ARRIVALS.before = before

    def probe_arrived(self, checkpoint: str) -> Arrived:
        return Arrived(compare_arrivals(ARRIVALS.tensors, read_checkpoint(checkpoint)), list(dict.fromkeys(ARRIVALS.groups)),
                       sum(tensor.nbytes for _, tensor in ARRIVALS.tensors))

    def probe_parameters(self) -> ReadBack:
        return read_model(self.get_model())


def _watch_stock_engine() -> None:
    """vLLM's own back end has no hook: what it loads is seen on its way into the model (not yet run on a GPU)."""
    stock = NCCLWeightTransferEngine.receive_weights

    def receive(self: Any, update_info: Any) -> None:
        load = self.model.load_weights

        def watched(tensors: Any) -> Any:
            named = list(tensors)
            ARRIVALS.on_receive(self, None, named)
            return load(named)

        with patch.object(self.model, "load_weights", watched):
            stock(self, update_info)

    NCCLWeightTransferEngine.receive_weights = receive


# On import: a worker in a process of its own imports this module, before it loads a model, and nothing else of the harness.
GlooWeightTransferEngine.on_receive[:] = [ARRIVALS.on_receive]
_watch_stock_engine()
record_unpacked_weights()
if (receiver := int(os.environ[RECEIVER])) != os.getpid():
    die_with_parent(receiver)  # however the receiver ends, also while vLLM's own watch over it is not set up yet
