"""The rank itself: runs scenarios that the controller names, and between them serves its engine's remote calls.

Everything happens in this process' one main thread, serially, as in a vLLM worker: a broadcast that blocks, blocks the rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import zmq

from harness.world.deadline import Deadline
from harness.world.files import WorldFiles
from harness.world.position import PositionLog
from harness.world.rpc import Server
from harness.world.wire import Done, Go, Problem, RankReady, Reached, Start, Topology, decode, encode


class FreezeNotLifted(RuntimeError):
    """A rank stood at a freeze point and the test never let it go."""


class RankContext:
    """What a scenario function gets as its first argument. `state` is the rank's own memory from scenario to scenario."""

    def __init__(self, files: WorldFiles, rank: int) -> None:
        self.files = files
        self.rank = rank
        self.topology: Topology = files.read_topology()
        self.position = PositionLog(files.position(rank))
        self.state: dict[str, Any] = {}
        self.server: Server | None = None
        self._run = -1
        self._link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._link.setsockopt(zmq.IDENTITY, f"rank{rank}".encode())
        self._link.connect(files.hub)

    @property
    def is_trainer(self) -> bool:
        return self.rank < self.topology.trainers

    @property
    def engine(self) -> int:
        """Index of this receiver's engine."""
        return self.rank - self.topology.trainers

    def serve(self, target: Any, before: Callable[[str], None] | None = None) -> str:
        """From now on answer remote calls with `target`'s methods; returns the address. `before` as in `Server`."""
        if self.server is None:
            # Its own address: what was sent to a process that died must not reach the one in its place.
            self.server = Server(f"{self.files.engine(self.engine)}.{os.getpid()}", self.position, before)
        self.server.target = target
        return self.server.address

    def freeze(self, point: str, *, timeout_s: float) -> None:
        """Tell the controller that `point` is reached, and stand still until it says go."""
        self.position.note(f"freeze {point}", waiting_for=f"go at the freeze point {point!r}")
        self._link.send(encode(Reached(self._run, self.rank, point)))
        if not self._link.poll(Deadline.after(timeout_s).left_ms):
            raise FreezeNotLifted(f"rank {self.rank} stood at {point!r} for {timeout_s:g} s; call run.go({point!r})")
        message = decode(self._link.recv())
        if message != Go(point):
            raise FreezeNotLifted(f"rank {self.rank} expected Go({point!r}) at the freeze point, got {message!r}")

    def loop(self) -> None:
        """Serve until the supervisor ends this process; waiting for commands has no deadline, waiting for a result has."""
        self._link.send(encode(RankReady(self.rank, os.getpid())))
        while True:
            poller = zmq.Poller()
            poller.register(self._link, zmq.POLLIN)
            if self.server is not None:
                poller.register(self.server.socket, zmq.POLLIN)
            ready = dict(poller.poll())
            if self.server is not None and self.server.socket in ready:
                self.server.serve_one()
            if self._link in ready:
                message = decode(self._link.recv())
                if isinstance(message, Start):
                    self._link.send(encode(self._scenario(message)))

    def _scenario(self, start: Start) -> Done:
        self._run = start.run
        self.position.restart(start.function)
        try:
            value = resolve(start.function)(self, **start.kwargs)
            done = Done(start.run, self.rank, value)
            encode(done)  # an answer that does not travel is this scenario's error, not the end of the rank
        except Exception as error:
            done = Done(start.run, self.rank, None, Problem.of(error))
        self.position.note(f"done {start.function}" if done.problem is None else f"failed {done.problem.line()}",
                           waiting_for="the next scenario or call")
        return done


def ping(context: RankContext) -> None:
    """The shortest scenario: the rank is there and listens."""


def resolve(function: str) -> Callable[..., Any]:
    """"module:function" -> the function."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def rank_main(files: WorldFiles, rank: int) -> None:
    context = RankContext(files, rank)
    if not context.is_trainer:
        _forget_torchrun()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reaches torchrun's whole process group; it is not an error here
        context.loop()


def _forget_torchrun() -> None:
    """A receiver is its own world of one: vLLM would take torchrun's variables for its own."""
    for name in [*os.environ]:
        if name.startswith("TORCHELASTIC_") or name in {
                "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
                "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}:
            del os.environ[name]


def resources(context: RankContext) -> dict[str, int]:
    """What this process holds open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {"descriptors": len(links), "sockets": sum(link.startswith("socket:") for link in links),
            "threads": len(os.listdir("/proc/self/task"))}
