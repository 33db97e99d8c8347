"""Remote calls between ranks: `handle.method.remote(**kwargs)` as with a Ray actor, over zmq and msgpack.

The caller never blocks: a reference is polled. A peer that dies while it owes an answer ends the reference at once, with an
error; the kernel says so, no message is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from harness.world.position import PositionLog
from harness.world.process import Life
from harness.world.wire import Problem, Reply, Request, decode, encode


class RemoteCallFailed(RuntimeError):
    """The remote method raised. `problem` has its type, text and traceback."""

    def __init__(self, name: str, method: str, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.line())
        self.add_note(f"remote traceback of {method} in {name}:\n{problem.traceback}")


class PeerDied(RuntimeError):
    """The process that owes an answer has ended."""


class Target(msgspec.Struct, frozen=True):
    """How to reach something that answers remote calls; travels to the ranks that call it."""

    name: str
    address: str
    pid: int
    methods: list[str]


class RemoteHandle:
    """Stands for an object in another process. Only the methods it really has exist here."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._calls = _Calls(target)
        self.identity = target.address
        """The same on every rank, so that ranks can compare their engines."""

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_") or name not in self._target.methods:
            raise AttributeError(f"{self._target.name} has no method {name!r}; it has {', '.join(self._target.methods)}")
        return RemoteMethod(self._calls, name)

    def __repr__(self) -> str:
        return f"RemoteHandle({self._target.name}, pid {self._target.pid})"


class RemoteMethod:
    def __init__(self, calls: _Calls, name: str) -> None:
        self._calls = calls
        self._name = name

    def remote(self, **kwargs: Any) -> Reference:
        """Send the call; returns at once."""
        return self._calls.start(self._name, kwargs)


class Reference:
    """An answer that is on its way. Once it is here it stays: `poll` and `result` may be asked again."""

    def __init__(self, calls: _Calls, id: int, method: str) -> None:
        self._calls = calls
        self._id = id
        self._method = method
        self._reply: Reply | None = None

    def poll(self) -> bool:
        """True once the answer is here or can no longer come. Never blocks."""
        if self._reply is None:
            self._reply = self._calls.take(self._id, self._method)
        return self._reply is not None

    def result(self) -> Any:
        """The value, or the remote error. Only after `poll()` is True."""
        name = self._calls.target.name
        if self._reply is None:
            raise RuntimeError(f"{name}.{self._method}: result() before poll() was True")
        if self._reply.problem is None:
            return self._reply.value
        if self._reply.problem.kind == PeerDied.__name__:
            raise PeerDied(self._reply.problem.text)
        raise RemoteCallFailed(name, self._method, self._reply.problem)


class _Calls:
    """The socket of one handle, and the answers that have come and were not asked for yet."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._ids = itertools.count()
        self._replies: dict[int, Reply] = {}
        self._life = Life(target.pid)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(target.address)

    def start(self, method: str, kwargs: dict[str, Any]) -> Reference:
        id = next(self._ids)
        self._socket.send(encode(Request(id, method, kwargs)))
        return Reference(self, id, method)

    def take(self, id: int, method: str) -> Reply | None:
        """The answer to call `id`, None where it may still come."""
        over = self._life.over()  # asked before the mail is read: what the peer sent before its end still counts
        self._drain()
        if id in self._replies:
            return self._replies.pop(id)
        if not over:
            return None
        target = self.target
        return Reply(id, None, Problem(PeerDied.__name__, f"{target.name} (process {target.pid}) ended while it owed the "
                                                          f"answer to {method}"))

    def _drain(self) -> None:
        while self._socket.poll(0):
            reply = decode(self._socket.recv())
            assert isinstance(reply, Reply), reply
            self._replies[reply.id] = reply


class Server:
    """Answers remote calls with the public methods of `target`, one at a time."""

    def __init__(self, address: str, position: PositionLog | None = None,
                 before: Callable[[str], None] | None = None) -> None:
        """`before` sees every method's name first, and may raise in its place (planted faults)."""
        self.address = address
        self.group: Callable[[], str] = str
        """What the target listens to, for the position log."""
        self._before = before
        self.target: Any = None
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(address)
        self._position = position

    def serve_one(self) -> None:
        caller, frame = self.socket.recv_multipart()
        request = decode(frame)
        assert isinstance(request, Request), request
        self._note(f"handle {request.method}", f"{request.method} to return")
        reply = answer(self.target, request, self._before)
        ending = "done" if reply.problem is None else f"failed {reply.problem.line()}"
        self._note(f"handle.{ending} {request.method}", "the next scenario or call")
        self.socket.send_multipart([caller, encode(reply)])

    def _note(self, event: str, waiting_for: str) -> None:
        if self._position is not None:
            self._position.note(event, waiting_for=waiting_for, group=self.group())


def answer(target: Any, request: Request, before: Callable[[str], None] | None = None) -> Reply:
    """Call the method; its error, or a value that does not travel, becomes the reply's problem."""
    try:
        if request.method not in public_methods(target):
            raise AttributeError(f"{type(target).__name__} has no public method {request.method!r}")
        if before is not None:
            before(request.method)
        reply = Reply(request.id, getattr(target, request.method)(**request.kwargs))
        encode(reply)
        return reply
    except Exception as error:
        return Reply(request.id, None, Problem.of(error))


def public_methods(target: Any) -> Sequence[str]:
    return [name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name))]
