"""`staged-sync plan`: who does what in one weight update, for a layout, without running anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from staged_sync.plan import (
    Barrier,
    Close,
    Lead,
    Open,
    Role,
    Send,
    Step,
    Synchronize,
    Topology,
    group_name,
    plan_update,
    rank_offsets,
    takes_part,
)
from staged_sync.seam import Coordinates


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="staged-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", help="print the steps of one update and which ranks take part",
        description="The steps of one weight update with raw export, in order, with the trainer ranks that take part in each. "
                    "All other ranks only join the barriers.")
    plan.add_argument("--tp", type=_size, default=1, help="tensor parallel size (default 1)")
    plan.add_argument("--pp", type=_size, default=1, help="pipeline parallel size (default 1)")
    plan.add_argument("--dp", type=_size, default=1, help="data parallel size, context parallel included (default 1)")
    plan.add_argument("--engines", type=_size, nargs="+", default=[1], metavar="WORKERS",
                      help="workers of each rollout engine (default: one engine with one worker)")
    options = parser.parse_args(arguments)
    print("\n".join(describe_plan(dense_topology(options.tp, options.pp, options.dp), options.engines)))


def dense_topology(tp: int, pp: int, dp: int) -> Topology:
    """Megatron's default rank order without experts: tensor parallel fastest, then data parallel, then pipeline."""
    return Topology(tuple(
        Coordinates(rank=rank, tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp), etp=rank % tp, edp=rank // tp % dp,
                    tp_size=tp, dp_size=dp, pp_size=pp, etp_size=tp, edp_size=dp)
        for rank in range(tp * dp * pp)))


def describe_plan(topology: Topology, workers: Sequence[int]) -> list[str]:
    """The plan as lines for people: transfer group first, then one line a step."""
    engines = ", ".join(f"engine {i} at ranks {first}..{first + count - 1}" if count > 1 else f"engine {i} at rank {first}"
                        for i, (first, count) in enumerate(zip(rank_offsets(workers), workers, strict=True)))
    lines = [f"transfer group: the source at rank 0, {engines}; world size {1 + sum(workers)}"]
    if topology.pp == 1:
        lines.append(f"at connect     rank {topology.sources[0]} opens {group_name(0)} and keeps it")
    return lines + [_line(step, topology) for step in plan_update(topology.pp)]


def _line(step: Step, topology: Topology) -> str:
    ranks = [rank for rank in range(len(topology.coordinates)) if takes_part(step, topology, rank)]
    match step:
        case Barrier(label):
            return f"barrier        all ranks: {label}"
        case Lead(action):
            return f"{action:14} rank {ranks[0]} asks every engine"
        case Open(stage):
            return f"open           rank {ranks[0]} opens {group_name(stage)}"
        case Send(stage, part):
            peers = [rank for rank in ranks if topology.role(rank, stage, part) is Role.GATHER_PEER]
            with_peers = f", with gather peers {', '.join(map(str, peers))}" if peers else ""
            return f"send           rank {topology.sources[stage]} sends the {part} part of stage {stage}{with_peers}"
        case Synchronize(stage):
            return f"synchronize    rank {ranks[0]} waits until stage {stage} has left its device"
        case Close(stage):
            return f"close          rank {ranks[0]} closes {group_name(stage)}"


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
