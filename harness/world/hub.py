"""The controller's end of the control plane: one socket for all ranks and supervisors, pumped in the caller's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq

from harness.world.deadline import Deadline
from harness.world.files import WorldFiles
from harness.world.rpc import Target, answer, public_methods
from harness.world.wire import (
    ChildEnded,
    Done,
    Go,
    Message,
    Problem,
    RankReady,
    Reached,
    Request,
    Signalled,
    Snapshot,
    Start,
    Supervising,
    TakeSnapshot,
    Topology,
    decode,
    encode,
)


@dataclass(slots=True)
class RankState:
    """What the controller knows of one rank."""

    rank: int
    supervisor_pid: int = 0
    child_pid: int = 0
    ready: bool = False
    ended: str = ""
    last_words: str = ""
    """The end of the log of a child that has ended."""

    @property
    def alive(self) -> bool:
        """Both have said hello: what is said to somebody who has not is lost."""
        return self.ready and self.supervisor_pid != 0 and not self.ended

    def starts_anew(self) -> None:
        self.ready, self.supervisor_pid, self.ended, self.last_words = False, 0, "", ""


@dataclass(slots=True)
class Lock:
    """The rollout engines' lock, as a Ray actor would be: `acquire` returns a bool and never waits."""

    held: bool = False

    def acquire(self) -> bool:
        taken, self.held = not self.held, True
        return taken

    def release(self) -> None:
        self.held = False


@dataclass(slots=True)
class Outcome:
    """How a scenario ended on one rank."""

    rank: int
    value: Any = None
    problem: Problem | None = None


@dataclass(slots=True)
class RunState:
    """One scenario under way."""

    id: int
    function: str
    pending: set[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    reached: set[tuple[int, str]] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        return any(outcome.problem is not None for outcome in self.outcomes.values())


class Hub:
    """Sends commands, collects results; `pump` does all the work, so nothing happens behind the caller's back."""

    def __init__(self, files: WorldFiles, topology: Topology) -> None:
        self.ranks = [RankState(rank) for rank in range(topology.world_size)]
        self.lock = Lock()
        self.lock_target = Target("lock", files.hub, os.getpid(), list(public_methods(self.lock)))
        self.run: RunState | None = None
        self.snapshots: dict[int, Snapshot] = {}
        self.signalled: set[tuple[int, int]] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a respawned rank takes over its name
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)  # what is said to the dead is lost, and ChildEnded says so
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(files.hub)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    # --- commands ------------------------------------------------------------------------------------------------------
    def start(self, run: RunState, kwargs: dict[str, Any]) -> None:
        self.run = run
        self.lock.held = False
        for rank in sorted(run.pending):
            self._to_rank(rank, Start(run.id, run.function, kwargs))
        for state in self.ranks:
            if state.ended:
                self._settle_dead(state)

    def go(self, rank: int, point: str) -> None:
        self._to_rank(rank, Go(point))

    def tell_supervisors(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            self._socket.send_multipart([f"supervisor{rank}".encode(), encode(message)])

    def collect_snapshots(self, deadline: Deadline) -> dict[int, Snapshot]:
        """Every rank's stacks and position, taken by the supervisors; those that do not answer in time are left out."""
        self.snapshots.clear()
        self.tell_supervisors(range(len(self.ranks)), TakeSnapshot())
        self.pump(lambda: len(self.snapshots) == len(self.ranks), deadline)
        return dict(self.snapshots)

    def _to_rank(self, rank: int, message: Message) -> None:
        self._socket.send_multipart([f"rank{rank}".encode(), encode(message)])

    # --- the pump ------------------------------------------------------------------------------------------------------
    def pump(self, until: Callable[[], bool], deadline: Deadline) -> bool:
        """Handle messages until `until()` is true; False when the deadline came first."""
        while not until():
            if deadline.expired or not self._socket.poll(deadline.left_ms):
                return until()
            sender, frame = self._socket.recv_multipart()
            self._handle(sender, decode(frame))
        return True

    def _handle(self, sender: bytes, message: Message) -> None:
        match message:
            case Supervising(rank, pid, child_pid):
                state = self.ranks[rank]
                state.supervisor_pid, state.child_pid, state.ended = pid, child_pid, ""
            case RankReady(rank, pid):
                self.ranks[rank].ready = True
            case Reached(run, rank, point) if self.run is not None and self.run.id == run:
                self.run.reached.add((rank, point))
            case Done(run, rank, value, problem) if self.run is not None and self.run.id == run:
                self._settle(Outcome(rank, value, problem))
            case ChildEnded(rank, _, how, log_tail):
                self._child_ended(self.ranks[rank], how, log_tail)
            case Signalled(rank, number, _):
                self.signalled.add((rank, number))
            case Snapshot(rank=rank):
                self.snapshots[rank] = message
            case Request():
                self._socket.send_multipart([sender, encode(answer(self.lock, message))])

    def _settle(self, outcome: Outcome) -> None:
        assert self.run is not None
        self.run.pending.discard(outcome.rank)
        self.run.outcomes[outcome.rank] = outcome

    def _child_ended(self, state: RankState, how: str, log_tail: str) -> None:
        state.ended, state.ready, state.last_words = how, False, log_tail
        self._settle_dead(state)

    def _settle_dead(self, state: RankState) -> None:
        if self.run is not None and state.rank in self.run.pending:
            text = f"process {state.child_pid} of this rank ended with {state.ended}"
            self._settle(Outcome(state.rank, None, Problem("RankDied", text, state.last_words)))
