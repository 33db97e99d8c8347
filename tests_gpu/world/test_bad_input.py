"""Bad input never hangs: every trainer rank raises one clear error, within seconds, and the next good call works."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoints import config_only_copy, read_config
from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport

Job = Callable[..., SyncJob]
Exact = Callable[[SyncReport], SyncReport]

AT_ONCE_S = 15.0
"""Far below every deadline of the library: the error was found, not waited for."""


def test_no_engines(checkpoints: Callable[..., str], start_job: Job) -> None:
    job = start_job(checkpoints("qwen3"))
    job.choose([])
    errors = job.failures("connect", Deadline.after(AT_ONCE_S))
    assert {error.kind for error in errors} == {"ConfigurationError"}
    assert all("rollout_engines must name at least one engine (got none)" in error.text for error in errors)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1]], ids=["too few", "too many"])
def test_counts_of_the_wrong_length(counts: list[int], checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    job = start_job(checkpoints("qwen3"))
    errors = job.failures("connect", Deadline.after(AT_ONCE_S), counts=counts)
    assert {error.kind for error in errors} == {"ConfigurationError"}
    assert all("engine_gpu_counts must have one entry per engine" in error.text for error in errors)
    job.connect()
    exact(job.update())


def test_a_checkpoint_without_weights(checkpoints: Callable[..., str], start_job: Job, tmp_path: Path) -> None:
    empty = str(config_only_copy(checkpoints("qwen3"), tmp_path / "empty"))
    job = start_job(checkpoints("qwen3"), args={"hf_checkpoint": empty})
    errors = job.failures("connect", Deadline.after(AT_ONCE_S))
    assert {error.kind for error in errors} == {"ConfigurationError"}
    assert all(empty in error.text and "safetensors" in error.text for error in errors)


def test_a_family_that_nobody_knows(checkpoints: Callable[..., str], start_job: Job, tmp_path: Path) -> None:
    checkpoint = Path(checkpoints("qwen3"))
    config = read_config(checkpoint) | {"model_type": "notamodel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(checkpoint / "model.safetensors", tmp_path / "model.safetensors")
    job = start_job(str(checkpoint), args={"hf_checkpoint": str(tmp_path)})
    errors = job.failures("connect", Deadline.after(AT_ONCE_S))
    assert {error.kind for error in errors} == {"ConfigurationError"}
    assert all("notamodel" in error.text and "qwen3" in error.text for error in errors)


def test_a_port_that_is_taken(checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """The only port of the configured range is somebody else's; once it is free, the same updater is exact."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = start_job(checkpoints("qwen3"), args={"update_weight_port_range": [port, port],
                                                    "update_weight_master_address": "127.0.0.1"})
        errors = job.failures_of_first_open(Deadline.after(AT_ONCE_S))
        assert {error.kind for error in errors} == {"UpdateFailed"}
        assert all(f"{port}" in error.text and "taken" in error.text for error in errors)
        assert len({error.text for error in errors}) == 1, "every rank must say the same"
    job.connect()
    exact(job.update())
