"""`.method.remote(**kwargs)` around a plain object: for examples, tests and single-process use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_STOP = object()


class LocalHandle:
    """Calls `target`'s methods one after the other in one worker thread, like a vLLM worker's queue.

    `handle.<method>.remote(**kwargs)` returns a `LocalCall` at once. A method that `target` lacks is an AttributeError here,
    so that `hasattr(handle, name)` tells what the engine can do.
    """

    def __init__(self, target: Any, *, name: str = "engine") -> None:
        self._target = target
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon: an engine that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"staged-sync {name}", daemon=True)
        self._thread.start()

    def __getattr__(self, method: str) -> RemoteMethod:
        if method.startswith("_") or not callable(getattr(self._target, method, None)):
            raise AttributeError(f"{type(self._target).__name__} has no method {method!r}")
        return RemoteMethod(self._submit, method)

    def shut_down(self, *, timeout_s: float) -> bool:
        """Take no more calls, finish those that wait; whether that was done within `timeout_s`."""
        self._calls.put(_STOP)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, method: str, kwargs: dict[str, Any]) -> LocalCall:
        if not self._thread.is_alive():
            raise RuntimeError(f"the handle of this {type(self._target).__name__} is shut down")
        future: Future[Any] = Future()
        self._calls.put((future, method, kwargs))
        return LocalCall(future)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not _STOP:
            future, method, kwargs = call
            try:
                future.set_result(getattr(self._target, method)(**kwargs))
            except BaseException as error:  # whatever it is belongs to the caller, and the queue must go on
                future.set_exception(error)
            del call, future, kwargs


class RemoteMethod:
    """One method of a `LocalHandle`."""

    def __init__(self, submit: Callable[[str, dict[str, Any]], LocalCall], method: str) -> None:
        self._submit = submit
        self._method = method

    def remote(self, **kwargs: Any) -> LocalCall:
        """Queue the call; returns at once."""
        return self._submit(self._method, kwargs)


class LocalCall:
    """A call under way (a `Work`)."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def poll(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float = 0.0) -> Any:
        """What the method returned, or raises what it raised. Raises TimeoutError where it has not ended in `timeout_s`."""
        return self._future.result(timeout_s)
