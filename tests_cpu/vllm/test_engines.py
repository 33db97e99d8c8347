"""Engine descriptions, the local handle, and how an abandoned session is recognised."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from staged_sync.engines.info import EngineInfo, EngineInfoError
from staged_sync.engines.local import LocalHandle
from staged_sync.errors import EngineError
from staged_sync.vllm import abandon

DESCRIPTION: dict[str, Any] = {"vllm_version": "0.32.0", "backend": "gloo", "workers": 4, "packed_in": "init",
                               "weight_version": "7", "paused": False, "session_open": False}


def test_a_description_travels_as_a_dict() -> None:
    info = EngineInfo.from_dict(DESCRIPTION)
    assert (info.workers, info.weights_complete, info.group_name) == (4, True, None)
    assert EngineInfo.from_dict({**info.as_dict(), "of a newer engine": 1}) == info


@pytest.mark.parametrize(("change", "text"), [
    ({"workers": "4"}, "'workers' must be int, got '4'"),
    ({"workers": True}, "'workers' must be int, got True"),
    ({"workers": 0}, "'workers' must be at least 1, got 0"),
    ({"backend": "rdma"}, "'backend' must be 'gloo' or 'nccl', got 'rdma'"),
    ({"packed_in": "both"}, "'packed_in' must be 'init' or 'update', got 'both'"),
    ({"paused": 0}, "'paused' must be bool, got 0"),
    ({"packed": "yes"}, "'packed' must be bool or NoneType, got 'yes'"),
])
def test_what_is_wrong_in_a_description_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineInfoError, match=text):
        EngineInfo.from_dict({**DESCRIPTION, **change})


def test_all_that_is_wrong_comes_in_one_error() -> None:
    with pytest.raises(EngineInfoError) as caught:
        EngineInfo.from_dict({"workers": None, "backend": 3})
    assert str(caught.value).splitlines()[1:] == [
        "  - 'vllm_version' is missing", "  - 'packed_in' is missing", "  - 'weight_version' is missing",
        "  - 'paused' is missing", "  - 'session_open' is missing", "  - 'backend' must be str, got 3",
        "  - 'workers' must be int, got None"]


def test_a_description_is_a_dict() -> None:
    with pytest.raises(EngineInfoError, match="must answer a dict, got None"):
        EngineInfo.from_dict(None)


class Recorder:
    """An engine whose first call waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[tuple[str, str]] = []

    def slow(self, name: str) -> str:
        assert self.go.wait(20)
        return self.quick(name)

    def quick(self, name: str) -> str:
        self.calls.append((name, threading.current_thread().name))
        return name.upper()

    def broken(self) -> None:
        raise KeyError("gone")


def test_calls_return_at_once_and_run_in_order_in_one_thread() -> None:
    recorder = Recorder()
    handle = LocalHandle(recorder, name="engine 0")
    first, second = handle.slow.remote(name="a"), handle.quick.remote(name="b")
    assert not first.poll() and not second.poll()
    recorder.go.set()
    assert (second.result(20), first.poll(), first.result()) == ("B", True, "A")
    assert recorder.calls == [("a", "staged-sync engine 0"), ("b", "staged-sync engine 0")]
    assert handle.shut_down(timeout_s=20)
    with pytest.raises(RuntimeError, match="shut down"):
        handle.quick.remote(name="c")


def test_an_error_belongs_to_its_call_and_the_handle_goes_on() -> None:
    handle = LocalHandle(Recorder())
    with pytest.raises(KeyError, match="gone"):
        handle.broken.remote().result(20)
    assert handle.quick.remote(name="x").result(20) == "X"
    assert handle.shut_down(timeout_s=20)


def test_a_handle_knows_what_its_engine_can_do() -> None:
    handle = LocalHandle(Recorder())
    assert hasattr(handle, "quick")
    assert not hasattr(handle, "update_weight_version")
    assert not hasattr(handle, "calls")
    assert handle.shut_down(timeout_s=20)


REJECTED = ValueError("`dtype_names` should be of the same size as `names`: got 0 and 1")
NO_SESSION = RuntimeError("start_weight_update must be called before update_weights.")


def wrapped(error: Exception) -> Exception:
    outer = EngineError(0, abandon.METHOD, "it raised")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize("outcome", [REJECTED, NO_SESSION, wrapped(REJECTED), EngineError(0, "update", str(REJECTED))])
def test_rejected_as_expected(outcome: Exception) -> None:
    assert abandon.objection(outcome) is None


@pytest.mark.parametrize(("outcome", "text"), [
    (None, "accepted an update that it should have rejected"),
    ({"success": True}, "its state is unknown"),
    (ConnectionError("engine died"), "could not be abandoned: ConnectionError: engine died"),
])
def test_everything_else_is_an_objection(outcome: Any, text: str) -> None:
    objection = abandon.objection(outcome)
    assert objection is not None and text in objection


def test_the_request_is_what_every_vllm_rejects() -> None:
    request = abandon.request()
    assert len({len(request[key]) for key in ("names", "dtypes", "shapes")}) > 1
    assert abandon.is_request(request["names"])
    assert not abandon.is_request(["model.norm.weight"])
