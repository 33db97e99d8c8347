"""Small truths about processes on Linux: who dies with whom, how one ended, what state one is in."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent ends, however it ends: no rank outlives its world, even after a SIGKILL further up.

    `parent_pid` as the parent saw itself before forking: had it ended already, the kernel would never send the signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def require_single_thread(what: str) -> None:
    """Forking a process with threads copies locks that nobody will ever release."""
    threads = [entry.name for entry in Path("/proc/self/task").iterdir()]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in threads]
    if len(names) != 1:
        raise RuntimeError(f"{what} must have one thread when it forks ranks; found {len(names)}: {', '.join(names)}. "
                           "Set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1, and import nothing that starts threads")


def how_it_ended(wait_status: int) -> str:
    """`exit code 3`, or `signal SIGKILL`."""
    code = os.waitstatus_to_exitcode(wait_status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def state_of(pid: int) -> str:
    """The kernel's word for what a process does: running, sleeping, stopped (SIGSTOP), zombie, ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    state = next(line for line in lines if line.startswith("State:"))
    return state.split("(")[1].rstrip(")")


_SETTLES_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.001


def settled_state(pid: int, number: int) -> str:
    """What the process does once signal `number` has had its effect, or after two seconds. The kernel delivers SIGSTOP,
    SIGCONT and SIGKILL when it pleases, and only /proc tells."""
    ends_s = time.monotonic() + _SETTLES_WITHIN_S
    while not _has_effect(state_of(pid), number) and time.monotonic() < ends_s:
        select.select([], [], [], _LOOK_EVERY_S)
    return state_of(pid)


def _has_effect(state: str, number: int) -> bool:
    match number:
        case signal.SIGSTOP:
            return state in ("stopped", "zombie", "ended")
        case signal.SIGCONT:
            return state != "stopped"
        case signal.SIGKILL:
            return state in ("zombie", "ended")
        case _:
            return True


class Life:
    """Tells whether a process on this host still lives, in one system call and without asking it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def over(self) -> bool:
        """True also for a zombie, and for ever after. Never blocks."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """True once it has ended, False where that takes longer than `timeout_s`."""
        if self._fd is not None and select.select([self._fd], [], [], timeout_s)[0]:
            self.close()
        return self._fd is None

    def fileno(self) -> int:
        """For pollers: readable once the process has ended."""
        if self._fd is None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def tail(path: Path, limit_bytes: int = 16_000) -> str:
    """The end of a log file, empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
