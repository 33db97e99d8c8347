"""Worlds for a whole pytest session: one host, worlds cached by topology, dead and hung ones replaced."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from pathlib import Path

from harness.world.deadline import Deadline
from harness.world.environment import world_environment
from harness.world.host import Ended, HostMessage, Kill, Launch, Launched, Ready, receive, send
from harness.world.nesting import IMPORTS_WITHIN_S
from harness.world.wire import Topology
from harness.world.world import START_WITHIN_S, World, WorldError, make_files

TRAINER_MODULES = ("torch", "harness.world.trainer")
RECEIVER_MODULES = ("torch", "vllm.entrypoints.llm", "staged_sync.vllm.gloo_engine", "harness.world.receiver")
HEAVY = tuple(dict.fromkeys((*TRAINER_MODULES, *RECEIVER_MODULES, "transformers")))
"""What a host imports before the first fork: ranks must not spend their test's time on imports."""

BRIDGE_MODULE = "harness.world.bridge_imports"
"""The same for worlds that export through bridges; last, since it comes after Megatron."""

_ANSWER_WITHIN_S = 5.0
"""A cached world that takes longer than this to say that it is there is replaced."""

_ROOT = Path(__file__).resolve().parents[2]


class HostProcess:
    """The controller's end of `python -m harness.world.host`."""

    def __init__(self, modules: tuple[str, ...] = HEAVY) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, str] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.world.host", "--fd", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=_ROOT, env=world_environment(),
                start_new_session=True)  # Ctrl-C goes to the controller alone, which then ends its worlds in order
        self._ready = False

    def launch(self, world: World) -> Launcher:
        """Fork a launcher for `world`."""
        if not self._ready:
            self._expect(Ready, Deadline.after(IMPORTS_WITHIN_S), "import torch, Megatron and vLLM")
            self._ready = True
        send(self._sock, Launch(str(world.files.directory)))
        launched = self._expect(Launched, Deadline.after(START_WITHIN_S), "fork a world")
        assert isinstance(launched, Launched)
        return Launcher(self, launched.pid)

    def kill(self, launcher_pid: int) -> None:
        send(self._sock, Kill(launcher_pid))

    def ended(self, launcher_pid: int, deadline: Deadline) -> bool:
        """Whether that launcher, and with it its world, has ended before the deadline."""
        while launcher_pid not in self._ended and self._receive(deadline) is not None:
            pass
        return launcher_pid in self._ended

    def close(self) -> None:
        """The host leaves when its socket is closed, and takes what is left of its worlds with it."""
        self._sock.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def _expect(self, kind: type[HostMessage], deadline: Deadline, what: str) -> HostMessage:
        while True:
            message = self._receive(deadline)
            if isinstance(message, kind):
                return message
            if message is None:
                code = self._process.poll()
                state = "is still running" if code is None else f"ended with exit code {code}"
                raise WorldError(f"the world host did not {what} within {deadline.limit_s:g} s; it {state}. "
                                 "Its messages are in this process' stderr")

    def _receive(self, deadline: Deadline) -> HostMessage | None:
        """The next message; None at the deadline or when the host is gone."""
        if not select.select([self._sock], [], [], deadline.left_s)[0]:
            return None
        message = receive(self._sock)
        if isinstance(message, Ended):
            self._ended[message.pid] = message.how
        return message


class Launcher:
    """The process that one world hangs on."""

    def __init__(self, host: HostProcess, pid: int) -> None:
        self._host = host
        self.pid = pid

    def wait(self, deadline: Deadline) -> bool:
        return self._host.ended(self.pid, deadline)

    def kill(self) -> None:
        self._host.kill(self.pid)
        if not self.wait(Deadline.after(5)):
            raise WorldError(f"launcher {self.pid} was still there 5 s after SIGKILL")


MOST_WORLDS = 3
"""Kept alive at once: an idle rank wakes a hundred times a second for each of its thirty gloo groups, which slows all others."""


class WorldPool:
    """`get` a world of some topology: the cached one where it is fit, a new one otherwise, in place of the one that was not asked
    for the longest."""

    def __init__(self, modules: tuple[str, ...] = HEAVY, root: Path | None = None) -> None:
        """`root` is where worlds have their files; those of a world that did not end well stay there."""
        self._modules = modules
        self._root = root
        self._host: HostProcess | None = None
        self._worlds: dict[Topology, World] = {}  # the one asked for last comes last

    def get(self, topology: Topology) -> World:
        world = self._worlds.pop(topology, None)
        if world is not None and not world.responsive(Deadline.after(_ANSWER_WITHIN_S)):
            world.close()
            world = None
        while len(self._worlds) >= MOST_WORLDS:
            self._worlds.pop(next(iter(self._worlds))).close()
        self._worlds[topology] = world = world or self._start(topology)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        if self._host is not None:
            self._host.close()
            self._host = None

    def _start(self, topology: Topology) -> World:
        if self._host is None:
            self._host = HostProcess(self._modules)
        world = World(topology, make_files(topology, self._root))
        try:
            world.process = self._host.launch(world)
            world.wait_ready(Deadline.after(START_WITHIN_S))
        except BaseException:
            world.clean = False
            world.close()
            raise
        return world
