"""Deferral, and a failure path: every wait has a time-out, and every step ends in a meeting that tells all ranks what went wrong.

After a failure the engines stay paused. Connecting again makes the trainer's groups anew, and the next update abandons what is
left of the session.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import mpu

from harness.foreign.examples import deferred, old_style

CALL_S = 400.0
"""Of one call to an engine: longer than vLLM's own rendezvous (300 s), so that an engine that waits in one comes back first."""

MEETING_S = 800.0
"""Longer than a failing step of any other rank: a rendezvous, then a call."""


class UpdateWeightFromDistributed(deferred.UpdateWeightFromDistributed):
    failed = False

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], *placement: Any) -> None:
        self.meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_S))
        if self.group is not None:
            self.close_group()
        super().connect_rollout_engines(rollout_engines, *placement)

    def get(self, references: Any) -> Any:
        return ray.get(references, timeout=CALL_S)

    @torch.no_grad()
    def update_weights(self) -> None:
        self.weight_version += 1
        abandons, self.failed = self.failed, True
        if abandons:
            self.together(self.on_lead(self.abandon))
        self.together(self.on_lead(self.begin))
        for stage in range(mpu.get_pipeline_model_parallel_world_size()):
            self.together(functools.partial(self.take_turn, stage))
        self.together(self.on_lead(self.finish))
        self.failed = False

    def together(self, step: Callable[[], None]) -> None:
        """Do it, and raise on every rank what was raised on any."""
        problem = ""
        try:
            step()
        except Exception as error:
            problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self.meeting)
        if any(problems):
            raise RuntimeError("; ".join(filter(None, problems)))

    @staticmethod
    def on_lead(step: Callable[[], None]) -> Callable[[], None]:
        return step if dist.get_rank() == 0 else lambda: None

    def abandon(self) -> None:
        """An update that is refused while it is read ends a session that was left open (vLLM)."""
        for engine in self.engines:
            with contextlib.suppress(RuntimeError, ValueError):
                self.get(engine.update_weights_from_distributed.remote(
                    names=["nothing"], dtypes=[], shapes=[], group_name=self.group_name))

    def take_turn(self, stage: int) -> None:
        try:
            super().take_turn(stage)
        except Exception:
            if self.group is not None:
                self.close_group()  # or the engines wait in it for ever
            raise

    def finish(self) -> None:
        """Published when all of it is there, and not with the first bucket."""
        self.get([engine.finish_weight_update.remote() for engine in self.engines])
        self.get([engine.update_weight_version.remote(str(self.weight_version)) for engine in self.engines])
        self.get([engine.continue_generation.remote() for engine in self.engines])

    def send_bucket(self, bucket: list[old_style.NamedTensor]) -> None:
        self.broadcast(bucket)  # stages take turns: there is nobody to lock out

    def announced(self, bucket: list[old_style.NamedTensor]) -> dict[str, Any]:
        return {key: value for key, value in super().announced(bucket).items() if key != "weight_version"}
