"""The checks of the main job can fail: what they would say if the wrong bytes had come."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from harness.checkpoints import read_checkpoint
from harness.compare import compare
from harness.world.deadline import Deadline
from harness.world.job import SyncJob
from harness.world.world import World


def test_two_swapped_layers_would_be_seen_everywhere(world: World, deadline: Deadline, checkpoints: Callable[..., str],
                                                     tmp_path: Path) -> None:
    """Norms are random and layers differ, so a swap of equal shapes shows in bytes, parameters, tokens and logprobs."""
    checkpoint = checkpoints("qwen3")
    swapped = _swap_layers(checkpoint, tmp_path / "swapped", 1, 2)
    result = compare(read_checkpoint(swapped), read_checkpoint(checkpoint))
    names = {problem.split(" ")[0] for problem in result.problems}
    assert names == {name for name in read_checkpoint(checkpoint) if name.startswith(("model.layers.1.", "model.layers.2."))}
    seen = world.run("harness.world.receiver:sensitivity", on=[world.receiver_ranks[0]], deadline=deadline,
                     checkpoint=checkpoint, swapped=swapped)
    assert seen == [{"parameters differ": True, "tokens differ": True, "logprobs differ": True}]


def test_an_engine_with_other_weights_is_no_match(checkpoints: Callable[..., str], start_job: Callable[..., SyncJob]) -> None:
    """A whole update of step 0, judged by step 1's file: every check must object."""
    job = start_job(checkpoints("qwen3", 0))
    job.connect()
    job.served = checkpoints("qwen3", 1)
    report = job.update()
    assert not report.exact
    for engine in report.engines:
        assert (engine.tensors_equal, engine.parameters_equal) == (0, 0)
        assert not engine.tokens_equal
        assert not engine.logprobs_equal
    assert "0/58 tensors on arrival" in report.problems()
    assert "model.embed_tokens.weight [251, 96] bfloat16: " in report.problems()


def _swap_layers(checkpoint: str, destination: Path, one: int, other: int) -> str:
    destination.mkdir()
    shutil.copyfile(Path(checkpoint) / "config.json", destination / "config.json")
    prefixes = {f"model.layers.{one}.": f"model.layers.{other}.", f"model.layers.{other}.": f"model.layers.{one}."}
    tensors = {}
    for name, tensor in read_checkpoint(checkpoint).items():
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        tensors[name if prefix is None else name.replace(prefix, prefixes[prefix], 1)] = tensor
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    return str(destination)
