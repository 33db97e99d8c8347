"""Bad input never hangs: every trainer rank raises one clear error, within seconds, and the next good call works."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.checkpoints import config_only_copy, read_config
from harness.world.deadline import Deadline
from harness.world.job import SyncJob, SyncReport
from harness.world.wire import Topology

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


def test_ports_that_are_taken(topology: Topology, checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """All ports of the configured range are somebody else's; once they are free, the same updater is exact. With one stage
    the group is opened at connect, with several in the update: sources may share a port, so a taken one says nothing before."""
    with _two_ports() as ports:
        job = start_job(checkpoints("qwen3"), args={"update_weight_port_range": ports,
                                                    "update_weight_master_address": "127.0.0.1"})
        if topology.pp > 1:
            job.connect()
        errors = job.failures("connect" if topology.pp == 1 else "update", Deadline.after(AT_ONCE_S))
        assert {error.kind for error in errors} == {"UpdateFailed"}
        assert all(f"{ports[0]}-{ports[1]}" in error.text and "taken" in error.text for error in errors)
        assert len({error.text for error in errors}) == 1, "every rank must say the same"
    job.connect()
    exact(job.update())


def test_one_port_is_enough_for_all_stages(checkpoints: Callable[..., str], start_job: Job, exact: Exact) -> None:
    """One stage sends at a time, so sources on one host can share a port that a firewall lets through."""
    with _two_ports() as (port, _):
        pass
    job = start_job(checkpoints("qwen3"), args={"update_weight_port_range": [port, port],
                                                "update_weight_master_address": "127.0.0.1"})
    job.connect()
    exact(job.update())


@contextlib.contextmanager
def _two_ports() -> Iterator[list[int]]:
    """Two ports in a row on the loopback interface, taken inside the block."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                second = socket.create_server(("127.0.0.1", port + 1))
            except OSError:
                continue
            with second:
                yield [port, port + 1]
                return
    raise AssertionError("no two free ports in a row on 127.0.0.1 in 100 tries")
