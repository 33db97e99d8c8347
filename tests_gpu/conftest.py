"""The world tier: deadlines that nest, worlds that are shared, and a summary that says what was proven."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conftest import chosen_device
from harness.checkpoints import make_checkpoint
from harness.report import print_summary, write_json
from harness.world.deadline import Deadline
from harness.world.devices import DEFAULT_MATRIX, ENGINES, Device, choose, replicas
from harness.world.job import SyncJob, SyncReport
from harness.world.nesting import WORLD_GUARD_S, check_nesting
from harness.world.pool import BRIDGE_MODULE, HEAVY, WorldPool
from harness.world.wire import Topology
from harness.world.world import World

FAMILIES = ("qwen3", "qwen2", "llama")

_device = pytest.StashKey[Device]()
_reports = pytest.StashKey[list[SyncReport]]()


# --- the run ------------------------------------------------------------------------------------------------------------
def pytest_configure(config: pytest.Config) -> None:
    """Decide the device before anything else; `--device cuda` with too few GPUs ends the run here."""
    config.stash[_device] = chosen_device(config)
    config.stash[_reports] = []
    _say(config.stash[_device].text())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _device in config.stash:
        _say(config.stash[_device].text())


def _say(text: str) -> None:
    """Before pytest's first line and after its last one, where it has no terminal reporter to ask."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = config.stash[_reports]
    if reports:
        terminalreporter.ensure_newline()
        print_summary(reports, sys.stdout)
    if config.option.report:
        write_json(reports, Path(config.option.report))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every world test has a deadline, and pytest-timeout's is outside it: the report must have time to be made. Where the
    command line names a topology, tests that bring their own do not run; where it names the main job's (one tensor parallel
    rank), what goes beyond the main job waits for a larger one, so that the first look takes a minute. Tests of bridge export
    need the bridges, so they run alone, with `--export bridge`."""
    wanted = [item for item in items if (item.get_closest_marker("bridge") is not None) == (config.option.export == "bridge")]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
    if _names_a_topology(config):
        left_out = {"own_world"} | ({"beyond_main_job"} if (config.option.tp or 1) == 1 else set())
        own = [item for item in items if left_out & {marker.name for marker in item.iter_markers()}]
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]
    for item in items:
        if not {"worlds", "world", "nccl_timeout"} & {*getattr(item, "fixturenames", ()), *(m.name for m in item.iter_markers())}:
            continue
        limit_s, outer = _limit_s(item), item.get_closest_marker("timeout")
        if outer is None:
            item.add_marker(pytest.mark.timeout(limit_s + WORLD_GUARD_S))
        else:
            check_nesting(item.nodeid, limit_s, float(outer.args[0] if outer.args else outer.kwargs["timeout"]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`topology` and `family` follow the command line; a test marked `needs` runs only in worlds that have what it is about."""
    options = metafunc.config.option
    if "topology" in metafunc.fixturenames:
        least = next((mark.kwargs for mark in metafunc.definition.iter_markers("needs")), {})
        matrix = ((options.tp or 1, options.pp or 1),) if _names_a_topology(metafunc.config) else DEFAULT_MATRIX
        matrix = tuple((tp, pp) for tp, pp in matrix if tp >= least.get("tp", 1) and pp >= least.get("pp", 1))
        metafunc.parametrize("topology", matrix, ids=[f"tp{tp}-pp{pp}" for tp, pp in matrix], indirect=True, scope="session")
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", options.model or FAMILIES)


def _names_a_topology(config: pytest.Config) -> bool:
    return any(size is not None for size in (config.option.tp, config.option.pp, config.option.ep))


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("nccl_timeout")
    return float(marker.args[0]) if marker is not None else float(item.config.option.nccl_timeout)


# --- fixtures -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    modules = (*HEAVY, BRIDGE_MODULE) if request.config.option.export == "bridge" else HEAVY
    pool = WorldPool(modules, root=tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest) -> Topology:
    (tp, pp), ep = request.param, request.config.option.ep or 1
    return Topology(tp=tp, pp=pp, dp=replicas(tp, ep), ep=ep, engines=ENGINES, device=request.config.stash[_device].name)


@pytest.fixture
def world(worlds: WorldPool, topology: Topology) -> World:
    """A live world of the topology, fit for this test."""
    return worlds.get(topology)


@pytest.fixture
def deadline(request: pytest.FixtureRequest, world: World) -> Deadline:
    """Of this test; begins when its world is up (starting one has its own deadline)."""
    return Deadline.after(_limit_s(request.node))


Checkpoints = Callable[..., str]
ThreeUpdates = Callable[..., tuple[SyncJob, list[SyncReport]]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(family, step=0, **shape)`: the path of a checkpoint, made once per session."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, str]()

    def checkpoint(family: str, step: int = 0, **shape: Any) -> str:
        name = "-".join([family, f"step{step}", *(f"{key}{value}" for key, value in sorted(shape.items()))])
        if name not in made:
            made[name] = str(make_checkpoint(root / name, family, step=step, **shape))
        return made[name]

    return checkpoint


@pytest.fixture
def start_job(request: pytest.FixtureRequest, world: World, deadline: Deadline) -> Callable[..., SyncJob]:
    """`start_job(checkpoint, **options)`: the main job, prepared; named after the test in the summary."""

    def start(checkpoint: str, **options: Any) -> SyncJob:
        name = request.node.originalname.removeprefix("test_").replace("_", " ")
        return SyncJob(world, checkpoint, deadline, scenario=options.pop("scenario", name), **options)

    return start


@pytest.fixture
def exact(request: pytest.FixtureRequest) -> Callable[[SyncReport], SyncReport]:
    """Assert that an update was exact on every engine, and show it in the summary."""

    def check(report: SyncReport) -> SyncReport:
        request.config.stash[_reports].append(report)
        assert report.exact, report.problems()
        return report

    return check


def on_device(config: pytest.Config, topology: Topology) -> Topology:
    """A test's own topology on the device that the command line asks for."""
    return msgspec.structs.replace(topology, device=choose(config.option.device, topology.gpus).name)


@pytest.fixture
def own_deadline(request: pytest.FixtureRequest) -> Deadline:
    """As `deadline`, for tests that choose their world themselves."""
    return Deadline.after(_limit_s(request.node))


@pytest.fixture
def three_updates(request: pytest.FixtureRequest, worlds: WorldPool, checkpoints: Checkpoints,
                  exact: Callable[[SyncReport], SyncReport]) -> ThreeUpdates:
    """`three_updates(sizes, family, build=…, args=…, export=…, **shape)`: a job of its own topology with one engine, and three
    updates with three steps' weights, each exact; the job and their reports."""
    def updates(sizes: dict[str, int], family: str, *, build: dict[str, Any] | None = None, args: dict[str, Any] | None = None,
                export: str = "raw", **shape: Any) -> tuple[SyncJob, list[SyncReport]]:
        topology = on_device(request.config, Topology(engines=1, **sizes))
        steps = [checkpoints(family, step, **shape) for step in (0, 1, 2)]
        job = SyncJob(worlds.get(topology), steps[0], Deadline.after(_limit_s(request.node)), build=build, export=export,
                      scenario=request.node.name.removeprefix("test_").replace("_", " "),
                      args={"update_weight_buffer_size": 1 << 18} | (args or {}))
        job.connect()
        reports = []
        for step in steps:
            job.load(step)
            reports.append(exact(job.update()))
        return job, reports

    return updates
