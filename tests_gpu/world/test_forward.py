"""Megatron computes what transformers computes from the same checkpoint: the trainer's side of the proof is a model, not a
bag of tensors. In float32, so that the tolerance leaves no room for a wrong weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.world.deadline import Deadline
from harness.world.world import World

TOKENS = [[1, 2, 3, 4, 200, 100, 50, 25], [9, 8, 7, 6, 5, 4, 3, 2]]
TOLERANCE = 2e-4


def test_megatron_and_transformers_agree_on_logits(world: World, deadline: Deadline, family: str,
                                                   checkpoints: Callable[..., str]) -> None:
    check_logits(world, deadline, checkpoints(family))


def check_logits(world: World, deadline: Deadline, checkpoint: str) -> None:
    """The last stage's logits of a float32 model with `checkpoint`'s weights are transformers'."""
    world.run("harness.world.trainer:float32_model", on=world.trainer_ranks, deadline=deadline, checkpoint=checkpoint,
              timeout_s=deadline.limit_s / 2)
    stages = world.run("harness.world.trainer:logits", on=world.trainer_ranks, deadline=deadline, tokens=TOKENS, vocab_size=251)
    (expected,) = world.run("harness.world.receiver:transformers_logits", on=[world.receiver_ranks[0]], deadline=deadline,
                            checkpoint=checkpoint, tokens=TOKENS)
    last_stage = [torch.tensor(logits) for logits in stages if logits is not None]
    assert len(last_stage) == world.topology.tp
    for logits in last_stage:
        assert logits.shape == (2, 8, 251)
        torch.testing.assert_close(logits, torch.tensor(expected), rtol=0, atol=TOLERANCE)
