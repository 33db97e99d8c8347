"""What a status barrier costs: worlds of real processes that meet on the library's own control group, and nothing else.

Each world is forked from a process of one thread, so that sixteen of them share one copy of torch. Its ranks then share the
machine's cores: what a barrier takes is an upper bound of what it would take with a core for each. How much the lead and
another rank compute in it is not: CPU time does not depend on who else runs.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.world.process import require_single_thread
from staged_sync.control import Control, Status
from staged_sync.live_seam import LiveSeam
from staged_sync.trace import Trace
from staged_sync.vllm.rendezvous import Listener, listen

TIMEOUT_S = 60.0
REPORT: Mapping[str, Any] = {"report": {"stage": 1, "count": 2309, "digest": "0" * 64, "bytes": 29_386_704_384, "buckets": 56,
                                        "offender": ""}}
"""What a source says at its stage's last barrier, and is the only one to say anything."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one barrier, of one after the other in a row; CPU seconds are those of one rank in one barrier."""

    empty_s: float
    report_s: float
    lead_cpu_s: float
    other_cpu_s: float
    open_s: float


def measure(size: int, repeats: int) -> Costs:
    """A world of `size` ranks: opens the control group, then meets `repeats` times with nothing to say and `repeats` times
    with one report."""
    require_single_thread("the benchmark")
    forking = multiprocessing.get_context("fork")
    listener = listen("127.0.0.1", None)
    pipes = [forking.Pipe() for _ in range(size)]
    ranks = [forking.Process(target=_rank, args=(rank, size, listener, repeats, pipes[rank][1])) for rank in range(size)]
    try:
        for rank in ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()
        said = [_answer(rank, mine) for rank, (mine, _) in enumerate(pipes)]
    finally:
        listener.close()
        for rank in ranks:
            rank.kill()
            rank.join()
    lead, others = said[0], said[1:]
    return Costs(max(s["empty_s"] for s in said), max(s["report_s"] for s in said), lead["cpu_s"],
                 sum(s["cpu_s"] for s in others) / len(others), max(s["open_s"] for s in said))


def _answer(rank: int, pipe: Any) -> dict[str, float]:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} has not met the others within {TIMEOUT_S:g} s")
    answer: dict[str, float] = pipe.recv()  # EOFError where the rank has died; its traceback is on stderr
    return answer


def _rank(rank: int, size: int, listener: Listener, repeats: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore(listener.host, listener.port, None, True, limit, wait_for_workers=False,
                              master_listen_fd=listener.take_socket().detach(), use_libuv=False)
    else:
        store = dist.TCPStore(listener.host, listener.port, None, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", store), rank=rank, world_size=size, timeout=limit)
    seam = LiveSeam([], store=dist.PrefixStore("control", store))
    control = Control(seam, Trace(rank, seam.now))
    dist.barrier()
    began = time.perf_counter()
    control.ensure_open(timeout_s=TIMEOUT_S)
    open_s = time.perf_counter() - began
    _meet(control, Status(), 3)
    cpu_before_s = _cpu_s()
    empty_s = _meet(control, Status(), repeats)
    cpu_s = (_cpu_s() - cpu_before_s) / repeats
    report_s = _meet(control, Status(data=REPORT if rank == size - 1 else {}), repeats)
    pipe.send({"open_s": open_s, "empty_s": empty_s, "report_s": report_s, "cpu_s": cpu_s})
    pipe.poll(TIMEOUT_S)  # until the parent ends this process: the lead's store must outlive the others


def _meet(control: Control, status: Status, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        control.barrier("benchmark", status, timeout_s=TIMEOUT_S)
    return (time.perf_counter() - began) / repeats


def _cpu_s() -> float:
    """Of all threads of this process: gloo's own do most of the work."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
