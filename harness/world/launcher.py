"""One world: torchrun's own agent in a forked process, its ranks forked again, each one a supervisor."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness.world.files import WorldFiles
from harness.world.process import die_with_parent
from harness.world.supervisor import supervise


def launch(directory: Path, host_pid: int) -> NoReturn:
    """Run the world in `directory` to its end and leave the process. Called right after a fork."""
    code = 1
    try:
        die_with_parent(host_pid)
        _redirect_output(directory / "launcher.log")
        world_size = WorldFiles(directory).read_topology().world_size
        elastic_launch(_config(world_size, directory), _torchrun_rank)(str(directory), os.getpid())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the forked copy of the host's stack must not be unwound


def _config(world_size: int, directory: Path) -> LaunchConfig:
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=world_size, start_method="fork", run_id=directory.name,
                        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
                        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "torchelastic")))


def _torchrun_rank(directory: str, launcher_pid: int) -> None:
    """What torchrun starts, once per rank."""
    die_with_parent(launcher_pid)
    files, rank = WorldFiles(Path(directory)), int(os.environ["RANK"])
    _redirect_output(files.log(rank))
    supervise(files, rank)


def _redirect_output(path: Path) -> None:
    """Everything that this process and its children print goes to `path`, also what C++ prints."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
