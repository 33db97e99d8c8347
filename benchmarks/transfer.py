"""How fast weights travel from one source to its receivers, each a process of its own.

In every round each of these sends the same tensors, the embedding and 12 of the 28 layers of Qwen3-0.6B:

  limit         one plain broadcast of all bytes as one tensor, into memory that is there: what the wire can do; and
                the same into fresh memory, which engines that keep what they receive need
  staged-sync   staged_sync.transfer_group with the library's receivers: bucket by bucket, announced by RPC, packed
                into one broadcast or one broadcast a tensor, into fresh memory
  plain         one RPC and one torch.distributed broadcast a tensor, as most examples and frameworks do it
  checkpoint    the source writes a safetensors file, the receivers load it

Nothing is loaded into a model, and a receiver drops what it has got. Before the rounds every contestant's bytes are checked.
GPUs are used where there is one for each process (`--device cuda` insists); that path has not been run yet.

    python -m benchmarks.transfer
    python -m benchmarks.transfer --receivers 4 --layers 28 --buckets 16 64
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.measure import (
    Machine,
    Samples,
    checkpoint_folders,
    in_units,
    interleave,
    options,
    positive,
    seconds_of,
    show,
    write_json,
)
from benchmarks.models import dense
from benchmarks.receiver import TIMEOUT_S
from harness.world.devices import choose
from harness.world.environment import world_environment
from harness.world.rpc import Reference, RemoteHandle, Target, public_methods
from staged_sync.buckets import Bucketer
from staged_sync.config import DEFAULT_PACKED_BUFFER_BYTES, MIB, Timeouts
from staged_sync.control import Deadline
from staged_sync.exporter import NamedTensor, TensorMeta
from staged_sync.live_seam import LiveSeam
from staged_sync.packing import as_bytes
from staged_sync.seam import Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.transfer_group import OpenGroup, open_group

ROOT = Path(__file__).resolve().parents[1]
TIMEOUTS = Timeouts(call_s=TIMEOUT_S, phase_s=2 * TIMEOUT_S, update_s=4 * TIMEOUT_S)
LOOPBACK = "127.0.0.1"
LIMIT = "limit: one broadcast, one tensor"
SMALL = {"vocab_size": 8192, "num_layers": 2}

Contestants = dict[str, Callable[[], None]]


class Source:
    """The sending process: the model's tensors, and the receivers as handles."""

    def __init__(self, metas: Sequence[TensorMeta], receivers: Sequence[RemoteHandle], device: torch.device) -> None:
        self.receivers = receivers
        self.seam = LiveSeam([])
        self.trace = Trace(0, self.seam.now)
        self.wire_backend = "nccl" if device.type == "cuda" else "gloo"
        self.flat, self.tensors = _random_model(metas, device)
        self._fleet = Fleet(tuple(receivers), (1,) * len(receivers), lock=None, packed_in_init=(True,) * len(receivers))

    def ask(self, method: str, **kwargs: Any) -> list[Any]:
        return self.answers(self.call(method, **kwargs))

    def call(self, method: str, **kwargs: Any) -> list[Reference]:
        return [getattr(receiver, method).remote(**kwargs) for receiver in self.receivers]

    def answers(self, references: Sequence[Reference]) -> list[Any]:
        """Waited for as the library waits for engines."""
        for reference in references:
            if not self.seam.wait_any([reference], timeout_s=TIMEOUT_S):
                raise TimeoutError(f"a receiver did not answer within {TIMEOUT_S:g} s")
        return [reference.result() for reference in references]

    # --- contestants ------------------------------------------------------------------------------------------------------
    def join_torch(self) -> None:
        """The default process group of source and receivers, for the limit and the plain way."""
        limit = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(LOOPBACK, 0, None, True, limit, wait_for_workers=False)
        size = 1 + len(self.receivers)
        joining = [receiver.join.remote(host=LOOPBACK, port=store.port, rank=rank, world_size=size)
                   for rank, receiver in enumerate(self.receivers, start=1)]
        dist.init_process_group(self.wire_backend, store=store, rank=0, world_size=size, timeout=limit)
        self.answers(joining)

    def limit(self, *, fresh: bool) -> None:
        receiving = self.call("receive_flat", nbytes=self.flat.numel(), fresh=fresh)
        dist.broadcast(self.flat, src=0)
        self.answers(receiving)

    def plain(self) -> None:
        for _, tensor in self.tensors:
            receiving = self.call("receive_one", dtype=tensor.dtype, shape=list(tensor.shape))
            dist.broadcast(tensor, src=0)
            self.answers(receiving)

    def checkpoint(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(dict(self.tensors), file)
        self.ask("load", file=str(file), names=[name for name, _ in self.tensors])

    def staged_sync(self, group: OpenGroup, bucket_bytes: int) -> None:
        buckets = Bucketer(bucket_bytes)
        for named in self.tensors:
            if bucket := buckets.add([named]):
                group.send_bucket(bucket)
        group.send_bucket(buckets.flush())

    @contextlib.contextmanager
    def group(self, *, packed: bool) -> Iterator[OpenGroup]:
        """An open transfer group, through the library."""
        wire = Wire(self.wire_backend, packed, DEFAULT_PACKED_BUFFER_BYTES)  # type: ignore[arg-type]
        deadline = Deadline(self.seam.now() + TIMEOUT_S, "update_weight_call_timeout")
        group = open_group(self.seam, self.trace, self._fleet, f"vime-pp_{int(packed)}", wire, deadline, timeouts=TIMEOUTS,
                           address=LOOPBACK, port_range=None)
        try:
            yield group
        finally:
            group.leave()

    def open_and_close(self) -> None:
        with self.group(packed=True):
            pass


def _random_model(metas: Sequence[TensorMeta], device: torch.device) -> tuple[torch.Tensor, list[NamedTensor]]:
    """All bytes as one tensor, and the model's tensors as views of it."""
    total = sum(meta.nbytes for meta in metas)
    flat = torch.empty(total + -total % 8, dtype=torch.uint8)
    flat.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    flat = flat[:total].to(device)
    tensors, offset = [], 0
    for meta in metas:
        tensors.append((meta.name, flat[offset:offset + meta.nbytes].view(meta.dtype).view(meta.shape)))
        offset += meta.nbytes
    return flat, tensors


@contextlib.contextmanager
def receivers(number: int, device: str) -> Iterator[list[RemoteHandle]]:
    """So many processes that receive; ended at the end."""
    from benchmarks.receiver import Receiver

    methods = list(public_methods(Receiver))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        handles = []
        for index in range(number):
            address = f"ipc://{folder}/receiver{index}"
            its_device = f"cuda:{index + 1}" if device == "cuda" else "cpu"
            process = stack.enter_context(_started([sys.executable, "-m", "benchmarks.receiver", address, its_device]))
            handles.append(RemoteHandle(Target(f"receiver {index}", address, process.pid, methods)))
        yield handles


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, env=world_environment(), stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def check(source: Source, contestants: Contestants) -> None:
    """Let everybody send once, and compare what arrived with what was sent. Also everybody's warm-up."""
    expected = zlib.crc32(as_bytes(source.flat.cpu()).numpy())
    for name, send in contestants.items():
        source.ask("watch", on=True)
        send()
        arrived = source.ask("crc")
        source.ask("watch", on=False)
        if arrived != [expected] * len(source.receivers):
            raise AssertionError(f"'{name}' delivered other bytes than were sent: CRC-32 {expected:#x} expected, got {arrived}")


def measure(source: Source, used: argparse.Namespace) -> tuple[dict[str, Samples], Samples]:
    """Samples of every contestant, and of opening and closing a group."""
    with contextlib.ExitStack() as stack:
        source.join_torch()
        contestants: Contestants = {LIMIT: partial(source.limit, fresh=False),
                                    f"{LIMIT}, fresh memory": partial(source.limit, fresh=True)}
        for packed in (True, False):
            group = stack.enter_context(source.group(packed=packed))
            for mib in used.buckets:
                name = f"staged-sync, {'packed' if packed else 'a broadcast a tensor'}, buckets of {mib} MiB"
                contestants[name] = partial(source.staged_sync, group, mib * MIB)
        contestants["plain: an RPC and a broadcast a tensor"] = source.plain
        for what, folder in checkpoint_folders(stack).items():
            contestants[f"checkpoint in {what}: save and load"] = partial(source.checkpoint, folder)
        check(source, contestants)
        samples = interleave({name: partial(seconds_of, send) for name, send in contestants.items()}, used.rounds)
    opening = interleave({"open": partial(seconds_of, source.open_and_close)}, used.rounds)["open"]
    return samples, opening


def rows(samples: dict[str, Samples], nbytes: int) -> list[list[str]]:
    limit = samples[LIMIT]
    return [[name, in_units(s.median_s, "s"), f"{nbytes / s.median_s / 1e9:.2f}", f"{100 / s.times(limit):.0f} %",
             f"{100 * s.spread:.0f} %"] for name, s in samples.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options("transfer", __doc__ or "", rounds=5)
    parser.add_argument("--receivers", type=positive, default=2, help="processes that receive (default 2)")
    parser.add_argument("--layers", type=positive, default=12,
                        help="decoder layers (default 12, which is 0.7 GB; all 28 are 1.2 GB)")
    parser.add_argument("--buckets", type=positive, nargs="+", default=[32, 128, 512], metavar="MIB",
                        help="bucket sizes of staged-sync (default 32 128 512; a trainer's own default is 512)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cuda needs a GPU for each process")
    used = parser.parse_args(arguments)
    device = choose(used.device, 1 + used.receivers)
    print(device.text())
    machine = Machine.look("CUDA with NCCL" if device.name == "cuda" else "CPU with gloo")
    torch.set_num_threads(1)
    metas = dense(**SMALL) if used.small else dense(num_layers=used.layers)
    with receivers(used.receivers, device.name) as handles:
        source = Source(metas, handles, torch.device("cuda", 0) if device.name == "cuda" else torch.device("cpu"))
        samples, opening = measure(source, used)
        nbytes = source.flat.numel()
        dist.destroy_process_group()
    show(f"{len(metas)} tensors, {in_units(nbytes, 'B')}, to {used.receivers} receivers, median of {used.rounds} rounds",
         ["", "seconds", "GB/s to each", "of the limit", "spread"], rows(samples, nbytes), machine.caption())
    print(f"opening and closing a transfer group, which staged updates do once a stage: {in_units(opening.median_s, 's')}\n"
          "of the limit: the limit's seconds of the same round divided by these, median. spread: (slowest - fastest) / median.")
    write_json(used.json, "transfer", machine, used, {
        "bytes": nbytes, "tensors": len(metas), "open and close a group": opening.to_json(),
        **{name: s.to_json() for name, s in samples.items()}})


if __name__ == "__main__":
    main()
