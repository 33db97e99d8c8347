"""What went wrong where ranks do not stand at the same place of an export; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staged_sync.connect import Connection
from staged_sync.control import CALL, Status
from staged_sync.errors import Failure, RanksAbsent
from staged_sync.plan import Barrier

TURN = "turn"
"""In a status: how many buckets of the export are behind this rank. Not in that of a status barrier."""

FIRST = "paused"
"""The first status barrier of an update: ranks compare what they are about to do."""

WRONG_CONTRACT = ("exporter declared stage_local but behaves as pipeline-collective: it waits for ranks of other stages, which "
                  "a stage-local export leaves out. Declare it pipeline_collective (docs/bridge.md)")


def first_words(*, connection: str, version: int, poisoned: bool) -> dict[str, Any]:
    """What every rank brings to the first status barrier. `connection`: the serial of what it agreed on at connect, "" without;
    `version`: what it would publish next; `poisoned`: whether it knows of a failed update that was not made good."""
    return {CALL: "update_weights", "connection": connection, "version": version, "poisoned": poisoned}


def out_of_step(statuses: Sequence[Status]) -> list[Failure]:
    """One failure if some ranks have turned to another bucket than others, or have left the export; none if all agree."""
    if statuses.count(statuses[0]) == len(statuses):
        return []  # all say the same
    places: dict[int | None, list[int]] = {}
    for rank, status in enumerate(statuses):
        places.setdefault(status.data.get(TURN), []).append(rank)
    if len(places) == 1:
        return []
    shown = "; ".join(f"ranks {ranks} {'have ended' if turn is None else f'have exported {turn} buckets'}"
                      for turn, ranks in places.items())
    return [Failure(None, "iterating the export", "OutOfStep", f"{shown}. A pipeline-collective exporter must yield the same "
                    f"tensors, in the same order, on every rank (docs/bridge.md)")]


def other_connections(statuses: Sequence[Status]) -> list[Failure]:
    """One failure if ranks come with different connections (a connect that some of them did not see to its end)."""
    serials: dict[str, list[int]] = {}
    for rank, status in enumerate(statuses):
        serials.setdefault(status.data["connection"], []).append(rank)
    if len(serials) <= 1:
        return []
    shown = "; ".join(f"ranks {ranks}: {serial}" for serial, ranks in serials.items())
    return [Failure(None, "comparing connections", "OutOfStep", f"ranks hold different connections ({shown}): a "
                    f"connect_rollout_engines() did not end on all of them. Call it again on every rank")]


def why_absent(step: Barrier | None, error: RanksAbsent, link: Connection) -> str:
    """What to add to the error of a rank that did not come to the barrier after its stage's export: while it iterates, nothing
    of ours can end its wait."""
    if step is None or step.stage is None or step.reports or link.exporter.passes != ("stage",) or link.keeps_its_group:
        return ""
    if "did not come" not in str(error):
        return ""  # a rank that left by itself says why
    if not error.absent or any(link.topology.coordinates[rank].pp != step.stage for rank in error.absent):
        return ""
    return f". Where they stand in the export, the {WRONG_CONTRACT}"
