"""The source's end of a gloo group against receivers that are plain torch in other processes."""

from __future__ import annotations

import gc
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from staged_sync.errors import DeadlineExceeded, TransportError
from staged_sync.seam import Wire
from staged_sync.vllm.gloo_group import GlooReceiver, Terms
from staged_sync.vllm.rendezvous import Listener, listen
from staged_sync.vllm.transport import GlooTransferGroup, open_gloo_group

DEADLINE_S = 20.0
UNPACKED = Wire("gloo", packed=False, packed_buffer_size_bytes=1)

RECEIVER = """
import json, os, socket, sys, torch, torch.distributed as dist
from datetime import timedelta

def listening():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as s:
                if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(s.getsockname())
        except OSError:
            pass
    return found

limit = timedelta(seconds=20)
options = dist.BroadcastOptions(); options.rootRank = 0; options.rootTensor = 0
for line in sys.stdin:
    command, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if command == "join":
        port, rank, world_size = numbers
        group = store = None
        store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        before = listening()
        how = dist.ProcessGroupGloo._Options()
        how._timeout, how._devices = limit, [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store.set(f"joined/{rank}", json.dumps((listening() - before).pop()))
        group = dist.ProcessGroupGloo(store, rank, world_size, how)
        continue
    buffer = torch.zeros(numbers[0], dtype=torch.uint8)
    print(json.dumps("receiving"), flush=True)
    try:
        group.broadcast([buffer], options).wait()
        print(json.dumps({"bytes": buffer[:64].tolist()}), flush=True)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""
"""What `staged_sync` speaks to, written down a second time: store keys, where it accepts, broadcast from rank 0, bytes."""


class PlainReceiver:
    """A receiver process, good for many groups. `expect` tells it how many bytes to wait for."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def join(self, port: int, rank: int, world_size: int) -> None:
        self._tell(f"join {port} {rank} {world_size}")

    def expect(self, nbytes: int) -> None:
        self._tell(f"expect {nbytes}")
        assert self.answer() == "receiving"

    def answer(self) -> Any:
        return self._said.get(timeout=DEADLINE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PlainReceiver]]:
    """Two receiver processes for the whole module; a test that ends one takes it out."""
    started = [PlainReceiver(), PlainReceiver()]
    yield started
    for receiver in started:
        receiver.end()


Open = Callable[..., AbstractContextManager[tuple[GlooTransferGroup, list[PlainReceiver]]]]


@pytest.fixture
def group_of(pool: list[PlainReceiver]) -> Open:
    """Opens a group to the first so many receivers of the pool."""

    @contextmanager
    def open_group(world_size: int, wire: Wire = UNPACKED) -> Iterator[tuple[GlooTransferGroup, list[PlainReceiver]]]:
        while len(pool) < world_size - 1:
            pool.append(PlainReceiver())
        listener = listen("127.0.0.1", None)
        dial = open_gloo_group(listener, name="vime-pp_0", world_size=world_size, wire=wire, timeout_s=DEADLINE_S)
        for rank, receiver in enumerate(pool[:world_size - 1], start=1):
            receiver.join(listener.port, rank, world_size)
        group = wait(dial)
        listener.close()
        try:
            yield group, pool[:world_size - 1]
        finally:
            group.close(timeout_s=5)

    return open_group


def wait(work: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as nothing:
        while not work.poll():
            if time.monotonic() > deadline:
                raise TimeoutError("the work did not end")
            nothing.select(0.001)
    return work.result()


def test_every_receiver_gets_the_bytes_in_order(group_of: Open) -> None:
    first, second = torch.tensor([1.5, -2.0]), torch.tensor([[7]], dtype=torch.int64)
    with group_of(3) as (group, started):
        for receiver in started:
            receiver.expect(8)
        send = group.send([first, second, torch.zeros(0)])
        for receiver in started:
            assert receiver.answer()["bytes"] == [0, 0, 192, 63, 0, 0, 0, 192]
            receiver.expect(8)
        for receiver in started:
            assert receiver.answer()["bytes"] == [7, 0, 0, 0, 0, 0, 0, 0]
            receiver.expect(0)
        for receiver in started:
            assert receiver.answer()["bytes"] == []
        wait(send)
        wait(group.synchronize())


def test_packed_chunks_go_over_the_wire(group_of: Open) -> None:
    with group_of(2, Wire("gloo", packed=True, packed_buffer_size_bytes=4)) as (group, (receiver,)):
        send = group.send([torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.uint8),
                           torch.tensor(6, dtype=torch.uint8)])
        receiver.expect(5)
        assert receiver.answer()["bytes"] == [1, 2, 3, 4, 5]
        receiver.expect(1)
        assert receiver.answer()["bytes"] == [6]
        wait(send)


def test_a_packed_bucket_is_not_laid_over_one_that_is_still_being_sent(group_of: Open) -> None:
    with group_of(2, Wire("gloo", packed=True, packed_buffer_size_bytes=100)) as (group, (receiver,)):
        sends = [group.send([torch.full((2,), value, dtype=torch.uint8), torch.tensor([9], dtype=torch.uint8)])
                 for value in (1, 2)]
        for value in (1, 2):
            receiver.expect(3)
            assert receiver.answer()["bytes"] == [value, value, 9]
        for send in sends:
            wait(send)
        for value in (3, 4):  # now one at a time, so that they share memory; a shorter one after a longer one
            send = group.send([torch.full((7 - value,), value, dtype=torch.uint8)])
            receiver.expect(7 - value)
            assert receiver.answer()["bytes"] == [value] * (7 - value)
            wait(send)


def test_closing_in_the_middle_of_a_send_fails_the_blocked_receiver_at_once(group_of: Open) -> None:
    """One receiver takes nothing, so the send cannot end; the other has its bytes, waits for more, and must not wait on."""
    with group_of(3) as (group, (waiting, deaf)):
        send = group.send([torch.ones(1 << 24, dtype=torch.uint8)])
        waiting.expect(1 << 24)
        assert waiting.answer()["bytes"] == [1] * 64
        waiting.expect(1)
        assert not send.poll()
        began = time.monotonic()
        group.close(timeout_s=5)
        assert time.monotonic() - began < 1.0
        assert "Connection closed by peer" in waiting.answer()["error"]
        assert time.monotonic() - began < 2.0
        with pytest.raises(TransportError, match="sending over transfer group 'vime-pp_0' failed"):
            wait(send)
        deaf.expect(1 << 24)
        assert "error" in deaf.answer()  # and nobody takes the pieces that did arrive for a tensor


def test_a_receiver_that_dies_fails_the_send(group_of: Open, pool: list[PlainReceiver]) -> None:
    with group_of(2) as (group, (receiver,)):
        send = group.send([torch.ones(1 << 24, dtype=torch.uint8)])
        pool.remove(receiver)
        receiver.end()
        with pytest.raises(TransportError, match="'vime-pp_0' failed"):
            wait(send)
        with pytest.raises(TransportError, match="'vime-pp_0' failed"):
            group.send([torch.ones(1)])
        with pytest.raises(TransportError, match="'vime-pp_0' failed"):
            wait(group.synchronize())


def test_strided_tensors_are_refused_before_anything_is_sent(group_of: Open) -> None:
    with group_of(2) as (group, (receiver,)):
        with pytest.raises(TransportError, match=r"tensor 1 of the bucket has shape \(3, 2\) and stride \(1, 3\)"):
            group.send([torch.ones(2), torch.ones(2, 3).t()])
        send = group.send([torch.tensor([9], dtype=torch.uint8)])
        receiver.expect(1)
        assert receiver.answer()["bytes"] == [9]
        wait(send)


def test_tensors_of_another_device_are_refused(group_of: Open) -> None:
    with group_of(2) as (group, _), pytest.raises(TransportError, match="tensor 0 of the bucket is on meta"):
        group.send([torch.ones(2, device="meta")])


def test_use_after_close_raises_and_closing_again_is_harmless(group_of: Open) -> None:
    with group_of(2) as (group, _):
        group.close(timeout_s=5)
        group.close(timeout_s=5)
        with pytest.raises(TransportError, match="'vime-pp_0' is closed"):
            group.send([torch.ones(1)])
        with pytest.raises(TransportError, match="'vime-pp_0' is closed"):
            group.synchronize()


def test_the_deadline_names_who_has_not_joined_and_what_they_were_told() -> None:
    listener = listen("localhost", None)
    dial = open_gloo_group(listener, name="vime-pp_1", world_size=4, wire=UNPACKED, timeout_s=1.5)
    outcome: list[Exception] = []
    joiner = threading.Thread(target=lambda: outcome.append(join_in_vain(listener, 2, world_size=4)))
    joiner.start()
    with pytest.raises(DeadlineExceeded, match=rf"(?s)'vime-pp_1'.*rank\(s\) 1, 3 of 3 have not joined, after 1\.5 s.*"
                                               rf"localhost:{listener.port} \(resolved to {listener.address}\)"):
        wait(dial)
    began = time.monotonic()
    joiner.join(DEADLINE_S)
    assert "vime-pp_1" in str(outcome[0])
    assert time.monotonic() - began < 2.0  # the one that had joined was hung up on


def join_in_vain(listener: Listener, rank: int, *, world_size: int = 2, packed: bool = False) -> Exception:
    terms = Terms("vime-pp_1", world_size, packed, 1)
    try:
        GlooReceiver.join(listener.host, listener.port, rank, terms, timeout_s=DEADLINE_S)
    except Exception as error:
        return error
    raise AssertionError("it joined")


def test_closing_the_listener_ends_the_dial_and_hangs_up() -> None:
    listener = listen("127.0.0.1", None)
    dial = open_gloo_group(listener, name="vime-pp_1", world_size=3, wire=UNPACKED, timeout_s=DEADLINE_S)
    outcome: list[Exception] = []
    joiner = threading.Thread(target=lambda: outcome.append(join_in_vain(listener, 1, world_size=3)))
    joiner.start()
    while dial._missing != [2]:
        assert not dial.poll()
    began = time.monotonic()
    listener.close()
    joiner.join(DEADLINE_S)
    assert time.monotonic() - began < 2.0
    assert isinstance(outcome[0], TransportError)
    with pytest.raises(TransportError, match=r"given up; worker rank\(s\) 2 of 2 have not joined"):
        wait(dial)


def test_two_workers_of_one_rank_are_told() -> None:
    listener = listen("127.0.0.1", None)
    dial = open_gloo_group(listener, name="vime-pp_1", world_size=3, wire=UNPACKED, timeout_s=DEADLINE_S)
    outcomes: list[Exception] = []
    joiners = [threading.Thread(target=lambda: outcomes.append(join_in_vain(listener, 1, world_size=3))) for _ in range(2)]
    for joiner in joiners:
        joiner.start()
    while not outcomes:
        assert not dial.poll()
    assert "rank 1 of transfer group 'vime-pp_1' is taken by another worker" in str(outcomes[0])
    listener.close()
    for joiner in joiners:
        joiner.join(DEADLINE_S)


def test_a_worker_that_was_told_other_terms_does_not_join() -> None:
    listener = listen("127.0.0.1", None)
    open_gloo_group(listener, name="vime-pp_1", world_size=2, wire=UNPACKED, timeout_s=DEADLINE_S)
    assert "packed: the source has False, the engine was told True" in str(join_in_vain(listener, 1, packed=True))
    assert "workers 1 to 1; this engine was given a rank offset that makes this worker rank 2" in str(
        join_in_vain(listener, 2))
    listener.close()
    listener = listen("127.0.0.1", None)
    open_gloo_group(listener, name="vime-pp_1", world_size=2, wire=Wire("gloo", True, 4), timeout_s=DEADLINE_S)
    assert "packed_buffer_size_bytes: the source has 4, the engine was told 1" in str(join_in_vain(listener, 1, packed=True))
    listener.close()


def test_a_group_of_nobody_is_refused() -> None:
    listener = listen("127.0.0.1", None)
    with pytest.raises(TransportError, match="at least one worker"):
        open_gloo_group(listener, name="g", world_size=1, wire=UNPACKED, timeout_s=1)
    listener.close()
    with pytest.raises(TransportError, match="is closed"):
        open_gloo_group(listener, name="g", world_size=2, wire=UNPACKED, timeout_s=1)


def test_a_source_that_is_stuck_is_noticed_by_the_receiver() -> None:
    listener = listen("127.0.0.1", None)
    dial = open_gloo_group(listener, name="stuck", world_size=2, wire=UNPACKED, timeout_s=DEADLINE_S)
    outcome: list[Any] = []

    def receive() -> None:
        receiver = GlooReceiver.join(listener.host, listener.port, 1, Terms("stuck", 2, False, 1), timeout_s=DEADLINE_S,
                                     receive_timeout_s=0.5)
        began = time.monotonic()
        try:
            receiver.broadcast(torch.zeros(4))
        except TransportError as error:
            outcome.extend([str(error), time.monotonic() - began])
        receiver.destroy()

    thread = threading.Thread(target=receive)
    thread.start()
    group = wait(dial)
    thread.join(DEADLINE_S)
    group.close(timeout_s=5)
    listener.close()
    assert "rank 1 of transfer group 'stuck' received nothing from the source" in outcome[0]
    assert 0.5 <= outcome[1] < 5.0


def one_cycle() -> None:
    """Open, send, close, with a receiver in a thread of this process."""
    listener = listen("127.0.0.1", None)
    dial = open_gloo_group(listener, name="cycle", world_size=2, wire=UNPACKED, timeout_s=DEADLINE_S)
    received = torch.zeros(3)

    def receive() -> None:
        receiver = GlooReceiver.join(listener.host, listener.port, 1, Terms("cycle", 2, False, 1), timeout_s=DEADLINE_S)
        receiver.broadcast(received)
        receiver.destroy()

    thread = threading.Thread(target=receive)
    thread.start()
    group = wait(dial)
    listener.close()
    wait(group.send([torch.tensor([1.0, 2.0, 3.0])]))
    thread.join(DEADLINE_S)
    group.close(timeout_s=5)
    assert received.tolist() == [1.0, 2.0, 3.0]


def open_things() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts file descriptors and threads in /proc")
def test_a_hundred_groups_leave_no_file_descriptor_and_no_thread() -> None:
    for _ in range(3):
        one_cycle()
    gc.collect()
    fds, threads = open_things()
    for _ in range(100):
        one_cycle()
    assert open_things() <= (fds, threads) and open_things()[1] <= threads  # what other tests left may go meanwhile


def test_it_works_inside_a_torchrun_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent store variable makes torch's own rendezvous refuse to host a store; ours is not affected."""
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "3",
                        "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    one_cycle()


def test_nothing_of_it_needs_vllm() -> None:
    program = ("import sys; sys.modules['vllm'] = None; import staged_sync.vllm.transport, staged_sync.vllm.gloo_group, "
               "staged_sync.vllm.abandon, staged_sync.vllm.plugin, staged_sync.vllm.nccl, staged_sync.engines.in_process")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2])
