"""A whole job of Ray actors: Megatron in two trainer actors, one per pipeline stage, and vLLM in two engine actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from harness.checkpoints import config_only_copy
from tests_gpu.ray.actors import Lock, RolloutEngine, TrainerRank

pytestmark = [pytest.mark.beyond_main_job, pytest.mark.nccl_timeout(150),
              pytest.mark.filterwarnings("ignore::FutureWarning:ray"), pytest.mark.filterwarnings("ignore::ResourceWarning")]

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [100, 50, 25, 12, 6]]
STARTS_WITHIN_S = 90.0
"""Four processes import torch, two of them vLLM, on few cores."""
CALL_S = 45.0


@pytest.fixture
def job(cluster: Any, checkpoints: Callable[..., str], tmp_path: Path) -> tuple[list[Any], list[Any], Any]:
    first = checkpoints("qwen3", 0)
    trainers = [cluster.remote(TrainerRank).options(num_cpus=0).remote(rank, 2, str(tmp_path / "store"), pp=2, checkpoint=first)
                for rank in range(2)]
    engines = [new_engine(cluster, first, tmp_path / f"engine{number}") for number in range(2)]
    lock = cluster.remote(Lock).options(num_cpus=0).remote()
    cluster.get([engine.get_weight_version.remote() for engine in engines], timeout=STARTS_WITHIN_S)
    return trainers, engines, lock


def new_engine(cluster: Any, checkpoint: str, home: Path) -> Any:
    return cluster.remote(RolloutEngine).options(num_cpus=0).remote(str(config_only_copy(checkpoint, home)))


def on_all(cluster: Any, actors: list[Any], method: str, *args: Any) -> list[Any]:
    return cluster.get([getattr(actor, method).remote(*args) for actor in actors], timeout=CALL_S)


def test_trainers_and_engines_as_actors_and_an_engine_that_is_replaced(
        cluster: Any, job: tuple[list[Any], list[Any], Any], checkpoints: Callable[..., str], tmp_path: Path) -> None:
    trainers, engines, lock = job
    on_all(cluster, trainers, "connect", engines, lock, [1, 1])
    for version, step in enumerate([checkpoints("qwen3", 0), checkpoints("qwen3", 1)], start=1):
        done = on_all(cluster, trainers, "update", step)
        assert [rank["version"] for rank in done] == [version, version]
        assert [set(rank["sends"]) for rank in done] == [{"vime-pp_0"}, {"vime-pp_1"}]
        assert on_all(cluster, engines, "get_weight_version") == [str(version)] * 2
        assert on_all(cluster, engines, "problems", step, PROMPTS) == [[], []]

    cluster.kill(engines[1])
    last = checkpoints("qwen3", 2)
    for trainer in [trainer.update.remote(last) for trainer in trainers]:
        with pytest.raises(ray.exceptions.RayTaskError, match="rollout engine 1 failed in"):
            cluster.get(trainer, timeout=CALL_S)
    engines[1] = new_engine(cluster, last, tmp_path / "replacement")
    on_all(cluster, trainers, "connect", engines, lock, [1, 1])
    assert [rank["version"] for rank in on_all(cluster, trainers, "update", last)] == [3, 3]
    assert on_all(cluster, engines, "problems", last, PROMPTS) == [[], []]
