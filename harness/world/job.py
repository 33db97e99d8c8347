"""The main job as the controller drives it: prepare a world, sync, check every engine, say what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from harness.world.deadline import Deadline
from harness.world.rank import RankContext
from harness.world.receiver import EngineReport
from harness.world.wire import Problem
from harness.world.world import World


class SyncReport(msgspec.Struct, frozen=True):
    """One update: what a person wants to see of it, and what a machine can keep."""

    scenario: str
    topology: str
    version: int
    stages: list[str]
    buckets: int
    bytes: int
    seconds: dict[str, float]
    engines: list[EngineReport]

    @property
    def exact(self) -> bool:
        return bool(self.engines) and all(engine.exact for engine in self.engines)

    def problems(self) -> str:
        """Everything that is wrong, engine by engine; empty where all is exact."""
        return "\n".join(f"engine {e.engine}: {e.tensors_equal}/{e.tensors_total} tensors on arrival, "
                         f"{e.parameters_equal}/{e.parameters_total} parameters after finish, tokens equal: {e.tokens_equal}, "
                         f"logprobs equal: {e.logprobs_equal}\n" + "\n".join(f"  - {p}" for p in e.problems[:20])
                         for e in self.engines if not e.exact)


@dataclass(frozen=True)
class Engine:
    """One receiver rank's engine and how trainer ranks reach it."""

    rank: int
    target: dict[str, Any]


class SyncJob:
    """Trainer ranks with `checkpoint`'s weights, engines with none, and the library between them. `served`: what the engines
    must end up with, where that is another form of the same weights (quantised); by default `checkpoint` itself."""

    def __init__(self, world: World, checkpoint: str, deadline: Deadline, *, scenario: str = "main job",
                 engines: int | None = None, args: dict[str, Any] | None = None, backend: str = "gloo",
                 build: dict[str, Any] | None = None, export: str = "raw", served: str | None = None) -> None:
        self.world = world
        self.deadline = deadline
        self.scenario = scenario
        self.checkpoint = checkpoint
        self.served = served or checkpoint
        self.backend = backend
        self.updates: list[list[dict[str, Any]]] = []
        """What `trainer.update` returned, by update and rank."""
        receivers = list(world.receiver_ranks)[:engines]
        values = world.run(prepare, on=[*world.trainer_ranks, *receivers], deadline=deadline, checkpoint=checkpoint,
                           args={"hf_checkpoint": self.served} | (args or {}), timeout_s=self._join_s, backend=backend,
                           build=build, export=export, served=self.served)
        self.engines = [Engine(rank, target) for rank, target in
                        zip(receivers, values[world.topology.trainers:], strict=True)]
        self.chosen = self.engines

    @property
    def _join_s(self) -> float:
        return min(30.0, self.deadline.limit_s / 2)

    def reconfigure(self, checkpoint: str, *, args: dict[str, Any], scenario: str, **setup: Any) -> None:
        """A new model and updater on every trainer rank (`setup`: see `trainer.setup`); the engines stay."""
        self.on_trainers("disconnect")
        self.on_trainers("setup", checkpoint=checkpoint, args=args, timeout_s=self._join_s, **setup)
        self.checkpoint = self.served = checkpoint
        self.scenario = scenario

    def choose(self, engines: Sequence[Engine]) -> None:
        """The engines of the next `connect`, and the ones that updates are checked on."""
        self.chosen = list(engines)

    @property
    def lock(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.world.hub.lock_target)

    def connect(self, counts: Sequence[int] | None = None) -> None:
        self.on_trainers("connect", **self._engines(counts))

    def connect_as(self, scenario: str) -> None:
        """`connect` by another scenario of the trainer ranks."""
        self.world.run(scenario, on=self.world.trainer_ranks, deadline=self.deadline, **self._engines(None))

    def _engines(self, counts: Sequence[int] | None) -> dict[str, Any]:
        sizes = self.world.topology.workers
        if counts is None and sizes:
            counts = [sizes[engine.rank - self.world.topology.trainers] for engine in self.chosen]
        return {"engines": [engine.target for engine in self.chosen], "lock": self.lock,
                "counts": None if counts is None else list(counts)}

    def failures(self, what: Literal["connect", "update"], deadline: Deadline, *,
                 counts: Sequence[int] | None = None) -> list[Problem]:
        """Do what must fail on every trainer rank within `deadline`; their errors, by rank. The world stays fit."""
        kwargs = self._engines(counts) if what == "connect" else {}
        run = self.world.start(f"harness.world.trainer:{what}", on=self.world.trainer_ranks, **kwargs)
        outcomes = run.wait(deadline)
        fine = [rank for rank, outcome in outcomes.items() if outcome.problem is None]
        assert not fine, f"{what} should have failed on every trainer rank; ranks {fine} were content"
        return [outcome.problem for _, outcome in sorted(outcomes.items()) if outcome.problem is not None]

    def plant(self, rank: int, builder: str, /, **place: Any) -> None:
        """A fault on the process of `rank`: `builder` is a method of `harness.faults.Faults`."""
        self.world.run("harness.world.planted:plant", on=[rank], deadline=self.deadline, builder=builder, place=place)

    def harvest(self, rank: int) -> None:
        """The faults planted on `rank` have all struck, exactly once."""
        self.world.run("harness.world.planted:harvest", on=[rank], deadline=self.deadline)

    def survivors(self, deadline: Deadline, *, dead: int) -> list[Problem]:
        """An update in which trainer rank `dead` dies: what the others raise. The world is spent afterwards."""
        self.world.clean = False
        run = self.world.start("harness.world.trainer:update", on=self.world.trainer_ranks)
        outcomes = run.wait(deadline, error_grace_s=deadline.limit_s)
        died = outcomes.pop(dead).problem
        assert died is not None, f"rank {dead} should have died and returned instead"
        assert died.kind == "RankDied", f"rank {dead} should have died, but raised {died.line()}"
        assert all(outcome.problem for outcome in outcomes.values()), "a surviving rank was content"
        return [outcome.problem for outcome in outcomes.values() if outcome.problem is not None]

    def load(self, checkpoint: str, served: str | None = None) -> None:
        """The next optimizer step."""
        self.on_trainers("load", checkpoint=checkpoint)
        self.checkpoint, self.served = checkpoint, served or checkpoint

    def update(self) -> SyncReport:
        """One weight update, then every engine against the checkpoint."""
        self.on_receivers("forget")
        ranks = self.on_trainers("update")
        self.updates.append(ranks)
        checked = self.on_receivers("check", checkpoint=self.served)
        metrics = ranks[0]["metrics"]
        return SyncReport(
            scenario=self.scenario, topology=self.world.topology.short(), version=ranks[0]["version"],
            stages=list(dict.fromkeys(event["group"] for event in self.story("send"))),
            buckets=int(metrics["update_weight/buckets"]), bytes=int(metrics["update_weight/bytes"]),
            seconds={name.removeprefix("update_weight/").removesuffix("_s"): value for name, value in metrics.items()
                     if name.endswith("_s")},
            engines=[msgspec.convert(engine, EngineReport) for engine in checked])

    def story(self, *events: str) -> list[dict[str, Any]]:
        """The last update's events of these kinds, of all trainer ranks, in the order in which they happened."""
        told = [event for rank in self.updates[-1] for event in rank["events"] if event["event"] in events]
        return sorted(told, key=lambda event: event["time_s"])

    def renew_engine(self, engine: int) -> None:
        """A fresh engine in the place of one whose process was replaced."""
        rank = self.engines[engine].rank
        (target,) = self.world.run(prepare, on=[rank], deadline=self.deadline, checkpoint=self.checkpoint, args={},
                                   timeout_s=self._join_s, backend=self.backend, served=self.served)
        self.engines[engine] = Engine(rank, target)
        self.chosen = list(self.engines)

    def generate(self) -> list[dict[str, Any]]:
        return self.on_receivers("generate")

    def on_trainers(self, function: str, **kwargs: Any) -> list[Any]:
        return self.world.run(f"harness.world.trainer:{function}", on=self.world.trainer_ranks, deadline=self.deadline, **kwargs)

    def on_receivers(self, function: str, **kwargs: Any) -> list[Any]:
        return self.world.run(f"harness.world.receiver:{function}", on=[engine.rank for engine in self.chosen],
                              deadline=self.deadline, **kwargs)


def prepare(context: RankContext, *, checkpoint: str, args: dict[str, Any], timeout_s: float, backend: str, served: str,
            build: dict[str, Any] | None = None, export: Any = "raw") -> Any:
    """Models and engines at the same time, each rank its own; imports only what its side needs."""
    if context.is_trainer:
        from harness.world import trainer

        return trainer.setup(context, checkpoint=checkpoint, args=args, timeout_s=timeout_s, build=build,
                             export=export)
    from harness.world import receiver

    return receiver.prepare(context, checkpoint=served, backend=backend)
