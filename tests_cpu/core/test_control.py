"""The control group over real gloo, one thread per rank: status travels, absent ranks are named, generations replace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from staged_sync import live_seam
from staged_sync.control import Control, Status
from staged_sync.errors import Failure, RanksAbsent
from staged_sync.live_seam import LiveSeam
from staged_sync.trace import Trace


class ControlSeam(LiveSeam):
    """A live seam without Megatron: only what the control group needs."""

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = dist.PrefixStore("control-test", store)


World = Callable[[Callable[[Control, int], Any]], list[Any]]


@pytest.fixture
def world() -> Iterator[World]:
    """Runs a function on three ranks, each in its own thread with its own store client; returns results or exceptions."""
    size = 3
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    clients = [dist.TCPStore("127.0.0.1", server.port, None, is_master=False, timeout=timedelta(seconds=20))
               for _ in range(size)]
    seams = [ControlSeam(rank, size, store) for rank, store in enumerate(clients)]
    controls = [Control(seam, Trace(rank, time.monotonic)) for rank, seam in enumerate(seams)]

    def run(function: Callable[[Control, int], Any]) -> list[Any]:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(function, control, rank) for rank, control in enumerate(controls)]
            return [future.exception(timeout=30) or future.result(timeout=30) for future in futures]

    yield run
    for control in controls:
        control.close()


def opened(control: Control, rank: int) -> None:
    control.ensure_open(timeout_s=10)


def test_every_rank_learns_every_status_and_an_empty_one_costs_no_payload(world: World) -> None:
    world(opened)

    def meet(control: Control, rank: int) -> list[Status]:
        failure = Failure(1, "phase send, stage 0", "ValueError", "äöü " * 40) if rank == 1 else None
        return control.barrier("one", Status(failure, {"rank": rank} if rank == 2 else {}), timeout_s=10)

    results = world(meet)
    assert results[0] == results[1] == results[2]
    assert results[0] == [Status(), Status(Failure(1, "phase send, stage 0", "ValueError", "äöü " * 40)),
                          Status(data={"rank": 2})]
    assert world(lambda control, rank: control.barrier("two", Status(), timeout_s=10)) == [[Status()] * 3] * 3


@pytest.mark.parametrize("sizes", [(0, 4096, 4097), (20_000, 1, 0), (9000, 12_345, 4095)])
def test_long_and_short_payloads_arrive_whole(world: World, sizes: tuple[int, ...]) -> None:
    world(opened)
    data = [{} if size == 0 else {"text": f"{rank}" * size} for rank, size in enumerate(sizes)]
    results = world(lambda control, rank: control.barrier("long", Status(data=data[rank]), timeout_s=10))
    assert results == [[Status(data=one) for one in data]] * 3


def test_an_absent_rank_is_named_by_all_others_with_one_text(world: World) -> None:
    world(opened)
    results = world(lambda control, rank: None if rank == 2 else control.barrier("three", Status(), timeout_s=1))
    assert results[2] is None
    assert isinstance(results[0], RanksAbsent) and isinstance(results[1], RanksAbsent)
    assert str(results[0]) == str(results[1])
    assert "trainer ranks [2] did not come" in str(results[0])
    assert "status barrier 'three'" in str(results[0])


def test_after_a_failure_all_ranks_meet_in_the_next_generation_and_the_late_one_too(world: World) -> None:
    world(opened)
    world(lambda control, rank: None if rank == 2 else control.barrier("four", Status(), timeout_s=1))

    def again(control: Control, rank: int) -> list[Status]:
        control.ensure_open(timeout_s=10)
        return control.barrier("five", Status(data={"rank": rank}), timeout_s=10)

    results = world(again)
    assert results == [[Status(data={"rank": r}) for r in range(3)]] * 3


def test_a_barrier_on_a_dead_generation_says_so_at_once(world: World) -> None:
    world(opened)
    world(lambda control, rank: None if rank == 2 else control.barrier("six", Status(), timeout_s=1))
    results = world(lambda control, rank: None if rank == 2 else control.barrier("seven", Status(), timeout_s=10))
    assert all("is closed after an earlier failure" in str(result) for result in results[:2])


def test_a_rank_that_gives_up_is_heard_long_before_the_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_seam, "LOOK_S", 0.05)
    monkeypatch.setattr(live_seam, "VERDICT_S", 0.5)
    world(opened)
    waiting = threading.Barrier(3, timeout=10)

    def leave(control: Control, rank: int) -> Any:
        waiting.wait()
        if rank == 1:
            control.give_up("rank 1 left the update (phase send): KeyboardInterrupt: ")
            return None
        return control.barrier("eight", Status(), timeout_s=60)

    began = time.monotonic()
    results = world(leave)
    assert time.monotonic() - began < 20
    assert str(results[0]) == str(results[2]) == (
        "weight sync call 1: rank 1 left the update (phase send): KeyboardInterrupt: ")


def test_opening_without_one_rank_names_it(world: World) -> None:
    results = world(lambda control, rank: None if rank == 1 else control.ensure_open(timeout_s=1))
    assert "trainer ranks [1] did not come" in str(results[0])
    assert str(results[0]) == str(results[2])
