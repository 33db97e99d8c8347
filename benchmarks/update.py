"""A whole weight update between real Megatron ranks and real vLLM engines: what it takes, phase by phase, and what a stage adds.

Two worlds take turns: pipeline 1, where the one source keeps its transfer group, and pipeline 2, where two sources take turns
(staged). Both send the same bytes to the same number of engines; before anything is timed, every tensor and every token is
compared with the checkpoint's. In the same rounds, what a user would pick instead: the trainer saves a checkpoint and the
engines reload it (vLLM's own `reload_weights`), or start anew from it.

Needs megatron-core and vLLM (`nox -s gpu` installs both), whose imports alone take half a minute. On a machine without GPUs
that is vLLM's CPU build and gloo; with GPUs (`--device cuda`) the same worlds run over NCCL, which has not been tried yet.

    python -m benchmarks.update
    python -m benchmarks.update --engines 2 --layers 4 --bucket-mib 16
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Machine, Samples, checkpoint_folders, in_units, interleave, options, positive, show, write_json
from harness.checkpoints import config_only_copy, make_checkpoint
from harness.world.deadline import Deadline
from harness.world.devices import choose
from harness.world.job import SyncJob
from harness.world.pool import WorldPool
from harness.world.wire import Topology

PHASES = ("pause", "start", "send", "finish", "publish", "resume", "total")
LIMIT_S = 1800.0
"""Deadline of everything that one world is asked to do; the library's own are far inside it."""

MODEL: dict[str, Any] = {"vocab_size": 32_000, "heads": 32, "groups": 8, "hidden_size": 1024, "ffn_size": 3072}
"""Large enough that sending dominates an update: with 8 layers 323 MB in bf16. What else there is: see hf_config."""

Event = Mapping[str, Any]


# --- what the trace says ------------------------------------------------------------------------------------------------
def barrier_costs_s(events: Iterable[Event]) -> list[float]:
    """Of every status barrier of one update, over all ranks: from when the last rank came until the last one went on."""
    came: dict[str, float] = {}
    left: dict[str, float] = {}
    for event in events:
        times = {"barrier": came, "barrier.done": left}.get(event["event"])
        if times is not None:
            times[event["detail"]] = max(times.get(event["detail"], 0.0), event["time_s"])
    return [left[label] - came[label] for label in came]


def durations_s(events: Iterable[Event], name: str) -> list[float]:
    """How long each `name` of one update took (`open`, `close`), by the rank that did it."""
    began: dict[tuple[int, str], float] = {}
    found = []
    for event in sorted(events, key=lambda event: event["time_s"]):
        key = (event["rank"], event["group"])
        if event["event"] == name:
            began[key] = event["time_s"]
        elif event["event"] == f"{name}.done":
            found.append(event["time_s"] - began.pop(key))
    return found


# --- the worlds ---------------------------------------------------------------------------------------------------------
class Sync:
    """One world, its engines connected; updates on demand."""

    def __init__(self, pool: WorldPool, topology: Topology, checkpoint: str, bucket_bytes: int) -> None:
        self.topology, self.checkpoint = topology, checkpoint
        self._job = SyncJob(pool.get(topology), checkpoint, Deadline.after(LIMIT_S), args={
            "update_weight_buffer_size": bucket_bytes, "vllm_weight_sync_packed": True})
        self._job.connect()
        self.phases: list[dict[str, float]] = []
        self.events: list[list[Event]] = []

    def check(self) -> int:
        """One update, compared to the last bit; the bytes that it sent."""
        report = self._job.update()
        if not report.exact:
            raise AssertionError(f"{self.topology.text()}: {report.problems()}")
        self._job.on_receivers("forget", stop=True)
        return report.bytes

    def update(self) -> float:
        """Seconds of one update, on the lead."""
        ranks = self._job.on_trainers("update")
        metrics = {name.removeprefix("update_weight/").removesuffix("_s"): value for name, value in ranks[0]["metrics"].items()}
        self.phases.append(metrics)
        self.events.append([event for rank in ranks for event in rank["events"]])
        return metrics["total"]

    def run(self, scenario: str, on: Sequence[int], **kwargs: Any) -> list[Any]:
        return self._job.world.run(f"benchmarks.rivals:{scenario}", on=on, deadline=self._job.deadline, **kwargs)

    @property
    def receivers(self) -> list[int]:
        return list(self._job.world.receiver_ranks)

    def said(self) -> list[Any]:
        return self._job.generate()


class Checkpoints:
    """The rival: files and vLLM's own ways to load them, in the world of pipeline 1."""

    def __init__(self, sync: Sync, other_checkpoint: str) -> None:
        self._sync = sync
        self.restart_s: float = max(sync.run("restart", sync.receivers, checkpoint=other_checkpoint))

    def save_and_reload(self, folder: Path) -> float:
        """Saving on one rank, then reloading on all engines at once."""
        (saved_s,) = self._sync.run("save", [0], checkpoint=self._sync.checkpoint, folder=str(folder))
        reloaded_s: float = max(self._sync.run("reload", self._sync.receivers, checkpoint=str(folder)))
        return float(saved_s) + reloaded_s

    def check(self, folder: Path) -> None:
        """Engines that were built from another checkpoint say what the updated ones say, once they have reloaded."""
        self.save_and_reload(folder)
        if self._sync.run("generate", self._sync.receivers) != self._sync.said():
            raise AssertionError("engines that reloaded the checkpoint say something else than engines that were updated")


# --- the tables ---------------------------------------------------------------------------------------------------------
def phase_rows(one: Sync, two: Sync) -> list[list[str]]:
    rows = []
    for phase in PHASES:
        mine, theirs = (statistics.median(update.get(phase, 0.0) for update in sync.phases) for sync in (one, two))
        rows.append([phase, in_units(mine, "s"), in_units(theirs, "s"), in_units(theirs - mine, "s")])
    return rows


def stage_rows(one: Sync, two: Sync) -> list[list[str]]:
    kinds: dict[str, Callable[[list[Event]], list[float]]] = {
        "status barriers": barrier_costs_s, "opening a transfer group": partial(durations_s, name="open"),
        "closing it": partial(durations_s, name="close")}
    rows = []
    for what, costs in kinds.items():
        row = [what]
        for sync in (one, two):
            found = [costs(events) for events in sync.events]
            number = len(found[0])
            middle = statistics.median(cost for update in found for cost in update) if number else 0.0
            row.append(f"{number} × {in_units(middle, 's')}" if number else "–")
        rows.append(row)
    return rows


def rival_rows(samples: Mapping[str, Samples], restart_s: float) -> list[list[str]]:
    fast = samples["pipeline 1"]
    rows = [[name, in_units(s.median_s, "s"), f"{s.times(fast):.2f}", f"{100 * s.spread:.0f} %"] for name, s in samples.items()]
    anew = ["engines built anew from the checkpoint (once)", in_units(restart_s, "s"), f"{restart_s / fast.median_s:.2f}", ""]
    return [*rows, anew]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options("update", __doc__ or "", rounds=7)
    parser.add_argument("--engines", type=positive, default=1, help="engines of each world (default 1)")
    parser.add_argument("--layers", type=positive, default=8, help="decoder layers (default 8, which is 323 MB)")
    parser.add_argument("--bucket-mib", type=positive, default=64, help="bucket size (default 64)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cuda needs 2 GPUs and one an engine")
    run(parser.parse_args(arguments))


def run(used: argparse.Namespace) -> None:
    device = choose(used.device, 2 + used.engines)
    print(device.text())
    machine = Machine.look("CUDA with NCCL" if device.name == "cuda" else "CPU with gloo and vLLM's CPU build")
    shape = {} if used.small else MODEL | {"num_layers": used.layers}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mine, other = (str(make_checkpoint(home / f"step{step}", "qwen3", step=step, **shape)) for step in (0, 1))
        pool = WorldPool(root=home)
        stack.callback(pool.close)
        one, two = (Sync(pool, Topology(pp=pp, engines=used.engines, device=device.name), mine, used.bucket_mib << 20)
                    for pp in (1, 2))
        sizes = one.check(), two.check()
        assert sizes[0] == sizes[1], f"both worlds should send the same bytes, got {sizes}"
        checkpoints, folders = Checkpoints(one, other), checkpoint_folders(stack)
        contestants: dict[str, Callable[[], float]] = {"pipeline 1": one.update, "pipeline 2, staged": two.update}
        for what, folder in folders.items():
            config_only_copy(mine, folder)
            checkpoints.check(folder)
            contestants[f"checkpoint in {what}: save, reload"] = partial(checkpoints.save_and_reload, folder)
        samples = interleave(contestants, used.rounds)
    report(used, machine, one, two, samples, checkpoints.restart_s, sizes[0])


def report(used: argparse.Namespace, machine: Machine, one: Sync, two: Sync, samples: Mapping[str, Samples], restart_s: float,
           nbytes: int) -> None:
    print(f"{in_units(nbytes, 'B')} to {used.engines} engine(s), packed buckets of {used.bucket_mib} MiB, median of "
          f"{used.rounds} rounds; every tensor and token was compared before\n")
    show("phases, on the lead, barriers included", ["", "pipeline 1", "pipeline 2", "difference"], phase_rows(one, two))
    show("what a stage adds to its bytes", ["", "pipeline 1", "pipeline 2"], stage_rows(one, two))
    per_stage_s = statistics.median(b - a for a, b in zip(samples["pipeline 1"].seconds, samples["pipeline 2, staged"].seconds,
                                                          strict=True)) / 2
    print(f"the difference of the totals, for each of the two stages: {in_units(per_stage_s, 's')} (median over the rounds)\n")
    show("instead", ["", "seconds", "of pipeline 1", "spread"], rival_rows(samples, restart_s), machine.caption())
    worlds = {"pipeline 1": one, "pipeline 2": two}
    write_json(used.json, "update", machine, used, {
        "bytes": nbytes, "restart_s": restart_s, "per_stage_s": per_stage_s,
        "phases": {name: sync.phases for name, sync in worlds.items()},
        "barriers_s": {name: list(map(barrier_costs_s, sync.events)) for name, sync in worlds.items()},
        **{name: s.to_json() for name, s in samples.items()}})


if __name__ == "__main__":
    main()
