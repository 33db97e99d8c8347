"""megatron.core, its bridges, ray and vllm for as long as foreign code runs: stub modules that answer for the rank that asks.

They are put into `sys.modules` inside `installed()` and taken out again, whether or not the real packages are there.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from harness.foreign.active import here
from harness.foreign.dist import Group
from harness.foreign.model import bridge_tensors
from harness.foreign.transfer import TransferEnd, open_end, send, wait_for
from harness.recording.network import HOST
from harness.recording.server import Handle, Reference, RemoteMethod
from staged_sync.seam import GatherGroup, Wire


# --- megatron -----------------------------------------------------------------------------------------------------------
def _group(name: GatherGroup | Literal["pp"]) -> Group:
    me = here()
    collective = me.world.gather_group(me.rank, name)
    return Group(collective.members, collective.name, collective=collective)


def _data_parallel_group(with_context_parallel: bool = False, **ignored: Any) -> Group:
    """The ranks with this one's shards; without its context-parallel peers by default, as in Megatron."""
    me = here()
    mine, cp = me.coordinates, me.world.layout.cp
    members = [c.rank for c in me.world.layout.ranks if (c.pp, c.tp) == (mine.pp, mine.tp)
               and (with_context_parallel or c.dp % cp == mine.dp % cp)]
    return Group(members, f"dp[{','.join(map(str, members))}]")


def _context_parallel_rank(**ignored: Any) -> int:
    return here().coordinates.dp % here().world.layout.cp


def mpu() -> dict[str, Callable[..., Any]]:
    """Every getter that a weight sync asks."""
    answers: dict[str, Callable[..., Any]] = {}
    for name, field in {"tensor_model_parallel": "tp", "pipeline_model_parallel": "pp", "expert_tensor_parallel": "etp",
                        "expert_model_parallel": "ep", "expert_data_parallel": "edp"}.items():
        answers[f"get_{name}_rank"] = _coordinate(field)
        answers[f"get_{name}_world_size"] = _coordinate(f"{field}_size")
    return answers | {
        "get_tensor_model_parallel_group": lambda *a, **k: _group("tp"),
        "get_pipeline_model_parallel_group": lambda *a, **k: _group("pp"),
        "get_expert_tensor_parallel_group": lambda *a, **k: _group("etp"),
        "get_expert_model_parallel_group": lambda *a, **k: _group("ep"),
        "get_data_parallel_group": _data_parallel_group,
        "get_data_parallel_rank": lambda *a, **k: _data_parallel_group(*a, **k).rank(),
        "get_data_parallel_world_size": lambda *a, **k: _data_parallel_group(*a, **k).size(),
        "get_context_parallel_rank": _context_parallel_rank,
        "get_context_parallel_world_size": lambda: here().world.layout.cp,
        "get_virtual_pipeline_model_parallel_world_size": lambda: None,
        "is_pipeline_first_stage": lambda *a, **k: here().coordinates.pp == 0,
        "is_pipeline_last_stage": lambda *a, **k: here().coordinates.pp == here().coordinates.pp_size - 1,
    }


def _coordinate(field: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(here().coordinates, field)


class HFWeightTuple(NamedTuple):
    param_name: str
    weight: torch.Tensor


class AutoBridge:
    """Megatron-Bridge's and mbridge's, as far as an export uses them: an iterator that every rank must iterate."""

    @classmethod
    def of(cls, *ignored: Any, **options: Any) -> AutoBridge:
        return cls()

    from_hf_pretrained = from_pretrained = from_config = of

    def get_conversion_tasks(self, model: Any) -> list[Any]:
        return []

    def export_hf_weights(self, model: Any, *ignored: Any, **options: Any) -> Iterator[HFWeightTuple]:
        for name, tensor in bridge_tensors():
            yield HFWeightTuple(name, tensor)

    def export_weights(self, models: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return bridge_tensors()


def megatron() -> dict[str, ModuleType]:
    """megatron.core's parallel state, Megatron-Bridge and mbridge."""
    state = _module("megatron.core.parallel_state", mpu())
    core = _module("megatron.core", {"mpu": state, "parallel_state": state})
    bridge = _module("megatron.bridge", {"AutoBridge": AutoBridge})
    return {"megatron": _module("megatron", {"core": core, "bridge": bridge}), "megatron.core": core,
            "megatron.core.parallel_state": state, "megatron.core.mpu": state, "megatron.bridge": bridge,
            "mbridge": _module("mbridge", {"AutoBridge": AutoBridge})}


# --- ray ----------------------------------------------------------------------------------------------------------------
class ActorHandle(Handle):
    """An engine or the lock, as foreign code holds it: each call is an event of the rank that makes it."""

    def __getattr__(self, method: str) -> ActorMethod:
        remote = super().__getattr__(method)
        return ActorMethod(remote.server, remote.method)


class ActorMethod(RemoteMethod):
    def remote(self, *args: Any, **kwargs: Any) -> Reference:
        """Arguments by position or name; a TypeError where they do not fit, as with Ray."""
        bound = _signature(getattr(type(self.server), self.method)).bind(self.server, *args, **kwargs)
        here().record("rpc", detail=f"{self.method} {self.server.name}")
        return super().remote(**{name: value for name, value in bound.arguments.items() if name != "self"})


_signature = functools.cache(inspect.signature)


class GetTimeoutError(TimeoutError):
    """ray.exceptions.GetTimeoutError."""


def ray_get(references: Reference | Sequence[Reference], *, timeout: float | None = None) -> Any:
    """Blocks; raises the first error. Without `timeout` it waits for ever, as Ray does."""
    many = [references] if isinstance(references, Reference) else list(references)
    if many and not wait_for(many, "ray.get", timeout_s=timeout):
        raise GetTimeoutError(f"Get timed out: {'; '.join(r.label for r in many if not r.ended())}")
    for reference in many:
        if reference.failed():
            reference.result()
    values = [reference.result() for reference in many]
    return values[0] if isinstance(references, Reference) else values


def ray_wait(references: Sequence[Reference], *, num_returns: int = 1,
             timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    wait_for(references, "ray.wait", timeout_s=timeout, need=num_returns)
    done = [r for r in references if r.ended()][:num_returns]
    return done, [r for r in references if r not in done]


def ray() -> dict[str, ModuleType]:
    exceptions = _module("ray.exceptions", {"GetTimeoutError": GetTimeoutError, "RayActorError": RuntimeError,
                                            "RayError": RuntimeError, "RayTaskError": RuntimeError})
    actor = _module("ray.actor", {"ActorHandle": ActorHandle})
    services = _module("ray._private.services", {"get_node_ip_address": lambda *a: HOST})
    private = _module("ray._private", {"services": services})
    util = _module("ray.util", {"get_node_ip_address": lambda *a: HOST})
    top = _module("ray", {"get": ray_get, "wait": ray_wait, "ObjectRef": Reference, "exceptions": exceptions, "actor": actor,
                          "_private": private, "util": util, "is_initialized": lambda: True})
    return {"ray": top, "ray.exceptions": exceptions, "ray.actor": actor, "ray._private": private,
            "ray._private.services": services, "ray.util": util}


# --- vllm ---------------------------------------------------------------------------------------------------------------
@dataclass
class NCCLTrainerSendWeightsArgs:
    group: Any
    src: int = 0
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    stream: Any = None
    post_iter_func: Callable[[Any], torch.Tensor] | None = None


def trainer_init(init_info: Any, rank: int = 0) -> TransferEnd:
    """Blocks until every worker has joined."""
    def said(name: str, default: Any = None) -> Any:
        return init_info.get(name, default) if isinstance(init_info, dict) else getattr(init_info, name, default)
    stage = here().coordinates.pp
    return open_end(said("master_address"), int(said("master_port")), int(said("world_size")),
                    said("group_name") or f"group of stage {stage}", packed=bool(said("packed", False)),
                    buffer_bytes=int(said("packed_buffer_size_bytes", 1 << 30)))


def trainer_send_weights(iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
    """Enqueues one broadcast per tensor, or per chunk; returns before they are sent."""
    args = NCCLTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, dict) else trainer_args
    if not isinstance(args.group, TransferEnd):
        raise TypeError(f"trainer_send_weights needs the group that trainer_init returned, got {args.group!r}")
    named = list(iterator)
    tensors = [args.post_iter_func(pair) if args.post_iter_func else pair[1] for pair in named]
    args.group.channel.wire = Wire("gloo", args.packed, args.packed_buffer_size_bytes)
    me = here()
    me.record("send", group=args.group.channel.name, detail=" ".join(name for name, _ in named))
    send(me, args.group, [tensor.contiguous() for tensor in tensors])


def packed_producer(iterator: Iterable[tuple[str, torch.Tensor]], group: TransferEnd, src: int = 0,
                    post_iter_func: Callable[[Any], torch.Tensor] | None = None, buffer_size_bytes: int = 1 << 30,
                    num_buffers: int = 2, **ignored: Any) -> None:
    trainer_send_weights(iterator, NCCLTrainerSendWeightsArgs(group, src, True, buffer_size_bytes, num_buffers, None,
                                                              post_iter_func))


class PyNccl:
    """PyNcclCommunicator: the group is its first argument; `broadcast` enqueues."""

    @staticmethod
    def broadcast(end: TransferEnd, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        send(here(), end, [tensor])


def vllm() -> dict[str, ModuleType]:
    """Both generations: static methods (up to 0.27) and the helpers that stay (0.29 and later)."""
    static = type("NCCLWeightTransferEngine", (), {"trainer_init": staticmethod(trainer_init),
                                                   "trainer_send_weights": staticmethod(trainer_send_weights)})
    engine = _module("vllm.distributed.weight_transfer.nccl_engine", {
        "NCCLWeightTransferEngine": static, "NCCLTrainerSendWeightsArgs": NCCLTrainerSendWeightsArgs})
    common = _module("vllm.distributed.weight_transfer.nccl_common", {"trainer_init": trainer_init})
    packed = _module("vllm.distributed.weight_transfer.packed_tensor", {"packed_nccl_broadcast_producer": packed_producer})
    transfer = _module("vllm.distributed.weight_transfer", {"nccl_engine": engine, "nccl_common": common,
                                                            "packed_tensor": packed})
    distributed = _module("vllm.distributed", {"weight_transfer": transfer})
    return {"vllm": _module("vllm", {"distributed": distributed}), "vllm.distributed": distributed,
            "vllm.distributed.weight_transfer": transfer, "vllm.distributed.weight_transfer.nccl_engine": engine,
            "vllm.distributed.weight_transfer.nccl_common": common, "vllm.distributed.weight_transfer.packed_tensor": packed}


# --- the scope ----------------------------------------------------------------------------------------------------------
class _Stub(ModuleType):
    """A module that says what it lacks, instead of a bare AttributeError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the stub of {self.__name__} has no {name!r}: give it in the adapter's `stubs` "
                             f"(docs/test-your-implementation.md)")


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = _Stub(name)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module


@contextmanager
def installed(extra: dict[str, dict[str, Any]]) -> Iterator[None]:
    """`extra`: more stub modules, by dotted name, with their contents."""
    modules = {**megatron(), **ray(), **vllm()}
    for name, contents in extra.items():
        if name in modules:
            vars(modules[name]).update(contents)
        else:
            modules[name] = _module(name, contents)
    packages = {name.partition(".")[0] for name in modules}
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
