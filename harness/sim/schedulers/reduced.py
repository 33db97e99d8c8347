"""Depth first with dynamic partial-order reduction (Flanagan and Godefroid, POPL 2005) and sleep sets (Godefroid 1996).

Two schedules that differ only in the order of steps that commute are the same to everybody. After each run the steps that
raced are found (harness/recording/access.py says which touches race), and only their other order is run as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.recording.access import EAGER, RELATION, Access, Relations
from harness.recording.kernel import Task
from harness.sim.schedulers.races import Step, Touches, races_of


@dataclass(slots=True)
class Node:
    """A point of the current path: who could run, who did, who is still to be tried, and who need not be (`asleep`)."""

    enabled: tuple[str, ...]
    asleep: Mapping[str, Touches]
    chosen: str
    wanted: set[str] = field(default_factory=set)
    tried: dict[str, Touches] = field(default_factory=dict)

    def untried(self) -> list[str]:
        return [name for name in self.enabled if name in self.wanted and name not in self.tried and name not in self.asleep]


class Reduced:
    """`eager`: a task that waits for several results may also wake after each of them, and look in vain. Many more schedules,
    no other outcomes: a check of the reduction itself."""

    listens = True

    def __init__(self, *, eager: bool = False) -> None:
        self.name = "exhaustive, reduced" + (", eager" if eager else "")
        self.patient = not eager
        self.complete = False
        self._relations = EAGER if eager else RELATION
        self.redundant = 0
        """Schedules that turned out, half way, to be equal to earlier ones."""
        self._path: list[Node] = []
        self._steps: list[Step] = []
        self._touches: Touches = []
        """Of the step that runs."""
        self._begun = self._cut = self._off_path = False

    # --- one schedule after the other -------------------------------------------------------------------------------
    def next(self) -> bool:
        if self._begun and not self._backtrack():
            self.complete = not self._cut
            return False
        self._begun, self._off_path, self._steps, self._touches = True, False, [], []
        return True

    def choose(self, candidates: Sequence[Task]) -> Task:
        at = len(self._steps)
        if self._off_path:
            name = candidates[0].name
        elif at < len(self._path):
            name = self._path[at].chosen
        else:
            name = self._new_node(candidates)
        self._touches = []
        self._steps.append(Step(name, self._touches))
        for task in candidates:
            if task.name == name:
                return task
        raise AssertionError(f"not deterministic: step {at} was {name}'s, now only {[t.name for t in candidates]} can run")

    def touch(self, thing: Hashable, access: Access) -> None:
        self._touches.append((thing, access))

    def clock_advanced(self) -> None:
        if self._steps:
            self._steps[-1].before_clock = True

    def over(self, ended: bool) -> None:
        self._cut = self._cut or not ended
        self.redundant += self._off_path
        del self._steps[len(self._path):]
        for node, step in zip(self._path, self._steps, strict=True):
            node.tried[node.chosen] = step.touches
        for race in races_of(self._steps, self._relations):
            node = self._path[race.first]
            wishes = [race.by] if race.by in node.enabled else [q for q in race.leads_there if q in node.enabled]
            if not wishes:
                node.wanted.update(node.enabled)
            elif not node.wanted.intersection(wishes):
                node.wanted.add(wishes[0])

    # --- inside -----------------------------------------------------------------------------------------------------
    def _backtrack(self) -> bool:
        """Go back to the last node with somebody to try; whoever was tried there sleeps until a step meets his."""
        while self._path:
            node = self._path[-1]
            if left := node.untried():
                node.chosen = left[0]
                return True
            self._path.pop()
        return False

    def _new_node(self, candidates: Sequence[Task]) -> str:
        enabled = tuple([task.name for task in candidates])
        asleep = self._asleep()
        awake = [name for name in enabled if name not in asleep] if asleep else enabled
        if not awake:
            self._off_path = True
            return enabled[0]
        previous = self._steps[-1].task if self._steps else ""
        chosen = previous if previous in awake else awake[0]
        self._path.append(Node(enabled, asleep, chosen, wanted={chosen}))
        return chosen

    def _asleep(self) -> dict[str, Touches]:
        """Who was tried or asleep before, and whose next step commutes with the one just taken."""
        if not self._path:
            return {}
        node, step = self._path[-1], self._steps[-1]
        if not node.asleep and not node.tried:
            return {}
        before = {**node.asleep, **node.tried}
        return {name: touches for name, touches in before.items()
                if name != node.chosen and commute(touches, step.touches, self._relations)}


def commute(a: Touches, b: Touches, relations: Relations) -> bool:
    return all(one != other or relations[left, right] == "commutes" for one, left in a for other, right in b)
