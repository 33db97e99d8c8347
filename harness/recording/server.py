"""A serial queue of blocking calls behind duck-typed handles: what an engine and a lock look like from a trainer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from harness.recording.kernel import IDLE, Kernel, Waiting


class ServerDied(RuntimeError):
    """What every open and later reference to a dead server ends with (Ray: `RayActorError`)."""


@dataclass(slots=True, eq=False)
class Reference:
    """The reply of one call, once there is one: Ray's object reference, and a `Work` to the library."""

    label: str
    kernel: Kernel = field(repr=False)
    thing: str = ""
    done: bool = False
    value: Any = None
    error: BaseException | None = None

    def ended(self) -> bool:
        """`poll`, asked by the kernel and not by a task."""
        return self.done

    def failed(self) -> bool:
        return self.error is not None

    def poll(self) -> bool:
        self.kernel.touch(self.thing, "await" if self.done else "peek")
        return self.done

    def result(self) -> Any:
        if not self.done:
            raise RuntimeError(f"the result of {self.label} was asked for before poll() was True: a real seam would block")
        if self.error is not None:
            raise self.error
        return self.value

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self.done:
            self.kernel.touch(self.thing, "fail" if error is not None else "set")
            self.done, self.value, self.error = True, value, error


@dataclass(slots=True, eq=False)
class Call:
    method: str
    arguments: dict[str, Any]
    reference: Reference


class Server:
    """Takes up one call after the other, in order of arrival, each to its end. Subclasses name their `methods`."""

    methods: frozenset[str] = frozenset()

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.dead = False
        self.handle = Handle(self)
        self._queue: deque[Call] = deque()
        self._open: list[Reference] = []
        self._task = kernel.spawn(name, self._serve, daemon=True)

    def submit(self, method: str, arguments: dict[str, Any]) -> Reference:
        self.kernel.give_way()
        reference = Reference(f"{method} of {self.name}", self.kernel, self.kernel.christen())
        if self.dead:
            reference.settle(error=ServerDied(f"{self.name} is dead"))
        else:
            call = Call(method, arguments, reference)
            self.kernel.touch((self.name, "queue"), "enqueue")
            self.kernel.touch((reference.thing, "sent"), "set")
            self._open.append(reference)
            self._queue.append(call)
        return reference

    def kill(self) -> None:
        """The process ends: nothing more is handled, everybody who waits for a reply learns it."""
        self.dead = True
        for reference in self._open:
            reference.settle(error=ServerDied(f"{self.name} died"))
        self._queue.clear()

    def perform(self, call: Call) -> Any:
        """Handle one call; subclasses add events and faults around `getattr`."""
        return getattr(self, call.method)(**call.arguments)

    def stop_answering(self) -> None:
        """Never come back from the current call (a stopped process, a lost network)."""
        self.kernel.wait(_never, Waiting("nothing: it never answers", self.name))

    def _serve(self) -> None:
        while not self.dead:
            self.kernel.wait(self._queue.__len__, IDLE)
            if self._queue:
                self._handle(self._queue.popleft())

    def _handle(self, call: Call) -> None:
        self.kernel.touch((call.reference.thing, "sent"), "await")
        try:
            call.reference.settle(self.perform(call))
        except Exception as error:  # a server's exception is its reply
            call.reference.settle(error=error)
        self._open = [reference for reference in self._open if not reference.done]


class Handle:
    """`handle.<method>.remote(**kwargs)` for the methods the server has; an AttributeError for every other name."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, method: str) -> RemoteMethod:
        if method.startswith("_") or method not in self._server.methods:
            raise AttributeError(f"{self._server.name} has no method {method!r}")
        return RemoteMethod(self._server, method)

    def __repr__(self) -> str:
        return f"<handle of {self._server.name}>"


@dataclass(slots=True, eq=False)
class RemoteMethod:
    server: Server
    method: str

    def remote(self, **arguments: Any) -> Reference:
        return self.server.submit(self.method, arguments)


def _never() -> bool:
    return False
