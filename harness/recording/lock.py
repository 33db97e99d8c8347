"""The rollout engine lock: vime's actor with `acquire` (returns a bool, never waits) and `release`."""

from __future__ import annotations

from harness.recording.kernel import Kernel
from harness.recording.server import Server


class StubLock(Server):
    methods = frozenset({"acquire", "release"})

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, "lock")
        self.held = False

    def acquire(self) -> bool:
        if self.held:
            return False
        self.held = True
        return True

    def release(self) -> None:
        if not self.held:
            raise RuntimeError("release of a lock that nobody holds")
        self.held = False
