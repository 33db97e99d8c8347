"""The main job from a plain torchrun line: a trainer, engines, three updates, every byte checked.

    torchrun --standalone --nproc-per-node 3 -m harness.world.main --tp 1 --pp 2 --engines 1

Each torchrun process forks its rank and supervises it; the first one also is the controller. Exit code 0 means exact.
"""

from __future__ import annotations

import os

from harness.world.environment import VARIABLES

os.environ.update({name: os.environ.get(name, value) for name, value in VARIABLES.items()})  # read at import time

import argparse
import importlib
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from harness.checkpoints import make_checkpoint
from harness.model_shapes import ARCHITECTURES
from harness.report import one_line, print_summary
from harness.world.deadline import Deadline
from harness.world.devices import choose, replicas
from harness.world.files import WorldFiles
from harness.world.job import SyncJob, SyncReport
from harness.world.pool import RECEIVER_MODULES, TRAINER_MODULES
from harness.world.process import Life, die_with_parent, require_single_thread
from harness.world.supervisor import supervise
from harness.world.wire import Topology
from harness.world.world import START_WITHIN_S, World, make_files

_MEET_WITHIN_S = 120.0
"""Imports differ by rank (Megatron or vLLM), and all ranks import at once."""


def main() -> None:
    options = _options()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    topology = Topology(tp=options.tp, pp=options.pp, dp=replicas(options.tp, options.ep), ep=options.ep, engines=options.engines)
    device = choose(options.device, topology.gpus)
    topology = msgspec.structs.replace(topology, device=device.name)
    if world_size != topology.world_size:
        sys.exit(f"--nproc-per-node must be {topology.world_size} for {topology.text()} (got {world_size})")
    for module in TRAINER_MODULES if rank < topology.trainers else RECEIVER_MODULES:
        importlib.import_module(module)
    files = _meet(rank, topology)
    if rank != 0:
        supervise(files, rank)
        return
    print(device.text())
    supervisor = _fork_supervisor(files)
    sys.exit(_control(World(topology, files), supervisor, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size; data parallel ranks come with it as needed")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), default="qwen3")
    parser.add_argument("--tied", action="store_true", help="one matrix for embedding and output layer")
    parser.add_argument("--packed", action="store_true", help="vLLM's packed wire format")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 18)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout", type=float, default=120.0, help="deadline of the whole job, in seconds")
    return parser.parse_args()


def _meet(rank: int, topology: Topology) -> WorldFiles:
    """The first rank makes the world's directory and tells the others through torchrun's store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=timedelta(seconds=_MEET_WITHIN_S))
    key = "staged-sync/world-directory"
    if rank == 0:
        files = make_files(topology)
        store.set(key, str(files.directory))
        return files
    return WorldFiles(Path(store.get(key).decode()))


class _Supervisor:
    """The first rank's supervisor, which is this process' child; the others are torchrun's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._life = Life(pid)

    def wait(self, deadline: Deadline) -> bool:
        return self._life.wait(deadline.left_s)

    def kill(self) -> None:
        os.kill(self._pid, 9)


def _fork_supervisor(files: WorldFiles) -> _Supervisor:
    """Before this process opens a zmq context, whose threads a child would not get."""
    require_single_thread("the first torchrun process")
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent_pid)
        supervise(files, 0)
        os._exit(0)
    return _Supervisor(pid)


def _control(world: World, supervisor: _Supervisor, options: argparse.Namespace) -> int:
    world.process = supervisor
    try:
        world.wait_ready(Deadline.after(START_WITHIN_S + _MEET_WITHIN_S))
        with tempfile.TemporaryDirectory() as home:
            reports = _run_job(world, Path(home), options)
        print_summary(reports, sys.stdout)
        for report in reports:
            print(report.problems(), end="")
        return 0 if reports and all(report.exact for report in reports) else 1
    finally:
        world.close()


def _run_job(world: World, home: Path, options: argparse.Namespace) -> list[SyncReport]:
    steps = [str(make_checkpoint(home / f"step{step}", options.model, tied=options.tied, step=step))
             for step in range(options.updates)]
    job = SyncJob(world, steps[0], Deadline.after(options.timeout), scenario=f"{options.model}{' tied' * options.tied}",
                  args={"update_weight_buffer_size": options.bucket_bytes, "vllm_weight_sync_packed": options.packed})
    job.connect()
    reports = []
    for step in steps:
        job.load(step)
        reports.append(job.update())
        print(f"version {reports[-1].version}: {'; '.join(one_line(engine) for engine in reports[-1].engines)}")
    return reports


if __name__ == "__main__":
    main()
