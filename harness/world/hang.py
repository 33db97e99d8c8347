"""What a hang looks like to a person: one table of who waits for what, and a file with everything else."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.world.hub import RunState
from harness.world.wire import Snapshot, Topology

_WIDTH = 150


def hang_report(topology: Topology, run: RunState, snapshots: dict[int, Snapshot], *, limit_s: float, directory: Path,
                lock_held: bool) -> str:
    """The text that the failing test shows; writes the full report beside the world's logs."""
    path = directory / "hang_report.txt"
    errors = [f"{topology.actor(rank)} (rank {rank}) had already failed: {outcome.problem.line()}"
              for rank, outcome in sorted(run.outcomes.items()) if outcome.problem is not None]
    late = ", ".join(topology.actor(rank) for rank in sorted(run.pending))
    head = [f"{run.function} did not end within {limit_s:g} s in the world {topology.text()}; still busy: {late}", *errors]
    if lock_held:
        head.append("the rollout engine lock is held")
    table = _render(_table(topology, run, snapshots))
    path.write_text("\n".join([*head, table, *(_details(topology, rank, snapshots.get(rank))
                                               for rank in range(topology.world_size))]))
    foot = f"stacks, last events and logs of every rank: {path}\nthe world has been killed; the next test gets a new one"
    return "\n".join([*head, table, foot])


def _table(topology: Topology, run: RunState, snapshots: dict[int, Snapshot]) -> Table:
    table = Table(title="who waits for what", title_justify="left")
    for column in ("rank or engine", "process", "phase", "stage", "bucket", "group", "waiting for", "since"):
        table.add_column(column, overflow="fold")
    for rank in range(topology.world_size):
        table.add_row(*_row(topology, run, rank, snapshots.get(rank)))
    return table


def _row(topology: Topology, run: RunState, rank: int, snapshot: Snapshot | None) -> list[str]:
    name = topology.actor(rank) if rank < topology.trainers else f"{topology.actor(rank)} (rank {rank})"
    if snapshot is None:
        return [name, "supervisor silent", *[""] * 6]
    state = snapshot.state
    if not snapshot.positions:
        return [name, state, *[""] * 4, "nothing recorded yet", ""]
    at = snapshot.positions[-1]
    waiting = at.get("waiting_for")
    return [name, state, at.get("phase", ""), _number(at.get("stage")), _number(at.get("bucket")), at.get("group", ""),
            waiting or f"nothing recorded; last event: {at['event']}", f"{time.monotonic() - _since(at):.1f} s"]


def _since(position: dict[str, Any]) -> float:
    return float(position.get("since_s", 0.0) or position["time_s"])


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _details(topology: Topology, rank: int, snapshot: Snapshot | None) -> str:
    title = f"===== {topology.actor(rank)} (rank {rank})"
    if snapshot is None:
        return f"{title}: its supervisor did not answer"
    events = "\n".join(_event(position) for position in snapshot.positions)
    return "\n".join([f"{title}, process {snapshot.child_pid}, {snapshot.state}", "--- stacks", snapshot.stacks.rstrip(),
                      "--- last events (seconds ago)", events, "--- end of its log", snapshot.log_tail.rstrip()])


def _event(position: dict[str, Any]) -> str:
    place = " ".join(f"{key}={position[key]}" for key in ("phase", "stage", "bucket", "group") if key in position)
    return f"{time.monotonic() - float(position['time_s']):8.3f}  {position['event']}  {place}".rstrip()


def _render(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table)
    return out.getvalue().rstrip()
