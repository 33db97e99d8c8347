"""Small plays with known outcomes, to judge the explorers by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.recording.kernel import Waiting
from harness.recording.world import RankContext
from harness.sim.play import Play
from staged_sync.errors import TransportError
from staged_sync.seam import Wire


def ask(context: RankContext, target: Any, method: str, **kwargs: Any) -> Any:
    """One RPC, waited for."""
    work = context.seam.call(target, method, **kwargs)
    while not work.poll():
        context.seam.wait_any([work], timeout_s=30)
    return work.result()


# --- no race ------------------------------------------------------------------------------------------------------------
def _meet_twice(context: RankContext) -> list[bytes]:
    group = context.seam.open_control_group(0, timeout_s=5)
    return [*group.exchange(f"{context.rank}".encode(), timeout_s=5)]


MEET = Play(_meet_twice, ranks=2)
"""Two barriers of two ranks: every order ends alike."""


# --- races --------------------------------------------------------------------------------------------------------------
def _lost_update(context: RankContext) -> int:
    """Read, give way, write."""
    kernel, shared = context.world.kernel, vars(context.world)
    kernel.touch("counter", "read")
    seen = shared.setdefault("counter", 0)
    kernel.give_way()
    kernel.touch("counter", "write")
    shared["counter"] = seen + 1
    return int(shared["counter"])


LOST_UPDATE = Play(_lost_update, ranks=3)
"""Three ranks add one each, without a lock."""


def _first_at_the_lock(context: RankContext) -> bool:
    return bool(ask(context, context.world.lock.handle, "acquire"))


LOCK = Play(_first_at_the_lock, ranks=2)
"""Whoever asks first gets it."""


def _two_callers(context: RankContext) -> None:
    """Two ranks ask one engine; the order of arrival is the order of service."""
    context.seam.call(context.world.handles[0], ("pause_generation", "flush_cache")[context.rank])


QUEUE = Play(_two_callers, ranks=2, engines=(1,))


def _ends_of_a_group(context: RankContext) -> str:
    """Rank 0 sends and closes without waiting; rank 1 is the worker: it has the frame, or an error."""
    world, address = context.world, ("10.0.0.1", 20000)
    if context.rank == 0:
        listener = context.seam.listen(address=None, port_range=None)
        dial = context.seam.open_transfer_group(listener, name="g", world_size=2, wire=Wire("gloo", False, 0), timeout_s=9)
        while not dial.poll():
            context.seam.wait_any([dial], timeout_s=9)
        group = dial.result()
        group.send([torch.zeros(2, dtype=torch.bfloat16)])
        group.close(timeout_s=1)
        return "closed"
    channel = world.network.join(address, 1, 2, "g", "worker")
    try:
        world.network.receive(channel, 1, 4, ((torch.bfloat16, (2,)),))
    except TransportError:
        return "lost"
    return "received"


EARLY_CLOSE = Play(_ends_of_a_group, ranks=2)


# --- transfer groups ----------------------------------------------------------------------------------------------------
def _dial(context: RankContext, engines: Callable[[int], list[int]]) -> tuple[Any, list[Any]]:
    seam, world = context.seam, context.world
    listener = seam.listen(address=None, port_range=None)
    name, size = f"g{context.rank}", 1 + len(world.handles)
    dial = seam.open_transfer_group(listener, name=name, world_size=size, wire=Wire("gloo", False, 0), timeout_s=30)
    joins = [seam.call(world.handles[i], "init_weights_update_group", master_address=listener.host, master_port=listener.port,
                       rank_offset=1 + i, world_size=size, group_name=name, backend="gloo") for i in engines(context.rank)]
    return dial, joins


def _wait_for(context: RankContext, works: list[Any]) -> None:
    left = list(works)
    while left:
        for work in [work for work in left if work.poll()]:
            work.result()
            left.remove(work)
        if left:
            context.seam.wait_any(left, timeout_s=60)


def _opposite_arrivals(context: RankContext) -> str:
    """B02: two sources open groups to the same two engines at once."""
    dial, joins = _dial(context, lambda rank: [0, 1])
    _wait_for(context, [dial, *joins])
    return "joined"


OPPOSITE = Play(_opposite_arrivals, ranks=2, engines=(1, 1))


def _last_init_wins(context: RankContext) -> str:
    dial, joins = _dial(context, lambda rank: [0])
    _wait_for(context, [dial, *joins])
    context.seam.open_control_group(0, timeout_s=100)
    slot = context.world.engines[0].workers[0].slot
    return slot.name if slot else ""


LAST_INIT = Play(_last_init_wins, ranks=2, engines=(1,))


# --- deadlocks ----------------------------------------------------------------------------------------------------------
def _cross_wait(context: RankContext) -> None:
    mine, peer = (("A", 1), ("B", 0))[context.rank]
    context.world.kernel.wait(lambda: False, Waiting("gather", mine, missing=lambda: f"rank {peer}"))


CROSS_WAIT = Play(_cross_wait, ranks=2)


def _spin(context: RankContext) -> None:
    while True:
        context.world.kernel.wait(lambda: True, Waiting("poll"))


SPIN = Play(_spin, max_steps=200)
