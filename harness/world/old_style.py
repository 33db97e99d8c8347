"""Weight sync as it was before it was staged, on a real world: every stage opens its own group to the same engines, at once.

Reported as vllm-project/vime#329. An engine worker holds one communicator: it listens to the group that came last.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from harness.world import trainer
from harness.world.rank import RankContext
from staged_sync import connect
from staged_sync.plan import Barrier, Lead, Open, Send, Step, Synchronize, plan_update


def every_stage_at_once(pp: int, **_: Any) -> tuple[Step, ...]:
    """The old plan: all stages open, then all send, with nothing between them; no group is closed."""
    staged = plan_update(pp)
    start = next(i for i, step in enumerate(staged) if isinstance(step, Open))
    end = staged.index(Lead("finish"))
    stages = range(pp)
    return (*staged[:start], *(Open(s) for s in stages), Barrier("stage 0 open", 0),
            *(Send(s, part) for part in ("dense", "expert") for s in stages), *(Synchronize(s) for s in stages),
            *(Barrier(f"stage {s} closed", s, reports=True) for s in stages), *staged[end:])


def connect_engines(context: RankContext, *, engines: list[dict[str, Any]], lock: dict[str, Any],
                    counts: list[int] | None) -> None:
    """`trainer.connect`, but the plan that all ranks agree on is the old one."""
    with patch.object(connect, "plan_update", every_stage_at_once):
        trainer.connect(context, engines=engines, lock=lock, counts=counts)
