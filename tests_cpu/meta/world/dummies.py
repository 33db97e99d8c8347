"""Scenarios for tests of the world harness itself: real forked ranks, no Megatron, no vLLM."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import torch
import torch.distributed as dist

from harness.world.rank import RankContext


def who(context: RankContext, *, greeting: str) -> dict[str, Any]:
    return {"rank": context.rank, "pid": os.getpid(), "actor": context.topology.actor(context.rank),
            "torchrun": os.environ.get("RANK"), "greeting": greeting}
