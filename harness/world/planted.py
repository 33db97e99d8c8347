"""Faults planted in live ranks: `harness.faults`, acted out by real processes.

    world.run("harness.world.planted:plant", on=[1], deadline=…, builder="fail_at",
              place={"rank": 1, "event": "send", "stage": 1, "nth": 2})

raises   an `InjectedFailure` at that event of the trace, or instead of that engine method
dies     SIGKILL: no `finally`, no message
never answers   SIGSTOP: the process is there and does nothing, until its supervisor wakes it

An engine's `receive` counts as a method: one per broadcast that arrives, before it is loaded, so in the middle of a bucket.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from harness.faults import Fault, Faults
from harness.world.rank import RankContext
from staged_sync.trace import Event


def plant(context: RankContext, *, builder: str, place: dict[str, Any]) -> None:
    """One more fault on this rank; `builder` is a method of `Faults`."""
    getattr(_faults(context), builder)(**place)


def harvest(context: RankContext) -> None:
    """Every planted fault has struck exactly once, or this raises; none is left."""
    _faults(context).assert_all_fired()
    del context.state["faults"]


def at_event(context: RankContext, event: Event) -> None:
    """For trainer ranks, with every event of the library's trace."""
    _act(_faults(context).on_event(event))


def at_call(context: RankContext, method: str) -> None:
    """For receivers, with every remote call and every broadcast (`receive`)."""
    _act(_faults(context).on_call(context.engine, method))


def _faults(context: RankContext) -> Faults:
    return context.state.setdefault("faults", Faults())


def _act(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.action == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "never answers":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        fault.answer()
