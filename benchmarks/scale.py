"""What a weight update costs a fleet of a thousand GPUs, without having one.

Counted from the plan, exactly: barriers, RPCs, buckets, transfer groups, bytes.
Measured on real code: `plan` and `connect` as every rank of the fleet runs them (with what all 1,024 ranks would bring), and a
status barrier in worlds of 2, 4, 8 and 16 processes, which share this machine's cores.
Extrapolated, and marked so: what a barrier of the whole fleet takes.

The fleet: tensor parallel 8 · pipeline 16 · data parallel 8 = 1,024 trainer ranks with Qwen3-235B-A22B (470 GB in bf16, 36,945
tensors), raw export, and 64 engines of 8 workers.

    python -m benchmarks.scale
    python -m benchmarks.scale --tp 4 --pp 8 --dp 2 --engines 16
"""

from __future__ import annotations

import argparse
import math
import re
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.barriers import Costs
from benchmarks.barriers import measure as measure_barriers
from benchmarks.measure import Machine, Samples, in_units, options, positive, progress, seconds_of, show, write_json
from benchmarks.models import mixture
from harness.world.wire import Request, encode
from staged_sync.buckets import Bucketer
from staged_sync.cli import dense_topology
from staged_sync.config import Settings, read_settings
from staged_sync.connect import Connection, Local, negotiate
from staged_sync.control import Control, Status
from staged_sync.exporter import RAW_PASSES, Contract, Part, TensorMeta
from staged_sync.live_control import BLOCK, INLINE_BYTES, seats
from staged_sync.plan import Barrier, Lead, Open, Step, Topology, plan_update, takes_part
from staged_sync.seam import Coordinates
from staged_sync.trace import Trace

SMALL: dict[str, Any] = {"num_layers": 16, "num_experts": 4}

GATHERS: dict[Part, tuple[str, ...]] = {
    "dense": ("decoder.layers.{0-5}.self_attention.linear_proj.weight [4096, 1024] bfloat16",
              "decoder.layers.{0-5}.self_attention.linear_qkv.weight [1152, 4096] bfloat16",
              "order and units 0123456789abcdef"),
    "expert": ("decoder.layers.{0-5}.mlp.experts.local_experts.{0-15}.linear_fc1.weight [3072, 4096] bfloat16",
               "decoder.layers.{0-5}.mlp.experts.local_experts.{0-15}.linear_fc2.weight [4096, 1536] bfloat16",
               "order and units 0123456789abcdef")}
"""Of the kind and length of what a rank says at connect about its gathers (staged_sync/megatron/signature.py)."""


# --- counting -----------------------------------------------------------------------------------------------------------
def by_stage(metas: Sequence[TensorMeta], pp: int) -> list[list[TensorMeta]]:
    """The layers evenly over the stages; the embedding with the first one, everything behind the layers with the last one."""
    numbers = [int(found[1]) if (found := re.match(r"model\.layers\.(\d+)\.", meta.name)) else None for meta in metas]
    layers = 1 + max(number for number in numbers if number is not None)
    stages: list[list[TensorMeta]] = [[] for _ in range(pp)]
    for meta, number in zip(metas, numbers, strict=True):
        stage = number * pp // layers if number is not None else 0 if "embed_tokens" in meta.name else pp - 1
        stages[stage].append(meta)
    return stages


def buckets_of(metas: Sequence[TensorMeta], limit_bytes: int) -> list[list[TensorMeta]]:
    """As a source cuts them, a tensor a unit."""
    known = {meta.name: meta for meta in metas}
    bucketer = Bucketer(limit_bytes)
    closed = [bucketer.add([(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta"))]) for meta in metas]
    return [[known[name] for name, _ in bucket] for bucket in [*closed, bucketer.flush()] if bucket]


def announcement_bytes(bucket: Sequence[TensorMeta]) -> int:
    """Of the RPC that announces a bucket to one engine, in msgpack."""
    return len(encode(Request(0, "update_weights_from_distributed", {
        "names": [meta.name for meta in bucket], "dtypes": [meta.dtype for meta in bucket],
        "shapes": [list(meta.shape) for meta in bucket], "group_name": "vime-pp_0", "packed": True})))


def exchange_bytes(lengths: Sequence[int]) -> int:
    """What each rank takes in one exchange of such payloads (staged_sync/live_control.py): all lengths, all beginnings, rests."""
    longest = max(lengths)
    rests = sum(max(0, length - INLINE_BYTES) for length in lengths)
    return 8 * len(lengths) + len(lengths) * min(longest, INLINE_BYTES) + rests


@dataclass(frozen=True)
class Meeting:
    """How many messages it takes until a barrier has reached everybody."""

    levels: int
    taken_by_lead: int
    in_a_row: int
    """Up to the lead and down to the rank that hears last, one after the other."""
    connections_of_lead: int

    @classmethod
    def of(cls, world_size: int) -> Meeting:
        sizes = [seat.size for seat in seats(0, world_size, BLOCK)]
        down = sum(math.ceil(math.log2(size)) for size in sizes)
        others = sum(size - 1 for size in sizes)
        return cls(len(sizes), others, len(sizes) + down, others)


# --- one rank of a fleet ------------------------------------------------------------------------------------------------
class Stopped(Exception):
    """This rank has brought what it brings, and nobody answers yet."""


@dataclass
class Desk:
    """Stands for the control group: keeps what this rank brings, and answers with what all ranks would have brought."""

    answers: list[list[bytes]] = field(default_factory=list)
    brought: list[bytes] = field(default_factory=list)

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.brought.append(payload)
        if not self.answers:
            raise Stopped
        return self.answers.pop(0)

    def close(self) -> None:
        """Nothing is held."""


class SeamAtDesk:
    """As much of a seam as agreeing needs. Engines are numbers, and plain vime ones: they are not asked what they are."""

    backend = "nccl"

    def __init__(self, coordinates: Coordinates, desk: Desk) -> None:
        self._coordinates, self._desk = coordinates, desk

    def coordinates(self) -> Coordinates:
        return self._coordinates

    def now(self) -> float:
        return time.monotonic()

    def broken_control_generation(self) -> int:
        return -1

    def open_control_group(self, generation: int, *, timeout_s: float) -> Desk:
        return self._desk

    def identity(self, target: int) -> str:
        return f"{target:032x}"  # as long as a Ray actor's

    def has_method(self, target: int, method: str) -> bool:
        return False


@dataclass(frozen=True)
class Exporting:
    """As much of an exporter as agreeing needs."""

    contract: Contract = "stage_local"
    passes: tuple[Part, ...] = RAW_PASSES

    def optional(self, name: str) -> bool:
        return False


class Fleet:
    """All ranks' part in `connect`, one after the other in this process."""

    def __init__(self, topology: Topology, stages: Sequence[Sequence[TensorMeta]], engines: Sequence[int],
                 settings: Settings) -> None:
        self.topology, self.stages, self.engines, self.settings = topology, stages, engines, settings
        self.index = {meta.name: meta for metas in stages for meta in metas}
        everybody = range(len(topology.coordinates))
        self.introductions = [self._agree(rank, Desk()).brought[0] for rank in everybody]
        self.verdict = [self._agree(topology.LEAD, Desk([self.introductions])).brought[1], *(b"" for _ in everybody[1:])]

    def connect(self, rank: int) -> Connection:
        """What `rank` computes in `negotiate`, with what all others bring at hand."""
        link = self._negotiate(rank, Desk([list(self.introductions), list(self.verdict)]))
        assert link.plan == plan_update(self.topology.pp), "the fleet has agreed on another plan"
        return link

    def _agree(self, rank: int, desk: Desk) -> Desk:
        try:
            self._negotiate(rank, desk)
        except Stopped:
            return desk
        raise AssertionError(f"rank {rank} agreed with nobody")

    def _negotiate(self, rank: int, desk: Desk) -> Connection:
        c = self.topology.coordinates[rank]
        seam: Any = SeamAtDesk(c, desk)
        trace = Trace(rank, seam.now)
        control = Control(seam, trace)
        control.ensure_open(timeout_s=1)
        sends = rank in self.topology.sources
        exporter: Any = Exporting()
        local = Local(exporter, self.index if rank == self.topology.LEAD else {}, self.stages[c.pp] if sends else (), GATHERS, ())
        return negotiate(seam, trace, control, self.settings, local, self.engines, [8] * len(self.engines), None)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Memory that Python objects take at most while `function` runs; it runs many times slower meanwhile."""
    tracemalloc.start()
    try:
        kept = function()
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- the tables ---------------------------------------------------------------------------------------------------------
def update_rows(fleet: Fleet, plan: Sequence[Step], limit_bytes: int) -> list[list[str]]:
    """What one update costs a rank, a stage, an engine, and all together."""
    ranks, engines, pp = len(fleet.topology.coordinates), len(fleet.engines), fleet.topology.pp
    barriers = sum(isinstance(step, Barrier) for step in plan)
    of_a_stage = sum(isinstance(step, Barrier) and step.stage == 0 for step in plan)
    asked = sum(isinstance(step, Lead) for step in plan)
    buckets = [buckets_of(metas, limit_bytes) for metas in fleet.stages]
    opened = sum(isinstance(step, Open) for step in plan)
    of_engine = asked + opened + sum(map(len, buckets))
    announced = sum(announcement_bytes(bucket) for stage in buckets for bucket in stage)
    total, largest = sum(m.nbytes for m in fleet.index.values()), max(sum(m.nbytes for m in metas) for metas in fleet.stages)
    per_barrier = exchange_bytes([0] * ranks)
    return [
        ["status barriers", f"{barriers}", f"{of_a_stage}", "–", f"{barriers}"],
        ["bytes taken in an empty barrier", in_units(per_barrier, "B"), "–", "–", f"{in_units(per_barrier * ranks, 'B')}"],
        ["transfer groups opened", "1 (sources)", "1", f"{opened}", f"{opened}"],
        ["buckets", "–", f"{max(map(len, buckets))}", f"{sum(map(len, buckets))}", f"{sum(map(len, buckets))}"],
        ["RPCs", f"{asked * engines:,} (lead)", f"{engines * (1 + max(map(len, buckets))):,}", f"{of_engine:,}",
         f"{of_engine * engines:,}"],
        ["bytes of announcements", "–", in_units(announced * engines / pp, "B"), in_units(announced, "B"),
         in_units(announced * engines, "B")],
        ["bytes of weights", "–", in_units(largest, "B"), in_units(total, "B"), in_units(total, "B")]]


def connect_rows(fleet: Fleet, rounds: int) -> tuple[list[list[str]], dict[str, Any]]:
    """What agreeing costs the lead, a source and everybody else."""
    topology = fleet.topology
    lengths = list(map(len, fleet.introductions))
    taken = exchange_bytes(lengths) + exchange_bytes(list(map(len, fleet.verdict)))
    plain = next((rank for rank in range(len(lengths)) if rank not in topology.sources), topology.sources[-1])
    found, rows = {}, []
    who = {"the lead": topology.LEAD, "a source": topology.sources[-1], "any other rank": plain}
    with progress(len(who), "connecting") as bar:
        for name, rank in who.items():
            samples = Samples(tuple(seconds_of(partial(fleet.connect, rank)) for _ in range(rounds)))
            memory = peak_bytes(partial(fleet.connect, rank))
            found[name] = {**samples.to_json(), "peak_bytes": memory, "brings_bytes": lengths[rank], "takes_bytes": taken}
            rows.append([name, in_units(lengths[rank], "B"), in_units(taken, "B"), in_units(samples.median_s, "s"),
                         in_units(memory, "B")])
            bar.update()
    return rows, found


def plan_rows(fleet: Fleet, rounds: int) -> tuple[list[list[str]], dict[str, Any]]:
    """What planning costs one rank: planning itself, and finding its own steps."""
    topology = fleet.topology
    last = len(topology.coordinates) - 1
    plan = plan_update(topology.pp)
    jobs: Mapping[str, Callable[[], Any]] = {
        "plan_update": lambda: plan_update(topology.pp),
        "who takes part in each step, of one rank": lambda: [takes_part(step, topology, last) for step in plan],
        "the topology from all coordinates, checked": lambda: Topology(tuple(Coordinates(*astuple(c))
                                                                             for c in topology.coordinates)).check()}
    found, rows = {}, []
    for name, job in jobs.items():
        samples = Samples(tuple(seconds_of(job) for _ in range(max(rounds, 5))))
        memory = peak_bytes(job)
        found[name] = {**samples.to_json(), "peak_bytes": memory}
        rows.append([name, in_units(samples.median_s, "s"), in_units(memory, "B")])
    return rows, found


def bookkeeping_s(ranks: int, rounds: int) -> Samples:
    """What a rank does around one empty barrier of the fleet besides waiting: decoding everybody's status."""
    desk = Desk([[b""] * ranks for _ in range(rounds)])
    seam: Any = SeamAtDesk(Coordinates(0), desk)
    control = Control(seam, Trace(0, seam.now))
    control.ensure_open(timeout_s=1)
    return Samples(tuple(seconds_of(lambda: control.barrier("empty", Status(), timeout_s=1)) for _ in range(rounds)))


def measure_worlds(sizes: Sequence[int], rounds: int, repeats: int) -> dict[int, list[Costs]]:
    """Worlds of every size, taking turns."""
    found: dict[int, list[Costs]] = {size: [] for size in sizes}
    with progress(rounds * len(sizes), "meeting") as bar:
        for _ in range(rounds):
            for size in sizes:
                bar.set_postfix_str(f"{size} processes")
                found[size].append(measure_barriers(size, repeats))
                bar.update()
    return found


def median_of(costs: Sequence[Costs], name: str) -> float:
    return Samples(tuple(getattr(cost, name) for cost in costs)).median_s


def barrier_rows(worlds: Mapping[int, Sequence[Costs]]) -> list[list[str]]:
    names = ("empty_s", "report_s", "lead_cpu_s", "other_cpu_s", "open_s")
    return [[f"{size} processes", str(Meeting.of(size).in_a_row),
             *(in_units(median_of(costs, name), "s") for name in names)] for size, costs in worlds.items()]


def estimate_s(worlds: Mapping[int, Sequence[Costs]], ranks: int) -> float:
    """One empty barrier of `ranks` ranks, EXTRAPOLATED: every message in a row as long as one of the two in a world of two
    processes, and the lead's CPU time for a message that it takes as in the largest world measured."""
    largest = max(worlds)
    per_message_s = median_of(worlds[largest], "lead_cpu_s") / max(Meeting.of(largest).taken_by_lead, 1)
    hop_s = median_of(worlds[min(worlds)], "empty_s") / Meeting.of(min(worlds)).in_a_row
    return Meeting.of(ranks).in_a_row * hop_s + Meeting.of(ranks).taken_by_lead * per_message_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options("scale", __doc__ or "", rounds=5)
    for name, default in (("tp", 8), ("pp", 16), ("dp", 8), ("engines", 64)):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default {default}")
    parser.add_argument("--bucket-mib", type=positive, default=512, help="bucket size (default 512, as a trainer's)")
    parser.add_argument("--world-sizes", type=positive, nargs="+", default=[2, 4, 8, 16], metavar="N",
                        help="processes of the worlds that a barrier is measured in (default 2 4 8 16)")
    run(parser.parse_args(arguments))


def run(used: argparse.Namespace) -> None:
    machine = Machine.look()
    torch.set_num_threads(1)
    sizes = [size for size in used.world_sizes if size > 1][:2 if used.small else None]
    worlds = measure_worlds(sizes, 1 if used.small else used.rounds, 10 if used.small else 50)  # first: forking wants one thread
    topology = dense_topology(used.tp, used.pp, used.dp)
    ranks = len(topology.coordinates)
    settings, problems = read_settings(SimpleNamespace(update_weight_buffer_size=used.bucket_mib << 20))
    assert not problems, problems
    fleet = Fleet(topology, by_stage(mixture(**SMALL) if used.small else mixture(), used.pp), range(used.engines), settings)
    plan = plan_update(used.pp)
    counted = update_rows(fleet, plan, settings.bucket_bytes)
    connecting, planning, bookkeeping = connect_rows(fleet, used.rounds), plan_rows(fleet, used.rounds), bookkeeping_s(ranks, 20)

    print(f"{ranks:,} trainer ranks (tp{used.tp}·pp{used.pp}·dp{used.dp}), {used.engines} engines of 8 workers, "
          f"{len(fleet.index):,} tensors, buckets of {used.bucket_mib} MiB\n")
    show("one update, counted", ["", "each rank", "each stage", "each engine", "all together"], counted)
    show("connect, measured: what one rank brings, takes and computes, without the network",
         ["", "brings", "takes", "seconds", "memory"], connecting[0])
    show("planning, measured: what one rank computes, once per connection", ["", "seconds", "memory"], planning[0])
    show("a status barrier, measured: real processes that share this machine's cores",
         ["", "messages in a row", "empty", "with a report", "CPU of the lead", "CPU of another", "opening"],
         barrier_rows(worlds), machine.caption())
    one_s = estimate_s(worlds, ranks) + bookkeeping.median_s
    print(fleet_barrier(ranks, bookkeeping.median_s, one_s, sum(isinstance(step, Barrier) for step in plan)))
    write_json(used.json, "scale", machine, used, {
        "counted": counted, "connect": connecting[1], "plan": planning[1], "bookkeeping": bookkeeping.to_json(),
        "worlds": {size: [vars(cost) for cost in costs] for size, costs in worlds.items()}, "extrapolated_barrier_s": one_s})


def fleet_barrier(ranks: int, reading_s: float, one_s: float, barriers: int) -> str:
    meeting = Meeting.of(ranks)
    return (f"A barrier of {ranks:,} ranks: {meeting.levels} levels, {meeting.in_a_row} messages in a row; the lead takes "
            f"{meeting.taken_by_lead} messages over {meeting.connections_of_lead} connections (one group of all: {ranks - 1:,}); "
            f"each rank reads all statuses in {in_units(reading_s, 's')} (measured).\n"
            f"EXTRAPOLATED from the worlds above, the network's latency not included: {in_units(one_s, 's')} a barrier, "
            f"{in_units(one_s * barriers, 's')} for the {barriers} of an update.")


if __name__ == "__main__":
    main()
