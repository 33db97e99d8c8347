"""The stock NCCL path against the installed vLLM's signatures: no GPU has run it here, but nothing in it is guessed."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from staged_sync.errors import DeadlineExceeded, TransportError
from staged_sync.seam import Wire
from staged_sync.vllm import nccl
from staged_sync.vllm.rendezvous import listen
from tests_gpu.vllm.source import wait

pytestmark = pytest.mark.beyond_main_job

UNPACKED = Wire("nccl", packed=False, packed_buffer_size_bytes=8)
PACKED = Wire("nccl", packed=True, packed_buffer_size_bytes=8)
CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, vllm_cpu: None) -> Iterator[SimpleNamespace]:
    """Stand-ins with the installed vLLM's signatures for what needs a GPU; a call that does not fit raises TypeError."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl

    communicator = mock.create_autospec(pynccl.PyNcclCommunicator, instance=True)
    communicator.disabled, communicator.available, communicator.device = False, True, CPU
    made = mock.create_autospec(pynccl.PyNcclCommunicator, return_value=communicator)
    store = mock.Mock(side_effect=take)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", made)
    monkeypatch.setattr(utils, "StatelessProcessGroup", mock.create_autospec(utils.StatelessProcessGroup))
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    monkeypatch.setattr(nccl, "_current_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "stream")
    passed = threading.Event()  # whether the device has come to the events that were recorded
    passed.set()
    monkeypatch.setattr(torch.cuda, "Event", lambda: mock.Mock(query=passed.is_set))
    yield SimpleNamespace(communicator=communicator, made=made, store=store, group=utils.StatelessProcessGroup, passed=passed)


def take(*args: Any, master_listen_fd: int, **kwargs: Any) -> Any:
    """Like a real store: the descriptor is its own."""
    with socket.socket(fileno=master_listen_fd) as taken:
        return SimpleNamespace(port=taken.getsockname()[1])


def open_group(wire: Wire, *, timeout_s: float = 7.5) -> nccl.NcclTransferGroup:
    listener = listen("127.0.0.1", None)
    group: nccl.NcclTransferGroup = wait(
        nccl.open_nccl_group(listener, name="vime-pp_0", world_size=3, wire=wire, timeout_s=timeout_s))[0]
    listener.close()
    return group


def test_the_group_is_made_on_the_listening_socket(no_gpu: SimpleNamespace) -> None:
    open_group(UNPACKED)
    (host, port, world_size, is_master, timeout), _ = no_gpu.store.call_args
    assert (host, world_size, is_master, timeout) == ("127.0.0.1", 3, True, timedelta(seconds=7.5))
    options = no_gpu.group.call_args.kwargs
    assert (options["rank"], options["world_size"], options["store"].port) == (0, 3, port)
    assert no_gpu.made.call_args == mock.call(no_gpu.group.return_value, device=CPU)


def test_unpacked_sends_every_tensor_from_rank_0(no_gpu: SimpleNamespace) -> None:
    tensors = [torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)]
    work = open_group(UNPACKED).send(tensors)
    sent = no_gpu.communicator.broadcast.call_args_list
    assert [call.args[0] for call in sent] == tensors
    assert all(call.kwargs == {"src": 0, "stream": "stream"} for call in sent)
    assert work.poll()


def test_packed_sends_the_chunks_that_vllm_expects(no_gpu: SimpleNamespace) -> None:
    open_group(PACKED).send([torch.ones(2), torch.ones(1), torch.zeros(1)])
    assert [call.args[0].numel() for call in no_gpu.communicator.broadcast.call_args_list] == [12, 4]


@pytest.mark.parametrize("wire", [UNPACKED, PACKED], ids=["unpacked", "packed"])
def test_what_is_being_sent_lives_until_the_device_has_passed_it_and_no_longer(no_gpu: SimpleNamespace, wire: Wire) -> None:
    """A broadcast is only enqueued when it returns: memory that was given back would be sent as somebody else's bytes."""
    sent: list[weakref.ref[torch.Tensor]] = []

    def broadcast(buffer: torch.Tensor, src: int, stream: Any) -> None:
        sent.append(weakref.ref(buffer))

    group = open_group(wire)
    # Not the fixture's: a mock keeps its arguments.
    group._communicator = SimpleNamespace(broadcast=broadcast, device=CPU, disabled=False, available=True)
    no_gpu.passed.clear()
    first, second = group.send([torch.ones(2), torch.ones(1)]), group.send([torch.zeros(4)])
    assert not first.poll() and not second.poll()
    assert len(sent) == (3 if wire is UNPACKED else 2) and all(buffer() is not None for buffer in sent)
    del second  # the group itself keeps what is on its way
    assert all(buffer() is not None for buffer in sent)
    no_gpu.passed.set()
    assert first.poll()
    assert [buffer() is None for buffer in sent] == [True] * (len(sent) - 1) + [False], "a bucket that is through gives back"
    group.send([torch.ones(1)])
    assert [buffer() is None for buffer in sent] == [True] * (len(sent) - 1) + [False], "and so do those that nobody polls"


def test_packed_refuses_what_vllm_cannot_unpack(no_gpu: SimpleNamespace) -> None:
    with pytest.raises(TransportError, match=r"tensor\(s\) 1 of the bucket would begin at offsets"):
        open_group(PACKED).send([torch.ones(1, dtype=torch.bfloat16), torch.ones(1)])
    no_gpu.communicator.broadcast.assert_not_called()


def test_strided_tensors_are_refused(no_gpu: SimpleNamespace) -> None:
    with pytest.raises(TransportError, match="NCCL would read past it"):
        open_group(UNPACKED).send([torch.ones(4, 4).t()[1:]])


def test_close_destroys_once_and_use_after_close_raises(no_gpu: SimpleNamespace) -> None:
    group = open_group(UNPACKED)
    group.close(timeout_s=1)
    group.close(timeout_s=1)
    no_gpu.communicator.destroy.assert_called_once_with()
    with pytest.raises(TransportError, match="closed"):
        group.send([torch.ones(1)])


@pytest.mark.parametrize("raises", [False, True])
def test_a_broadcast_that_blocks_while_it_is_enqueued_is_aborted(no_gpu: SimpleNamespace, raises: bool) -> None:
    aborted = threading.Event()

    def block(*args: Any, **kwargs: Any) -> None:
        assert aborted.wait(20)
        if raises:
            raise RuntimeError("NCCL error: communicator was aborted")

    no_gpu.communicator.broadcast.side_effect = block
    no_gpu.communicator.destroy.side_effect = lambda: aborted.set()
    group = open_group(UNPACKED, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"'vime-pp_0': NCCL did not take a bucket within 0\.2 s"):
        group.send([torch.ones(1)])


def test_an_error_of_nccl_is_its_own(no_gpu: SimpleNamespace) -> None:
    no_gpu.communicator.broadcast.side_effect = RuntimeError("NCCL error: unhandled system error")
    with pytest.raises(RuntimeError, match="unhandled system error"):
        open_group(UNPACKED).send([torch.ones(1)])
    no_gpu.communicator.destroy.assert_not_called()


@pytest.mark.parametrize("attributes", [{"disabled": True}, {"available": False}])
def test_a_communicator_that_would_do_nothing_is_an_error(no_gpu: SimpleNamespace, attributes: dict[str, bool]) -> None:
    """vLLM's PyNcclCommunicator disables itself without NCCL; its broadcast then returns at once, and says nothing."""
    group = open_group(UNPACKED)
    no_gpu.communicator.configure_mock(**attributes)
    with pytest.raises(TransportError, match="cannot move bytes"):
        group.send([torch.ones(1)])
    with pytest.raises(TransportError, match="cannot move bytes"):
        open_group(UNPACKED)


def test_a_late_communicator_is_destroyed(no_gpu: SimpleNamespace) -> None:
    release, destroyed = threading.Event(), threading.Event()
    no_gpu.store.side_effect = lambda *args, **kwargs: release.wait(20) and take(*args, **kwargs)
    no_gpu.communicator.destroy.side_effect = lambda: destroyed.set()
    listener = listen("127.0.0.1", None)
    dial = nccl.open_nccl_group(listener, name="vime-pp_0", world_size=3, wire=UNPACKED, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"'vime-pp_0': not all workers .* dial 127\.0\.0\.1:\d+"):
        wait(dial)
    release.set()
    assert destroyed.wait(20)


def test_without_cuda_it_is_refused_at_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with closing(listen("127.0.0.1", None)) as listener, pytest.raises(TransportError, match="needs CUDA"):
        nccl.open_nccl_group(listener, name="g", world_size=2, wire=UNPACKED, timeout_s=1)


def test_vllms_own_worker_meets_us_and_the_missing_nccl_is_an_error(vllm_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not mocked: the real store on our socket, joined the way vLLM's worker does it; then PyNccl disables itself, loudly."""
    from vllm.distributed.utils import StatelessProcessGroup

    monkeypatch.setattr(nccl, "_current_device", lambda: CPU)
    listener = listen("127.0.0.1", None)
    dial = nccl.open_nccl_group(listener, name="real", world_size=2, wire=UNPACKED, timeout_s=10)
    joined: list[Any] = []
    worker = threading.Thread(target=lambda: joined.append(
        StatelessProcessGroup.create(host=listener.host, port=listener.port, rank=1, world_size=2, store_timeout=10)))
    worker.start()
    with pytest.raises(TransportError, match="1 workers at .* cannot move bytes"):
        wait(dial)
    worker.join(20)
    assert joined and joined[0].rank == 1


def test_a_missing_vllm_worker_is_a_deadline(vllm_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_current_device", lambda: CPU)
    dial = nccl.open_nccl_group(listen("127.0.0.1", None), name="real", world_size=2, wire=UNPACKED, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="not all workers have joined over NCCL within 0.5 s"):
        wait(dial)
    with pytest.raises(torch.distributed.DistStoreError, match="1/2 clients joined"):
        dial._meeting.result(timeout=20)  # the helper thread ends by itself
