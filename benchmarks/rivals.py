"""Scenarios of `benchmarks.update` that run on the ranks of its worlds: what a user would pick instead of a weight sync."""

from __future__ import annotations

from typing import Any

import msgspec
from safetensors.torch import save_file

from benchmarks.measure import seconds_of
from harness.checkpoints import read_checkpoint
from harness.world import receiver
from harness.world.rank import RankContext


def save(context: RankContext, *, checkpoint: str, folder: str) -> float:
    """On a trainer rank: seconds to write the tensors of `checkpoint`, which are converted already, to `folder`."""
    tensors = {name: tensor.clone() for name, tensor in read_checkpoint(checkpoint).items()}
    return seconds_of(lambda: save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"}))


def restart(context: RankContext, *, checkpoint: str) -> float:
    """On a receiver: seconds to build an engine from `checkpoint`, in a process that has imported everything."""
    def build() -> None:
        context.state["rival"] = receiver.build_llm(context, checkpoint, load_format="auto", backend=None)

    return seconds_of(build)


def reload(context: RankContext, *, checkpoint: str) -> float:
    """On a receiver: seconds in which the engine that `restart` has built loads `checkpoint` in place."""
    return seconds_of(lambda: context.state["rival"].collective_rpc("reload_weights", kwargs={"weights_path": checkpoint}))


def generate(context: RankContext) -> Any:
    """What that engine says."""
    return msgspec.to_builtins(receiver.greedy(context.state["rival"]))
