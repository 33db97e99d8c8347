"""Scenarios of the trainer ranks: real Megatron-core models from HF checkpoints, and the library under test.

Each function runs on every trainer rank; what lives from scenario to scenario is in `context.state`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from harness.megatron_oracle import build_megatron_model, load_step, megatron_args, megatron_forward_logits
from harness.world import planted
from harness.world.position import PublishedEvents
from harness.world.rank import RankContext
from harness.world.rpc import RemoteHandle, Target
from staged_sync.completeness import read_index
from staged_sync.live_seam import LiveSeam
from staged_sync.megatron.bridge_export import MarkedExport
from staged_sync.update_weight import UpdateWeightFromDistributed

TIMEOUTS = {"update_weight_call_timeout": 15.0, "update_weight_phase_timeout": 25.0, "update_weight_timeout": 45.0}
"""Inside the default deadline of a world test: the library speaks first, the harness' hang report is for what it misses."""


Export = Literal["raw", "megatron-bridge", "weights_getter", "mbridge", "mbridge declared stage_local"]
"""What the updater exports with. weights_getter: Megatron-Bridge, with tensors that are not the model's own. The last one is
wrong."""


@dataclass(frozen=True, slots=True)
class Exports:
    """What the updater is given besides the model."""

    bridge: Any = None
    weights_getter: Any = None


@dataclass(slots=True)
class Trainer:
    """What a trainer rank holds."""

    checkpoint: str
    model: list[torch.nn.Module]
    updater: UpdateWeightFromDistributed


def setup(context: RankContext, *, checkpoint: str, args: dict[str, Any], timeout_s: float,
          build: dict[str, Any] | None = None, export: Export = "raw") -> None:
    """Build this rank's share of the model and an updater. May be called again for another checkpoint or other args. `build`:
    how layers are split, see `build_megatron_model`."""
    _join_world(context, timeout_s)
    device = _device(context)
    model = build_megatron_model(checkpoint, device=device, **build or {})
    settings = megatron_args(checkpoint, **TIMEOUTS | args)
    exports = _exports(export, checkpoint, model)
    settings.megatron_to_hf_mode = "raw" if export == "raw" else "bridge"
    store = dist.PrefixStore(f"updater/{_count(context, 'updaters')}", context.state["store"])
    updater = UpdateWeightFromDistributed(settings, model, exports.weights_getter, model_name=_family(checkpoint),
                                          quantization_config=None, seam=LiveSeam(model, store=store), bridge=exports.bridge)
    updater.trace.events = PublishedEvents(updater.trace, context.position, then=partial(planted.at_event, context))
    context.state["trainer"] = Trainer(checkpoint, model, updater)


def _exports(export: Export, checkpoint: str, model: list[torch.nn.Module]) -> Exports:
    if export == "raw":
        return Exports()
    from harness import bridge_cpu

    bridge_cpu.install()
    if export == "mbridge":
        return Exports(bridge=bridge_cpu.mbridge_of(checkpoint))
    if export == "mbridge declared stage_local":
        bridge = bridge_cpu.mbridge_of(checkpoint)
        return Exports(bridge=MarkedExport("mbridge, declared stage_local", "stage_local", lambda: bridge.export_weights(model),
                                           names=lambda: _names_of_stage(checkpoint)))
    return Exports(weights_getter=KeptWeights(model) if export == "weights_getter" else None)  # Megatron-Bridge, the default


def _names_of_stage(checkpoint: str) -> list[str]:
    """A split that covers the checkpoint: which stage really has what does not matter to who never sends."""
    from megatron.core import parallel_state as mpu

    stage, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    return list(read_index(checkpoint))[stage::stages]


class KeptWeights:
    """A `weights_getter` as vime's: this rank's tensors by chunk and name, kept away from the model, which has lost its own."""

    def __init__(self, model: list[torch.nn.Module]) -> None:
        self._model = model
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        self._kept = {}
        for chunk, module in enumerate(self._model):
            for name, parameter in module.named_parameters():
                self._kept[f"vp_stages.{chunk}.{name.replace('module.', '')}"] = parameter.detach().clone()
                parameter.fill_(float("nan"))

    def __call__(self) -> dict[str, torch.Tensor]:
        return self._kept


def connect(context: RankContext, *, engines: list[dict[str, Any]], lock: dict[str, Any], counts: list[int] | None) -> None:
    """Connect the engines; the handles of one engine are one object from call to call, as Ray handles would be equal."""
    handles = [_handle(context, engine) for engine in engines]
    _trainer(context).updater.connect_rollout_engines(handles, _handle(context, lock), engine_gpu_counts=counts)


def load(context: RankContext, *, checkpoint: str) -> None:
    """The next optimizer step: every weight of this rank replaced in place."""
    trainer = _trainer(context)
    load_step(trainer.model, checkpoint)
    if isinstance(kept := trainer.updater.weights_getter, KeptWeights):
        kept.take()
    trainer.checkpoint = checkpoint


def update(context: RankContext) -> dict[str, Any]:
    """One weight update; what this rank did, event by event, and its metrics."""
    updater = _trainer(context).updater
    updater.trace.events.clear()
    updater.update_weights()
    return {"version": updater.weight_version, "metrics": updater.pop_metrics(),
            "events": updater.trace.as_dicts()}


def update_often(context: RankContext, *, number: int) -> None:
    """Updates in a row, with the same weights, and nothing looked at."""
    for _ in range(number):
        _trainer(context).updater.update_weights()


def state(context: RankContext) -> dict[str, Any]:
    """What this rank believes: the version it counts, whether engines may hold a mixture, the group it holds."""
    updater = _trainer(context).updater
    return {"version": updater.weight_version, "poisoned": updater.poisoned, "group_name": updater.group_name}


def disconnect(context: RankContext) -> None:
    _trainer(context).updater.disconnect_rollout_engines()


def logits(context: RankContext, *, tokens: list[list[int]], vocab_size: int) -> list[list[list[float]]] | None:
    """Megatron's own forward pass; the last stage answers, the others None."""
    ids = torch.tensor(tokens, device=_device(context))
    result = megatron_forward_logits(_trainer(context).model, ids, vocab_size=vocab_size)
    return None if result is None else result.float().cpu().tolist()


def float32_model(context: RankContext, *, checkpoint: str, timeout_s: float) -> None:
    """A model whose forward leaves no room for a wrong weight: bf16 weights computed with in float32. Cannot be updated."""
    _join_world(context, timeout_s)
    model = build_megatron_model(checkpoint, device=_device(context), dtype=torch.float32)
    context.state["trainer"] = Trainer(checkpoint, model, None)  # type: ignore[arg-type]


def _join_world(context: RankContext, timeout_s: float) -> None:
    """Once per process: the trainer's process group and Megatron's groups."""
    if dist.is_initialized():
        return
    from megatron.core import parallel_state as mpu

    topology = context.topology
    # An explicit store: under torchrun every rank is a client of a tcp:// init method, and nobody would serve it.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=timedelta(seconds=timeout_s))
    context.state["store"] = store = dist.PrefixStore("trainer", agent)
    backend = "cpu:gloo,cuda:nccl" if topology.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=topology.trainers,
                            timeout=timedelta(seconds=timeout_s))
    mpu.initialize_model_parallel(
        topology.tp, topology.pp, topology.vpp if topology.vpp > 1 else None, context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep, expert_tensor_parallel_size=topology.etp,
        # What bounds a collective inside a bridge, which nothing of the library can: the default is half an hour.
        distributed_timeout_minutes=timeout_s / 60)


def _device(context: RankContext) -> torch.device:
    if context.topology.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rank without parameters asks the machine, which may have GPUs
        return torch.device("cpu")
    torch.cuda.set_device(context.rank)
    return torch.device("cuda", context.rank)


def _trainer(context: RankContext) -> Trainer:
    if "trainer" not in context.state:
        raise RuntimeError(f"trainer rank {context.rank} has no model yet: run harness.world.trainer:setup first")
    return context.state["trainer"]


def _handle(context: RankContext, description: dict[str, Any]) -> RemoteHandle:
    target = msgspec.convert(description, Target)
    handles: dict[tuple[str, int], RemoteHandle] = context.state.setdefault("handles", {})
    return handles.setdefault((target.address, target.pid), RemoteHandle(target))


def _count(context: RankContext, what: str) -> int:
    """How often this process has been here: the same number on every rank, since all run the same scenarios."""
    context.state[what] = context.state.get(what, -1) + 1
    return int(context.state[what])


def _family(checkpoint: str) -> str:
    from harness.checkpoints import read_config

    return str(read_config(checkpoint)["model_type"])
