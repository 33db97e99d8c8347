"""Cooperative tasks on greenlets and a virtual clock: nothing here knows about weights.

A task runs until it waits. When nobody can run, the clock jumps to the nearest deadline (a *stall*: in a healthy protocol
nobody waits for time to pass); when there is no deadline either, that is a `Deadlock`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

from harness.recording.access import Access
from harness.recording.scheduler import Scheduler, round_robin

MAX_STEPS = 1_000_000

MAX_STALLS = 100
"""Of which a run keeps a table: who polls for ever makes thousands."""

MAX_NAPS = 40
"""Where a stall is a deadlock: how often somebody may sleep and look again while nobody else gets on."""


class Deadlock(AssertionError):
    """Nobody can run. `table` says who waits for what, `waits` the same in short, `why` what the clock would bring."""

    def __init__(self, table: str, *, why: str = "no deadline is pending", waits: Sequence[str] = ()) -> None:
        self.table = table
        self.waits = tuple(sorted(waits))
        super().__init__(f"deadlock: nobody can run and {why}\n{table}")


class StepBound(AssertionError):
    """The run took more steps than any protocol needs: somebody polls without waiting (a spin loop)."""


@dataclass(slots=True, eq=False)  # not frozen: made at every wait, and freezing triples the cost
class Waiting:
    """What a task waits for. `missing` is asked only when a report is printed. `for_time`: it wants nothing but time to pass."""

    operation: str
    group: str = ""
    missing: Callable[[], str] = lambda: ""
    for_time: bool = False


IDLE = Waiting("idle")
"""A server without a request: blocked, but waiting for nobody in particular; left out of reports."""


@dataclass(slots=True, eq=False)
class Task:
    """One trainer rank, engine or engine worker. A daemon does not keep a run from ending."""

    index: int
    name: str
    daemon: bool
    thing: str
    function: Callable[[], Any] = field(repr=False)
    greenlet: greenlet | None = field(repr=False)
    """What it runs in; None once it has ended, but for one that died: that stands where it was killed."""
    ready: Callable[[], object] | None = None
    """None: it does not wait, and what follows is over."""
    deadline_s: float = math.inf
    waiting: Waiting = IDLE
    finished: bool = False
    died: bool = False
    result: Any = None
    error: BaseException | None = field(default=None, repr=False)


class Kernel:
    """Runs tasks one at a time. `table` renders the blocked tasks for reports (the world adds positions).

    `preemptive`: a task gives way at every `give_way()`, not only where it waits. `patient`: a wait for several works is over
    only when its outcome is clear. `stall_is_deadlock`: nobody is let off by a deadline. `horizon_s`: nor by one after this time.
    """

    def __init__(self, scheduler: Scheduler = round_robin, *, max_steps: int = MAX_STEPS,
                 table: Callable[[Sequence[Task]], str] | None = None) -> None:
        self.now_s = 0.0
        self.tasks: list[Task] = []
        """Those that have not ended, in spawning order."""
        self.stalls: list[str] = []
        self.endless: list[str] = []
        """Waits without a deadline of tasks that are no daemons."""
        self.closing = False
        self.preemptive = self.patient = self.stall_is_deadlock = False
        self.horizon_s = math.inf
        self.touch: Callable[[Hashable, Access], None] = _nobody_listens
        self.note: Callable[[str], None] = lambda violation: None
        """Told of what must not happen and yet does not stop anybody."""
        self.scheduler = scheduler
        self._max_steps = max_steps
        self._table = table or plain_table
        self._hub = getcurrent()
        self._current: Task | None = None
        self._made: dict[str, int] = {}
        self._era = "start"
        self._naps = 0
        self._slept_through: list[str] = []
        self._previous: Task | None = None
        self._spawned = 0
        self._idle: list[greenlet] = []

    def spawn(self, name: str, function: Callable[[], Any], *, daemon: bool = False) -> Task:
        """Add a task; it first runs when the scheduler chooses it."""
        carrier = self._idle.pop() if self._idle else greenlet(self._carry, parent=self._hub)
        task = Task(self._spawned, name, daemon, self.christen(), function, carrier)
        self._spawned += 1
        self.tasks.append(task)
        if self._current is not None:
            self.touch((task.thing, "begins"), "set")
        return task

    def wait(self, ready: Callable[[], object], waiting: Waiting, *, deadline_s: float = math.inf) -> bool:
        """Give way until `ready()` (True) or the clock reaches `deadline_s` (False). Always a scheduling point."""
        task = self._current
        if task is None or self.closing:
            task = self._nobody_waits()
        if deadline_s == math.inf and not task.daemon:
            self.endless.append(f"{task.name} waits without a deadline in {waiting.operation} {waiting.group}".rstrip())
        task.ready, task.waiting, task.deadline_s = ready if deadline_s > self.now_s else _time_is_up, waiting, deadline_s
        self._hub.switch()
        if self.closing:
            raise GreenletExit
        task.ready = None
        return bool(ready())

    def give_way(self) -> None:
        """Let others run first, where the kernel is preemptive: what comes next may come late."""
        if not self.preemptive or self.closing or self._current is None:
            return
        self._hub.switch()
        if self.closing:
            raise GreenletExit

    def die(self) -> None:
        """The current task ends here as a killed process does: no `finally` of it runs while the run lasts."""
        task = self._current or self._nobody_waits()
        task.finished = task.died = True
        self._hub.switch()
        raise GreenletExit

    def run(self) -> None:
        """Until every task that is no daemon has finished, and the daemons have nothing left to do."""
        tasks, previous = self.tasks, self._previous
        try:
            for _ in range(self._max_steps):
                runnable = [task for task in tasks if task.ready is None or task.ready()]
                if runnable:
                    self._current = previous = self.scheduler(runnable, previous)
                    previous.greenlet.switch()  # type: ignore[union-attr]
                    if previous.finished:
                        tasks.remove(previous)
                elif all(task.daemon for task in tasks):
                    return
                else:
                    self._advance_clock()
        finally:
            self._current, self._previous = None, previous
        raise StepBound(f"no end after {self._max_steps} steps: somebody polls without waiting\n"
                        f"{self._table(self.blocked())}")

    def blocked(self) -> list[Task]:
        """Tasks that wait for somebody, in spawning order."""
        return [t for t in self.tasks if t.ready is not None and t.waiting is not IDLE]

    @property
    def current_name(self) -> str:
        """Who runs now; empty outside of every task."""
        return self._current.name if self._current is not None else ""

    def christen(self) -> str:
        """A name for a new shared thing that is the same in every run whose steps so far were the same: who made it, and as
        its how manieth."""
        maker = "world" if self._current is None else self._current.name
        number = self._made[maker] = self._made.get(maker, 0) + 1
        return f"{self._era}/{maker}/{number}"

    def begin_era(self, era: str) -> None:
        """What is made from now on is counted anew, and nobody ran last: the next run begins like any other of this era."""
        self._era, self._made, self._previous = era, {}, None

    def kill(self, tasks: Sequence[Task]) -> None:
        """Unwind what has not ended. Their `finally` blocks run, but every wait in them ends at once."""
        self.closing = True
        try:
            for task in tasks:
                if task.greenlet is not None:
                    self._current = task
                    task.greenlet.throw(GreenletExit)
                task.finished = True
        finally:
            self.closing, self._current = False, None
            self.tasks[:] = [task for task in self.tasks if not task.finished]

    def let_go(self) -> None:
        """Of the greenlets that are kept for tasks to come."""
        while self._idle:
            self._idle.pop().throw(GreenletExit)

    def _carry(self) -> None:
        """What a greenlet does: one task after the other, since to make a greenlet takes longer than most tasks do."""
        while True:
            task = self._current or self._nobody_waits()
            self._body(task)
            self._idle.append(getcurrent())
            task.greenlet = None
            del task  # or what it held would live as long as this greenlet is idle
            self._hub.switch()

    def _body(self, task: Task) -> None:
        try:
            self.touch((task.thing, "begins"), "await")
            task.result = task.function()
        except GreenletExit:
            pass
        except BaseException as error:  # a task's exception is a result, the run goes on
            task.error = error
        finally:
            task.finished = True
            self.touch((task.thing, "ends"), "fail" if task.error else "set")

    def _nobody_waits(self) -> NoReturn:
        if self.closing:
            raise GreenletExit
        raise RuntimeError("only a task can wait: call this inside world.run(fn)")

    def _advance_clock(self) -> None:
        pending = [t for t in self.tasks if t.deadline_s < math.inf]
        first = min(pending, key=lambda t: t.deadline_s, default=None)
        if why := self._in_vain(first):
            raise Deadlock(self._table(self.blocked()), why=why, waits=self._waits(self.blocked()))
        assert first is not None
        if len(self.stalls) < MAX_STALLS:
            self._note_stall(self._table(self.blocked()))
        self.now_s = first.deadline_s
        for task in pending:
            if task.deadline_s <= self.now_s:
                task.ready = _time_is_up

    def _note_stall(self, table: str) -> None:
        if not self.stalls or self.stalls[-1] != table:
            self.stalls.append(table)

    def _in_vain(self, first: Task | None) -> str:
        """Why the clock is not to go on to the nearest deadline, that of `first`; empty if it is."""
        if first is None:
            return "no deadline is pending"
        if first.deadline_s > self.horizon_s:
            return f"the next deadline, at {first.deadline_s:g} s, comes after {self.horizon_s:g} s, when nobody may still wait"
        if self.stall_is_deadlock and not self._sleep_helps(first):
            return "only a deadline would end this"
        return ""

    def _sleep_helps(self, first: Task) -> bool:
        """Whether the next deadline is a sleep, and the last sleeps were not all in vain: the others stand where they stood."""
        if not first.waiting.for_time:
            return False
        others = self._waits([task for task in self.blocked() if task is not first])
        self._naps = self._naps + 1 if others == self._slept_through else 0
        self._slept_through = others
        return self._naps < MAX_NAPS

    @staticmethod
    def _waits(tasks: Sequence[Task]) -> list[str]:
        return [f"{t.name} in {t.waiting.operation} {t.waiting.group}".rstrip() for t in tasks]


def plain_table(tasks: Sequence[Task]) -> str:
    """Who waits for what, one line each."""
    return "\n".join(f"{t.name}: {t.waiting.operation} {t.waiting.group} missing {t.waiting.missing()}"
                     for t in tasks)


def _time_is_up() -> bool:
    return True


def _nobody_listens(thing: Hashable, access: Access) -> None:
    """`Kernel.touch` by default."""
