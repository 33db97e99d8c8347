"""Scenarios for tests of the world harness itself: real forked ranks, no Megatron, no vLLM."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from harness.world.deadline import Deadline
from harness.world.position import PublishedEvents
from harness.world.rank import RankContext
from harness.world.rpc import RemoteHandle, Target, public_methods
from staged_sync.trace import Trace

FAR_S = 60.0
"""Longer than any of these tests may take: what waits this long hangs."""


def who(context: RankContext, *, greeting: str) -> dict[str, Any]:
    return {"rank": context.rank, "actor": context.topology.actor(context.rank), "torchrun": os.environ.get("RANK"),
            "pid": os.getpid(), "greeting": greeting}


def add_ranks(context: RankContext) -> float:
    """An all-reduce of all trainer ranks over torchrun's own store."""
    tensor = torch.tensor(float(context.rank + 1))
    _join(context)
    dist.all_reduce(tensor)
    return tensor.item()


def raises_on(context: RankContext, *, ranks: list[int]) -> str:
    if context.rank in ranks:
        raise ValueError(f"planted on ranks {ranks}")
    return "fine"


def returns_an_object(context: RankContext) -> object:
    return object()


def hangs_in_a_collective(context: RankContext, *, absent: int) -> None:
    """Every trainer rank but one waits in a barrier, standing in stage 1, bucket 7, like a source in a send."""
    _join(context)
    trace = Trace(context.rank, now=time.monotonic)
    trace.events = PublishedEvents(trace, context.position)
    with trace.at(phase="send", stage=1, bucket=7, group="vime-pp_1"):
        if context.rank == absent:
            absent_rank_waits_for_a_call(context)
        with trace.waiting("barrier", detail="sent"):
            dist.barrier()


def absent_rank_waits_for_a_call(context: RankContext) -> NoReturn:
    """A freeze point that nobody lifts; its name is what the test looks for in the stack."""
    context.freeze("never lifted", timeout_s=FAR_S)
    raise AssertionError("the freeze point was lifted")


def dies(context: RankContext, *, rank: int) -> str:
    """One rank kills itself in mid-scenario, as a segmentation fault or the kernel's OOM killer would."""
    if context.rank == rank:
        os.write(2, b"these were my last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def freezes(context: RankContext) -> str:
    context.freeze("before the answer", timeout_s=FAR_S)
    return "thawed"


class Desk:
    """What a receiver serves in these tests."""

    def echo(self, value: Any, dtype: torch.dtype) -> list[Any]:
        return [value, dtype]

    def fail(self) -> None:
        raise LookupError("nothing here")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _private(self) -> str:
        return "secret"


def serve(context: RankContext) -> dict[str, Any]:
    desk = Desk()
    return {"name": "desk", "address": context.serve(desk), "pid": os.getpid(), "methods": list(public_methods(desk))}


def call(context: RankContext, *, target: dict[str, Any], method: str, arguments: dict[str, Any]) -> Any:
    """One remote call, polled to its end as the library does it."""
    handle = RemoteHandle(Target(**target))
    reference = getattr(handle, method).remote(**arguments)
    deadline = Deadline.after(FAR_S)
    while not reference.poll():
        if deadline.expired:
            raise TimeoutError(f"{method} was not answered")
    return reference.result()


def _join(context: RankContext) -> None:
    if dist.is_initialized():
        return
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("dummies", agent), rank=context.rank,
                            world_size=context.topology.trainers, timeout=timedelta(seconds=FAR_S))
