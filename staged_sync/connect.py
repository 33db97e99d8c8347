"""What all trainer ranks agree on at connect, before anything is paused: who is where, who sends what, over which wire.

Two status barriers: everybody brings its coordinates, its problems and (sources) what its stage will send; the lead checks
completeness and the engines, and the second barrier carries its verdict. All problems of all ranks are raised as one error,
on every rank.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import torch

from staged_sync.completeness import CheckpointIndexError, coverage_problems, read_index
from staged_sync.config import Settings
from staged_sync.control import CALL, Control, Deadline, Status, different_calls
from staged_sync.engines.info import EngineInfo
from staged_sync.errors import CompletenessError, ConfigurationError, TransportError, bullets
from staged_sync.exporter import Exporter, Part, TensorMeta
from staged_sync.peers import gather_problems
from staged_sync.plan import (
    Phase,
    Step,
    Topology,
    TopologyError,
    group_name,
    is_source,
    keeps_its_group,
    phases_of,
    plan_update,
    sends,
)
from staged_sync.seam import Coordinates, Seam, Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.waiting import call_engine, wait_all

logger = logging.getLogger(__name__)

NAMES_IN_LOG = 10


@dataclass(frozen=True)
class Connection:
    """The agreement. Everything an update needs and nothing that changes during one."""

    fleet: Fleet
    topology: Topology
    exporter: Exporter
    announced: tuple[tuple[TensorMeta, ...], ...]
    """By stage: what its source said it will send."""
    wire: Wire
    plan: tuple[Step, ...]
    serial: str
    """Names this agreement: ranks that hold another one must not update together."""
    unclean: tuple[int, ...]
    """Engines that say that a session of somebody else has left something behind."""
    group_held: bool
    """Whether no engine says that it holds another group than the persistent one."""

    @property
    def keeps_its_group(self) -> bool:
        return keeps_its_group(self.topology.pp, self.exporter.contract)

    @cached_property
    def phases(self) -> list[tuple[Phase, list[Step]]]:
        return phases_of(self.plan)


@dataclass(frozen=True)
class Local:
    """What this rank found out by itself: an exporter or the reasons why there is none."""

    exporter: Exporter | None
    index: Mapping[str, TensorMeta]
    announces: Sequence[TensorMeta]
    gathers: Mapping[Part, Sequence[str]]
    problems: Sequence[str]


def look_around(seam: Seam, checkpoint: Any, make_exporter: Callable[[Mapping[str, TensorMeta] | None], Exporter],
                problems: Sequence[str]) -> Local:
    """Build this rank's exporter and let it look at the model. Only sources and the lead read the checkpoint's header."""
    found = list(problems)
    me = seam.coordinates()
    index: Mapping[str, TensorMeta] = {}
    if is_source(me) or me.rank == Topology.LEAD:
        try:
            if not checkpoint:
                raise CheckpointIndexError("args.hf_checkpoint must name the HF checkpoint directory (got nothing)")
            index = read_index(checkpoint)
        except CheckpointIndexError as error:
            found.append(str(error))
    exporter = None
    announces: Sequence[TensorMeta] = ()
    gathers: dict[Part, Sequence[str]] = {}
    try:
        exporter = make_exporter(index or None)
        found += exporter.problems()
        if not found:
            announces = list(exporter.describe()) if sends(me, exporter.contract) else ()
            if wrong := [meta for meta in announces if not isinstance(meta, TensorMeta)]:
                raise TypeError(f"describe() must give TensorMeta (got {wrong[0]!r})")
            gathers = {part: exporter.gathers(part) for part in exporter.passes}
    except Exception as error:
        found.append(f"the exporter cannot be built, or cannot say what it exports: {type(error).__name__}: {error}")
    return Local(exporter, index, announces, gathers, found)


def negotiate(seam: Seam, trace: Trace, control: Control, settings: Settings, local: Local, engines: Sequence[Any],
              counts: Sequence[int], lock: Any) -> Connection:
    """Agree with all ranks. Raises `ConfigurationError` or `CompletenessError` with the same text on every rank."""
    timeout_s = settings.timeouts.phase_s + settings.timeouts.grace_s
    wire = Wire(seam.backend, settings.packed, settings.packed_buffer_bytes)
    mine = _introduce(seam, local) | {
        "engines": [[seam.identity(engine), count] for engine, count in zip(engines, counts, strict=False)],
        "wire": [*astuple(wire), settings.post_process], "pace": _pace(settings), CALL: "connect_rollout_engines"}
    statuses = control.barrier("connect", Status(data=mine), timeout_s=timeout_s)
    if calls := different_calls(statuses):
        raise ConfigurationError([calls])
    _raise_problems(statuses)
    if problems := _different(statuses):
        raise ConfigurationError(problems)
    topology = Topology(tuple(Coordinates(*status.data["coordinates"]) for status in statuses))
    try:
        topology.check()
        announced = tuple(_metas(statuses[rank].data["announces"]) for rank in topology.sources)
    except TopologyError as error:
        raise ConfigurationError([str(error)]) from error
    if problems := _contract_problems(statuses) or gather_problems(topology, [status.data["gathers"] for status in statuses]):
        raise ConfigurationError(problems)
    verdict: dict[str, Any] = {}
    assert local.exporter is not None  # a rank without exporter has reported a problem, which was raised above
    if seam.coordinates().rank == Topology.LEAD:
        try:
            verdict = {"coverage": coverage_problems(announced, local.index, local.exporter.optional),
                       "serial": secrets.token_hex(8)}
            verdict |= _inspect_engines(seam, trace, engines, counts, wire, settings)
        except Exception as error:
            verdict = {"problems": [f"what was announced cannot be checked: {type(error).__name__}: {error}"]}
    statuses = control.barrier("connect checked", Status(data=verdict), timeout_s=timeout_s)
    _raise_problems(statuses)
    agreed = statuses[Topology.LEAD].data
    if agreed["coverage"]:
        raise CompletenessError(bullets("what the stages export is not what the HF checkpoint names:", agreed["coverage"]))
    if seam.coordinates().rank == Topology.LEAD:
        _tell_what_stays(announced, local.index)
    fleet = Fleet(tuple(engines), tuple(counts), lock, tuple(agreed["packed_in_init"]))
    empty = {stage for stage, metas in enumerate(announced) if not metas}
    plan = plan_update(topology.pp, contract=local.exporter.contract, passes=local.exporter.passes, empty_stages=empty,
                       post_process=settings.post_process)
    return Connection(fleet, topology, local.exporter, announced, wire, plan, agreed["serial"], tuple(agreed["unclean"]),
                      agreed["group_held"])


def _introduce(seam: Seam, local: Local) -> dict[str, Any]:
    return {"coordinates": astuple(seam.coordinates()), "problems": list(local.problems),
            "gathers": dict(local.gathers),
            "contract": [local.exporter.contract, *local.exporter.passes] if local.exporter is not None else [],
            "announces": [[m.name, str(m.dtype).removeprefix("torch."), list(m.shape)] for m in local.announces]}


def _pace(settings: Settings) -> dict[str, float]:
    """What ranks must share to come to the same barriers, by its name in args: the buckets of an export that all ranks iterate
    end in one, and a rank that gives up before the others is taken for an absent one."""
    timeouts = settings.timeouts
    return {"update_weight_buffer_size": settings.bucket_bytes, "update_weight_call_timeout": timeouts.call_s,
            "update_weight_phase_timeout": timeouts.phase_s, "update_weight_timeout": timeouts.update_s}


def _metas(announces: Sequence[Sequence[Any]]) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in announces)


def _tell_what_stays(announced: Sequence[Sequence[TensorMeta]], index: Mapping[str, TensorMeta]) -> None:
    """Say which of the checkpoint's tensors the family excuses and nobody sends; nothing where all are sent."""
    sent = {meta.name for metas in announced for meta in metas}
    if stay := [name for name in index if name not in sent]:
        logger.info("%d tensor(s) of the HF checkpoint are sent by nobody, so engines keep what they have for them: %s",
                    len(stay), ", ".join(stay[:NAMES_IN_LOG] + ["…"] * (len(stay) > NAMES_IN_LOG)))


def _raise_problems(statuses: Sequence[Status]) -> None:
    """Every rank's problems as one error; what several ranks say alike is said once, with the ranks."""
    said: dict[str, list[int]] = {}
    for rank, status in enumerate(statuses):
        for problem in status.data.get("problems", ()):
            said.setdefault(problem, []).append(rank)
    if said:
        raise ConfigurationError([f"{problem} [{_ranks(ranks, len(statuses))}]" for problem, ranks in said.items()])


def _different(statuses: Sequence[Status]) -> list[str]:
    """What must be the same on all ranks and is not: the engines, in order, the wire, and the pace."""
    lead, problems = statuses[Topology.LEAD].data, []
    for rank, status in enumerate(statuses):
        if _shown(status.data["engines"], lead["engines"]) != _shown(lead["engines"], status.data["engines"]):
            problems.append(f"rollout_engines and engine_gpu_counts must be the same, in the same order, on every rank: rank "
                            f"{rank} has {status.data['engines']}, rank {Topology.LEAD} has {lead['engines']} (identity and "
                            f"workers of each). Fetch them once and hand them to all ranks")
        if status.data["wire"] != lead["wire"]:
            problems.append(f"the wire must be the same on every rank: rank {rank} has {status.data['wire']}, rank "
                            f"{Topology.LEAD} has {lead['wire']} (backend, packed, bytes of a packed chunk, post-processing)")
        problems += [f"args.{setting} must be the same on every rank: rank {rank} has {value}, rank {Topology.LEAD} has "
                     f"{lead['pace'][setting]}" for setting, value in status.data["pace"].items()
                     if value != lead["pace"][setting]]
    return problems


def _shown(engines: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """`engines`, without identities where one side does not know them."""
    known = all(identity for identity, _ in [*engines, *others])
    return [engine if known else engine[1:] for engine in engines]


def _contract_problems(statuses: Sequence[Status]) -> list[str]:
    """All ranks must follow one plan, so they must export under one contract and in the same passes."""
    contracts: dict[str, list[int]] = {}
    for rank, status in enumerate(statuses):
        contracts.setdefault(" ".join(status.data["contract"]), []).append(rank)
    if len(contracts) == 1:
        return []
    kinds = "; ".join(f"{contract} on {_ranks(ranks, len(statuses))}" for contract, ranks in contracts.items())
    return [f"the exporters' contract and passes must be the same on all ranks (got {kinds}): give every rank the same exporter"]


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:8])) + (f", … {len(ranks)} in all" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _inspect_engines(seam: Seam, trace: Trace, engines: Sequence[Any], counts: Sequence[int], wire: Wire,
                     settings: Settings) -> dict[str, Any]:
    """Ask the engines that can tell what they are; compare with what was announced. Plain vime engines are not asked."""
    packed_in_init, problems, unclean, group_held = [False] * len(engines), [], [], True
    asked = [i for i, engine in enumerate(engines) if seam.has_method(engine, "get_weight_transfer_info")]
    deadline = Deadline(seam.now() + settings.timeouts.call_s, "update_weight_call_timeout")
    for i in asked:
        try:
            reply = wait_all(seam, trace, [call_engine(seam, trace, i, engines[i], "get_weight_transfer_info")], deadline)[0]
            info = EngineInfo.from_dict(reply)
        except Exception as error:
            problems.append(f"rollout engine {i} cannot be asked what it is: {error}")
            continue
        packed_in_init[i] = info.packed_in == "init"
        group_held = group_held and info.group_name == group_name(0)
        if info.session_open or not info.weights_complete:
            unclean.append(i)
        if info.workers != counts[i]:
            problems.append(f"engine_gpu_counts[{i}] must be the number of workers of rollout engine {i} (got {counts[i]}, the "
                            f"engine has {info.workers}): the transfer group would wait for ranks that do not exist")
        if info.backend != wire.backend:
            problems.append(f"rollout engine {i} receives with weight-transfer backend {info.backend!r}, this trainer sends "
                            f"with {wire.backend!r}: start the engine with weight_transfer_config={{'backend': "
                            f"'{wire.backend}'}}")
        if wire.packed and info.packed_in == "update" and info.packed_buffer_size_bytes not in (None,
                                                                                                wire.packed_buffer_size_bytes):
            problems.append(f"args.update_weight_packed_buffer_size must be {info.packed_buffer_size_bytes} for rollout engine "
                            f"{i} (got {wire.packed_buffer_size_bytes}): its vLLM cannot be told, and would cut the packed "
                            f"stream elsewhere")
    return {"packed_in_init": packed_in_init, "problems": problems, "unclean": unclean, "group_held": group_held}


def check_reachable(seam: Seam, trace: Trace, fleet: Fleet, settings: Settings, deadline: Deadline) -> None:
    """Listen as this source will, and let every engine that can try to dial it: a stock worker that is told an address it
    cannot reach would wait there for 300 s. Raises `EngineError` with both addresses."""
    asked = [i for i, engine in enumerate(fleet.engines) if seam.has_method(engine, "check_reachable")]
    if not asked:
        return
    try:
        listener = seam.listen(address=settings.address, port_range=settings.port_range)
    except TransportError:
        if settings.port_range is None:
            raise
        return  # the sources of other stages on this host may be trying the few ports just now; in an update they take turns
    try:
        tries = [call_engine(seam, trace, i, fleet.engines[i], "check_reachable", host=listener.host, port=listener.port,
                             timeout_s=settings.timeouts.grace_s) for i in asked]
        wait_all(seam, trace, tries, deadline)
    finally:
        listener.close()
