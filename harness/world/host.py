"""The host: one process per pytest session that imports the heavy modules once and forks worlds on command.

    python -m harness.world.host --fd N torch megatron.core vllm

Importing torch, Megatron and vLLM takes ten seconds per process on two cores; forked after one import, a world of any size
starts in half a second. The host itself never starts a thread and never touches a CUDA device: both do not survive a fork.
"""

from __future__ import annotations

import argparse
import importlib
import os
import selectors
import signal
import socket
from pathlib import Path

import msgspec

from harness.world.process import Life, how_it_ended, require_single_thread


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The imports are done."""

    pid: int


class Launch(msgspec.Struct, tag=True, frozen=True):
    """Start the world whose files are in `directory`."""

    directory: str


class Launched(msgspec.Struct, tag=True, frozen=True):
    pid: int


class Kill(msgspec.Struct, tag=True, frozen=True):
    """Kill the launcher `pid`; its world goes with it."""

    pid: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    pid: int
    how: str


HostMessage = Ready | Launch | Launched | Kill | Ended


def send(sock: socket.socket, message: HostMessage) -> None:
    sock.send(msgspec.msgpack.encode(message))


def receive(sock: socket.socket) -> HostMessage | None:
    """None when the other end is gone."""
    frame = sock.recv(65536)
    return msgspec.msgpack.decode(frame, type=HostMessage) if frame else None


class Host:
    """Forks launchers and reports how they ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._launchers: dict[int, Life] = {}

    def serve(self) -> None:
        """Until the controller is gone. Has no deadline of its own: waiting for commands is what it is for."""
        send(self._sock, Ready(os.getpid()))
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._sock:
                    message = receive(self._sock)
                    if message is None:
                        return
                    self._handle(message)
                else:
                    self._reap(key.data)

    def _handle(self, message: HostMessage) -> None:
        match message:
            case Launch(directory):
                self._launch(Path(directory))
            case Kill(pid) if pid in self._launchers:
                os.kill(pid, signal.SIGKILL)

    def _launch(self, directory: Path) -> None:
        from harness.world.launcher import launch

        require_single_thread("the world host")
        host_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._sock.close()
            launch(directory, host_pid)
        self._launchers[pid] = Life(pid)
        self._selector.register(self._launchers[pid], selectors.EVENT_READ, pid)
        send(self._sock, Launched(pid))

    def _reap(self, pid: int) -> None:
        life = self._launchers.pop(pid)
        self._selector.unregister(life)
        life.close()
        _, status = os.waitpid(pid, 0)
        send(self._sock, Ended(pid, how_it_ended(status)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the controller")
    parser.add_argument("modules", nargs="*", help="modules to import before the first fork")
    options = parser.parse_args()
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    for module in ("harness.world.launcher", "harness.world.rank", *options.modules):
        importlib.import_module(module)
    Host(sock).serve()
    os._exit(0)  # taking heavy modules apart takes seconds and helps nobody; launchers die with this process


if __name__ == "__main__":
    # Under `-m` this file is `__main__`; the launcher and the tests know the same classes as `harness.world.host`.
    importlib.import_module("harness.world.host").main()
