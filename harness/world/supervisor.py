"""The supervisor: what torchrun believes to be a rank. Its only child is the rank, and it stays when the child is gone.

It takes a snapshot of a child that hangs without the child's help: faulthandler answers a signal from C, into a pipe, even
while the rank sits in a collective; the position comes from the rank's log file.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import zmq

from harness.world.deadline import Deadline
from harness.world.files import WorldFiles
from harness.world.position import as_dicts, read_log
from harness.world.process import Life, die_with_parent, how_it_ended, settled_state, state_of, tail
from harness.world.wire import (
    ChildEnded,
    End,
    Message,
    Respawn,
    Signal,
    Signalled,
    Snapshot,
    Supervising,
    TakeSnapshot,
    decode,
    encode,
)

STACK_SIGNAL = signal.SIGUSR2
"""SIGUSR1 is vLLM's, SIGALRM is pytest-timeout's."""

_STACKS_WITHIN_S = 3.0
_QUIET_S = 0.2
"""faulthandler writes all threads in one burst and no end mark; this long without a byte is the end."""


def supervise(files: WorldFiles, rank: int) -> None:
    """Fork the rank and stand by it until told to end."""
    supervisor = Supervisor(files, rank)
    supervisor.spawn()
    supervisor.serve()


class Supervisor:
    def __init__(self, files: WorldFiles, rank: int) -> None:
        self._files = files
        self._rank = rank
        self._child: Life | None = None
        self._child_pid = 0
        self._stack_pipe = -1

    def spawn(self) -> None:
        """Fork the rank. Only while no zmq context is open: its threads would not survive in the child."""
        supervisor_pid = os.getpid()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            run_child(self._files, self._rank, supervisor_pid, write_end)
        os.close(write_end)
        if self._stack_pipe >= 0:
            os.close(self._stack_pipe)
        self._stack_pipe = read_end
        self._child, self._child_pid = Life(pid), pid

    def serve(self) -> None:
        """Until `End`. No deadline: the launcher's death ends this process (die_with_parent)."""
        while self._serve_one_child():
            self.spawn()

    def _serve_one_child(self) -> bool:
        """True when a new child is asked for, False when told to end."""
        with _hub_link(self._files, self._rank) as link:
            _send(link, Supervising(self._rank, os.getpid(), self._child_pid))
            while True:
                if self._wait(link):
                    message = decode(link.recv())
                    if isinstance(message, Respawn | End):
                        self._end_child()
                        return isinstance(message, Respawn)
                    self._obey(link, message)
                self._report_end(link)

    def _wait(self, link: zmq.Socket[bytes]) -> bool:
        """Block until the hub has said something (True) or the child has ended (False)."""
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        if self._child is not None:
            poller.register(self._child.fileno(), zmq.POLLIN)
        return link in dict(poller.poll())

    def _obey(self, link: zmq.Socket[bytes], message: Message) -> None:
        match message:
            case Signal(number):
                self._signal(number)
                _send(link, Signalled(self._rank, number, settled_state(self._child_pid, number)))
            case TakeSnapshot():
                _send(link, self._snapshot())
            case _:
                raise TypeError(f"a supervisor does not understand {type(message).__name__}")

    def _signal(self, number: int) -> None:
        if self._child is not None and not self._child.over():
            os.kill(self._child_pid, number)

    def _report_end(self, link: zmq.Socket[bytes]) -> None:
        if self._child is not None and self._child.over():
            _send(link, ChildEnded(self._rank, self._child_pid, self._reap(), tail(self._files.log(self._rank))))

    def _end_child(self) -> None:
        if self._child is not None:
            self._signal(signal.SIGKILL)
            self._reap()

    def _reap(self) -> str:
        assert self._child is not None
        _, status = os.waitpid(self._child_pid, 0)
        self._child.close()
        self._child = None
        return how_it_ended(status)

    def _snapshot(self) -> Snapshot:
        state = state_of(self._child_pid) if self._child is not None else "ended"
        return Snapshot(self._rank, self._child_pid, state, self._stacks(state),
                        as_dicts(read_log(self._files.position(self._rank))), tail(self._files.log(self._rank)))

    def _stacks(self, state: str) -> str:
        """The child's Python stacks. A stopped child is woken for it, after its state has been noted."""
        if state == "ended":
            return ""
        self._signal(STACK_SIGNAL)
        self._signal(signal.SIGCONT)
        text, deadline = b"", Deadline.after(_STACKS_WITHIN_S)
        while not deadline.expired:
            quiet = deadline.left_s if not text else _QUIET_S
            if not select.select([self._stack_pipe], [], [], quiet)[0]:
                break
            chunk = os.read(self._stack_pipe, 65536)
            if not chunk:
                break
            text += chunk
        return text.decode(errors="replace") or f"no answer to {STACK_SIGNAL.name} within {_STACKS_WITHIN_S:g} s"


def run_child(files: WorldFiles, rank: int, supervisor_pid: int, stack_pipe: int) -> NoReturn:
    """The rank's whole life, right after the fork."""
    code = 1
    try:
        die_with_parent(supervisor_pid)
        faulthandler.enable(all_threads=True)  # a crash leaves its stack in the rank's log
        faulthandler.register(STACK_SIGNAL, file=stack_pipe, all_threads=True, chain=False)
        from harness.world.rank import rank_main

        rank_main(files, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # neither torchrun's nor the host's forked stack may be unwound in the rank


@contextmanager
def _hub_link(files: WorldFiles, rank: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.setsockopt(zmq.IDENTITY, f"supervisor{rank}".encode())
        link.setsockopt(zmq.LINGER, 1000)
        link.connect(files.hub)
        yield link


def _send(link: zmq.Socket[bytes], message: Message) -> None:
    link.send(encode(message))
