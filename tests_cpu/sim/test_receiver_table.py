"""The simulated receiver does what the table says; tests_gpu/vllm/test_model_agrees.py asks a real vLLM worker the same."""

from __future__ import annotations

import re

import pytest
import torch

from harness.recording.engines import EngineOptions
from harness.recording.model import hf_metas, same_bytes, small_table, values
from harness.recording.world import RecordingWorld
from harness.sim.agreement import OK, TABLE, Agreed
from harness.sim.receiver_driver import SimulatedDriver

METAS = hf_metas(small_table(1, dense=3, expert=1))
TENSORS: dict[str, torch.Tensor] = {name: values(meta, 1) for name, meta in METAS.items()}


@pytest.mark.parametrize("retain_replaced", [False, True], ids=["our back end", "stock"])
@pytest.mark.parametrize("agreed", TABLE, ids=lambda agreed: agreed.name)
def test_every_step_ends_as_the_table_says(agreed: Agreed, retain_replaced: bool) -> None:
    with RecordingWorld(engines=[EngineOptions(retain_replaced=retain_replaced)], model=METAS) as world:
        run = world.run(lambda context: agreed.steps(SimulatedDriver(context, TENSORS)))
        assert run.errors == {}
        said = run.results[0]
        assert len(said) == len(agreed.expects)
        for answer, expected in zip(said, agreed.expects, strict=True):
            assert re.search(expected, answer), f"'{answer}' is not '{expected}'"
        if agreed.expects[-1] == OK and not world.engines[0].paused:  # it serves: then with exactly these weights
            held = world.engines[0].weights()
            assert [name for name, tensor in TENSORS.items() if not same_bytes(held[name], tensor)] == []


def test_the_table_is_long_enough_and_its_names_are_its_own() -> None:
    assert len(TABLE) >= 10 and len({agreed.name for agreed in TABLE}) == len(TABLE)
