"""The control group over real gloo, one thread per rank: status travels, absent ranks are named, generations replace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from staged_sync import live_control, live_seam
from staged_sync.control import Control, Status
from staged_sync.errors import Failure, RanksAbsent
from staged_sync.live_control import Seat, seats
from staged_sync.live_seam import LiveSeam
from staged_sync.trace import Trace


class ControlSeam(LiveSeam):
    """A live seam without Megatron: only what the control group needs."""

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = dist.PrefixStore("control-test", store)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what ranks give each other in earnest: threads of one process hear of each other at once."""
    monkeypatch.setattr(live_control, "LOOK_S", 0.05)
    for module in (live_control, live_seam):
        monkeypatch.setattr(module, "VERDICT_S", 0.5)


World = Callable[[Callable[[Control, int], Any]], list[Any]]


@pytest.fixture
def world() -> Iterator[World]:
    with world_of(3) as run:
        yield run


@contextmanager
def world_of(size: int) -> Iterator[World]:
    """Runs a function on so many ranks, each in its own thread with its own store client; returns results or exceptions."""
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


def test_where_ranks_sit() -> None:
    assert seats(0, 1, 32) == [Seat(0, 0, 1)]
    assert seats(31, 32, 32) == [Seat(0, 31, 32)]
    assert seats(0, 33, 32) == [Seat(0, 0, 32), Seat(0, 0, 2)]
    assert seats(32, 33, 32) == [Seat(1, 0, 1), Seat(0, 1, 2)]
    assert seats(1023, 1024, 32) == [Seat(31, 31, 32)]
    assert seats(992, 1024, 32) == [Seat(31, 0, 32), Seat(0, 31, 32)]
    assert seats(4, 5, 2) == [Seat(2, 0, 1), Seat(1, 0, 1), Seat(0, 1, 2)]


@pytest.mark.parametrize(("size", "block"), [(4, 2), (5, 2), (9, 2), (7, 3)])
def test_blocks_of_blocks_meet_as_one(size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_control, "BLOCK", block)
    monkeypatch.setattr(live_control, "INLINE_BYTES", 40)
    with world_of(size) as world:
        world(opened)
        for data in ([{} for _ in range(size)], [{"rank": rank, "text": "x" * 11 * rank} for rank in range(size)],
                     [{"text": "y" * 100} if rank == size - 1 else {} for rank in range(size)]):
            results = world(lambda control, rank, data=data: control.barrier("blocks", Status(data=data[rank]), timeout_s=10))
            assert results == [[Status(data=one) for one in data]] * size


def test_a_rank_that_never_joins_its_block_is_named_to_those_of_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have opened the group, and learn of it at the first barrier, long before its deadline."""
    monkeypatch.setattr(live_control, "BLOCK", 2)

    def join(control: Control, rank: int) -> Any:
        if rank == 3:
            return None
        control.ensure_open(timeout_s=1)
        return control.barrier("first", Status(), timeout_s=15)

    with world_of(6) as world:
        began = time.monotonic()
        results = world(join)
        assert time.monotonic() - began < 10
    assert results.pop(3) is None
    assert len({str(result) for result in results}) == 1 and "trainer ranks [3] did not come" in str(results[0])


def test_a_world_of_one_rank_meets_itself() -> None:
    with world_of(1) as world:
        world(opened)
        some = Status(data={"a": 1})
        assert world(lambda control, rank: control.barrier("alone", some, timeout_s=10)) == [[some]]
        assert world(lambda control, rank: control.barrier("alone", Status(), timeout_s=10)) == [[Status()]]


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


@pytest.mark.parametrize(("size", "block", "leaver"), [(3, 32, 1), (6, 32, 2), (6, 32, 0), (7, 2, 4), (7, 2, 5)])
def test_a_rank_that_gives_up_is_heard_long_before_the_deadline(size: int, block: int, leaver: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks that wait for it, and by ranks that wait for others which wait for it."""
    monkeypatch.setattr(live_control, "BLOCK", block)
    why = f"rank {leaver} left the update (phase send): KeyboardInterrupt: "
    waiting = threading.Barrier(size, timeout=10)

    def leave(control: Control, rank: int) -> Any:
        waiting.wait()
        return control.give_up(why) if rank == leaver else control.barrier("eight", Status(), timeout_s=15)

    with world_of(size) as world:
        world(opened)
        began = time.monotonic()
        results = world(leave)
        assert time.monotonic() - began < 10
    assert results.pop(leaver) is None
    assert {str(result) for result in results} == {f"weight sync call 1: {why}"}


@pytest.mark.parametrize("block", [2, 32])
def test_the_first_deadline_ends_the_wait_of_all_ranks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come at different times, so their own deadlines differ; one stays away for ever, and says nothing."""
    monkeypatch.setattr(live_control, "BLOCK", block)
    with world_of(5) as world:
        world(opened)
        began = time.monotonic()
        results = world(lambda control, rank: None if rank == 3 else
                        control.barrier("nine", Status(), timeout_s=1 if rank == 2 else 15))
        assert time.monotonic() - began < 10
    assert results.pop(3) is None
    assert len({str(result) for result in results}) == 1 and "trainer ranks [3] did not come" in str(results[0])


def test_opening_without_one_rank_names_it(world: World) -> None:
    results = world(lambda control, rank: None if rank == 1 else control.ensure_open(timeout_s=1))
    assert "trainer ranks [1] did not come" in str(results[0])
    assert str(results[0]) == str(results[2])
