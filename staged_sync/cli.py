"""`staged-sync plan`: who does what in one weight update, for a layout, without running anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from staged_sync.exporter import ITERATED_PASS, RAW_PASSES, Contract, Part
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
    keeps_its_group,
    plan_update,
    rank_offsets,
    takes_part,
)
from staged_sync.seam import Coordinates

EXPORTS: dict[str, tuple[Contract, tuple[Part, ...]]] = {
    "raw": ("stage_local", RAW_PASSES),
    "bridge": ("pipeline_collective", ITERATED_PASS["pipeline_collective"]),
    "stage-local-bridge": ("stage_local", ITERATED_PASS["stage_local"]),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="staged-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", help="print the steps of one update and which ranks take part",
        description="The steps of one weight update, in order, with the trainer ranks that take part in each. All other ranks "
                    "only join the barriers.")
    plan.add_argument("--tp", type=_size, default=1, help="tensor parallel size (default 1)")
    plan.add_argument("--pp", type=_size, default=1, help="pipeline parallel size (default 1)")
    plan.add_argument("--dp", type=_size, default=1, help="data parallel size, context parallel included (default 1)")
    plan.add_argument("--engines", type=_size, nargs="+", default=[1], metavar="WORKERS",
                      help="workers of each rollout engine (default: one engine with one worker)")
    plan.add_argument("--export", choices=EXPORTS, default="raw",
                      help="raw (default); bridge: Megatron-Bridge and mbridge, which all ranks iterate; stage-local-bridge: an "
                           "iterator that a stage can end alone")
    options = parser.parse_args(arguments)
    topology = dense_topology(options.tp, options.pp, options.dp)
    print("\n".join(describe_plan(topology, options.engines, *EXPORTS[options.export])))


def dense_topology(tp: int, pp: int, dp: int) -> Topology:
    """Megatron's default rank order without experts: tensor parallel fastest, then data parallel, then pipeline."""
    return Topology(tuple(
        Coordinates(rank=rank, tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp), etp=rank % tp, edp=rank // tp % dp,
                    tp_size=tp, dp_size=dp, pp_size=pp, etp_size=tp, edp_size=dp)
        for rank in range(tp * dp * pp)))


def describe_plan(topology: Topology, workers: Sequence[int], contract: Contract = "stage_local",
                  passes: Sequence[Part] = RAW_PASSES) -> list[str]:
    """The plan as lines for people: transfer group first, then one line a step."""
    engines = ", ".join(f"engine {i} at ranks {first}..{first + count - 1}" if count > 1 else f"engine {i} at rank {first}"
                        for i, (first, count) in enumerate(zip(rank_offsets(workers), workers, strict=True)))
    lines = [f"transfer group: the source at rank 0, {engines}; world size {1 + sum(workers)}"]
    if keeps_its_group(topology.pp, contract):
        lines.append(f"at connect     rank {topology.sources[0]} opens {group_name(0)} and keeps it")
    return lines + [_line(step, topology) for step in plan_update(topology.pp, contract=contract, passes=passes)]


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
            what = {"model": "the whole model", "stage": f"stage {stage}"}.get(part, f"the {part} part of stage {stage}")
            return f"send           rank {topology.sources[stage]} sends {what}{with_peers}"
        case Synchronize(stage):
            return f"synchronize    rank {ranks[0]} waits until stage {stage} has left its device"
        case Close(stage):
            return f"close          rank {ranks[0]} closes {group_name(stage)}"


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
