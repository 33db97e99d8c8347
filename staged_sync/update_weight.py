"""`UpdateWeightFromDistributed`: what a trainer imports. Call-compatible with vime's class of the same name.

Life cycle: `connect_rollout_engines` (all ranks agree on everything that can be known before a byte moves; with one pipeline
stage the transfer group is opened here and kept), then `update_weights` after each optimizer step. Both are collective over
all trainer ranks. docs/failures.md says what happens when something breaks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from staged_sync.completeness import StageReport
from staged_sync.config import engine_counts, mode_problems, read_settings
from staged_sync.connect import Connection, Local, check_reachable, look_around, negotiate
from staged_sync.control import Control, Status
from staged_sync.errors import CompletenessError, ConfigurationError, Failure, RanksAbsent, UpdateFailed, UpdateInProgress
from staged_sync.exporter import Exporter, TensorMeta
from staged_sync.in_step import FIRST, first_words
from staged_sync.metrics import Metrics
from staged_sync.plan import Topology, group_name, sends
from staged_sync.rank import FirstFailure, Rank, SourceState
from staged_sync.seam import Seam
from staged_sync.trace import Trace
from staged_sync.update import Update

logger = logging.getLogger(__name__)

CONNECTING = "connecting the rollout engines"
NOTHING_DONE = ("Nothing was paused and no weights were touched. No engines are connected now: mend the cause and call "
                "connect_rollout_engines() again on every rank.")

NOT_CONNECTED = "no rollout engines are connected"

AGREED = (ConfigurationError, CompletenessError, UpdateFailed)
"""What connecting raises on all ranks alike, from what they told each other."""

PLACEMENT = frozenset({"engine_parallel_configs"})
"""Keywords of newer vime releases that say where an engine runs."""

PHASES = ("pause", "start", "send", "finish", "publish", "resume")


class UpdateWeightFromDistributed:
    """Sends all weights of a Megatron model to vLLM rollout engines on other devices.

    `args`: any object with Megatron's and vime's attribute names (docs/configuration.md). `model`: this rank's model chunks.
    `weights_getter`: serves bridge export only, as does `bridge`: what to export with where `args.megatron_to_hf_mode` is
    `bridge` (docs/bridge.md); Megatron-Bridge if None, as in vime. `seam` and `exporter` replace the real world and the export
    (tests, other exporters).
    """

    def __init__(self, args: Any, model: Sequence[torch.nn.Module], weights_getter: Callable[[], Mapping[str, Any]] | None,
                 *, model_name: str, quantization_config: Mapping[str, Any] | None, seam: Seam | None = None,
                 exporter: Exporter | None = None, bridge: Any = None) -> None:
        self.args = args
        self.model = model
        self.weights_getter = weights_getter
        self.model_name = model_name
        self.quantization_config = quantization_config
        self.weight_version = 0
        """The version that all engines published last; 0 before the first update."""
        self.poisoned: str | None = None
        """What happened and what to do, while engines may hold a mixture of weights; None when all is well."""
        settings, self._problems = read_settings(args, quantization_config)
        self._problems += mode_problems(args, quantization_config, own_exporter=exporter is not None)
        if seam is None:
            from staged_sync.live_seam import LiveSeam  # torch.distributed and Megatron are needed from here on
            seam = LiveSeam(model)
        number = seam.coordinates().rank
        trace = Trace(number, seam.now)
        self._rank = Rank(number, seam, trace, Control(seam, trace), Metrics(seam.now), settings, SourceState())
        self._exporter = exporter
        self._bridge = bridge
        self._link: Connection | None = None
        # Both hold what `_names` says, so that a replaced engine is not kept alive:
        self._up_to_date: list[Any] | None = None  # engines of the last complete update; before it, of the first connect
        self._unclean: list[Any] = []  # engines that a failed update has left in a session, or with parts of one
        self.rollout_engines: Sequence[Any] = ()
        self.rollout_engine_lock: Any = None
        self._busy = threading.Lock()

    @property
    def trace(self) -> Trace:
        """What this rank did, as an ordered list of events, and where it stands."""
        return self._rank.trace

    @property
    def group_name(self) -> str | None:
        """The transfer group this rank sends over: set on the persistent source, or on the active one during its stage."""
        return self._rank.source.group_name

    # --- connecting -----------------------------------------------------------------------------------------------------

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any,
                                engine_gpu_counts: Sequence[int] | None = None,
                                engine_gpu_offsets: Sequence[int] | None = None, **placement: Any) -> None:
        """Agree with all ranks on engines, roles, tensors and wire. A collective over all trainer ranks; may be called again
        at any time with other engines.

        `engine_gpu_counts`: workers per engine (default `args.rollout_num_gpus_per_engine` each). `engine_gpu_offsets` and
        other placement keywords (vime's `engine_parallel_configs`) say where an engine runs, which does not matter here.
        Raises `ConfigurationError` or `CompletenessError` with all problems of all ranks, before anything is paused or opened,
        and `UpdateFailed` where a rank does not come, an engine cannot dial a source, or a group cannot be opened. After any of
        them no engines are connected.
        """
        rank = self._rank
        self.rollout_engines, self.rollout_engine_lock = rollout_engines, rollout_engine_lock
        if unknown := set(placement) - PLACEMENT:
            logger.warning("connect_rollout_engines ignores keywords that it does not know: %s", ", ".join(sorted(unknown)))
        with self._exclusively("connect_rollout_engines"), rank.trace.at(phase="connect"), torch.no_grad():
            self._link = None
            self._meet_all(CONNECTING)
            with self._together():
                counts, problems = engine_counts(self.args, rollout_engines, engine_gpu_counts)
                local = look_around(rank.seam, getattr(self.args, "hf_checkpoint", None), self._make_exporter,
                                    self._problems + problems)
                link = self._negotiate(local, rollout_engines, counts, rollout_engine_lock)
                group = rank.source.group
                if group is None or not (link.keeps_its_group and link.group_held and group.fleet.same_as(
                        rollout_engines, counts, rollout_engine_lock)):
                    self._leave_group()
                self._try_the_way(link)
            self._note_unclean([rollout_engines[i] for i in link.unclean])
            if self._up_to_date is None:
                self._up_to_date = self._names(link.fleet.engines)
            self._link = link

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, all ranks meet; a rank that leaves tells the others why, and no raw error of the control group gets out."""
        try:
            yield
        except AGREED:
            raise
        except RanksAbsent as error:
            failure = Failure(None, "connecting", "RanksAbsent", str(error))
            raise UpdateFailed([failure], what=CONNECTING, state="untouched", aftermath=NOTHING_DONE) from error
        except BaseException as error:
            number = self._rank.number
            self._rank.control.give_up(f"rank {number} left connect_rollout_engines: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            failure = Failure(number, self._rank.trace.position_of(error).text(), type(error).__name__, str(error))
            raise UpdateFailed([failure], what=CONNECTING, state="untouched", aftermath=NOTHING_DONE) from error

    def _meet_all(self, what: str) -> None:
        """Make sure that there is a control group. Raises `UpdateFailed` where a rank does not come."""
        try:
            self._rank.control.ensure_open(timeout_s=self._rank.settings.timeouts.phase_s)
        except RanksAbsent as error:
            failure = Failure(None, "opening the control group", "RanksAbsent", str(error))
            raise UpdateFailed([failure], what=what, state="untouched", aftermath=(
                "Nothing was sent. Mend the cause and call again.")) from error

    def _negotiate(self, local: Local, engines: Sequence[Any], counts: Sequence[int], lock: Any) -> Connection:
        rank = self._rank
        return negotiate(rank.seam, rank.trace, rank.control, rank.settings, local, engines, counts, lock)

    def _make_exporter(self, index: Mapping[str, TensorMeta] | None) -> Exporter:
        if self._exporter is not None:
            return self._exporter
        if getattr(self.args, "megatron_to_hf_mode", "raw") == "bridge":
            from staged_sync.megatron.bridge_export import BridgeExporter
            from staged_sync.megatron.bridges import marked
            return BridgeExporter(self.args, self.model, marked(self._bridge, self.args, self.model, self.weights_getter),
                                  seam=self._rank.seam, hf_tensors=index, trace=self._rank.trace)
        from staged_sync.megatron.raw_export import RawExporter  # the model's families, only where they are needed
        return RawExporter(self.args, self.model, model_name=self.model_name, seam=self._rank.seam, hf_tensors=index,
                           trace=self._rank.trace, quantization_config=self.quantization_config)

    def _try_the_way(self, link: Connection) -> None:
        """Every rank that will send makes sure that the engines can dial it; where it sends everything it opens the only
        transfer group now and keeps it. All ranks learn how it went."""
        rank, failure = self._rank, FirstFailure(self._rank)
        timeouts = rank.settings.timeouts
        me = rank.seam.coordinates()
        if sends(me, link.exporter.contract) and rank.source.group is None:
            deadline = rank.deadline(timeouts.call_s, "update_weight_call_timeout")
            try:
                with rank.trace.at(stage=me.pp):
                    check_reachable(rank.seam, rank.trace, link.fleet, rank.settings, deadline)
                    if link.keeps_its_group:
                        rank.open_group(link.fleet, group_name(me.pp), link.wire, deadline)
            except Exception as error:
                failure.keep(error)
        statuses = rank.control.barrier("connected", Status(failure.failure), timeout_s=timeouts.phase_s + timeouts.grace_s)
        failures: list[Failure] = [status.failure for status in statuses if status.failure is not None]
        if failures:
            raise UpdateFailed(failures, what=CONNECTING, state="untouched", aftermath=NOTHING_DONE)

    def disconnect_rollout_engines(self) -> None:
        """Close the persistent transfer group, if this rank holds one, and forget the engines. Not a collective."""
        with self._exclusively("disconnect_rollout_engines"), self._rank.trace.at(phase="disconnect"):
            self._link = None
            self._leave_group()

    def _leave_group(self) -> None:
        """What does not work is logged: this rank holds the group no longer, and other ranks may wait for it."""
        rank = self._rank
        group, rank.source.group = rank.source.group, None
        rank.set_group_name(None)
        try:
            if group is not None:
                group.leave()
        except Exception:
            logger.warning("the persistent transfer group could not be closed", exc_info=True)

    # --- updating -------------------------------------------------------------------------------------------------------

    def update_weights(self) -> None:
        """Send all weights to all engines and publish them as the next version. A collective over all trainer ranks.

        Raises `UpdateFailed` with the same text on every rank; `weight_version` then stays what it was. Calling again sends
        everything anew.
        """
        with self._exclusively("update_weights"), torch.no_grad():
            link, rank = self._link, self._rank
            if link is None:
                self._tell_that_nobody_is_connected()
                raise ConfigurationError([f"{NOT_CONNECTED}: call connect_rollout_engines() first"])
            rank.metrics.reset()
            with rank.metrics.timed("total"):
                reports = self._update(link, self.weight_version + 1)
            self._account(reports)

    def _tell_that_nobody_is_connected(self) -> None:
        """Ranks that hold a connection wait for this one in the first barrier, and would only learn that it did not come."""
        rank, timeouts = self._rank, self._rank.settings.timeouts
        failure = Failure(rank.number, "phase pause", "ConfigurationError", f"{NOT_CONNECTED} on rank {rank.number}. Call "
                          f"connect_rollout_engines() again on every rank")
        words = first_words(connection="", version=self.weight_version + 1, poisoned=self.poisoned is not None)
        with suppress(UpdateFailed, RanksAbsent):  # some other rank did not come: this one has its own reason to raise
            self._meet_all("weight update")
            rank.control.barrier(FIRST, Status(failure, words), timeout_s=timeouts.phase_s + timeouts.grace_s)

    def _update(self, link: Connection, version: int) -> list[StageReport]:
        rank = self._rank
        self._meet_all("weight update")
        update = Update(rank, link, version, may_resume=self._may_resume(link), unclean=self._indices_of(self._unclean, link),
                        poisoned=self.poisoned is not None)
        try:
            update.run()
        except UpdateFailed as error:
            self._left_behind(update, link, str(error))
            raise
        except BaseException as error:
            self._left_behind(update, link, f"rank {rank.number} left update {update.version} in the middle: "
                                            f"{type(error).__name__}: {error}")
            raise
        self._published(link, update.version)
        return update.reports

    def _left_behind(self, update: Update, link: Connection, what_happened: str) -> None:
        """Remember what a failed update has left behind."""
        match update.state():
            case "poisoned":
                self.poisoned = what_happened
                self._note_unclean(link.fleet.engines)
            case "published":
                self._published(link, update.version)

    def _published(self, link: Connection, version: int) -> None:
        self.weight_version = version
        self.poisoned = None
        self._up_to_date = self._names(link.fleet.engines)
        self._unclean = [name for name in self._unclean if name not in self._up_to_date]

    def _may_resume(self, link: Connection) -> list[int]:
        """Engines that hold the last published weights: they may serve again if nothing has been touched."""
        if self.poisoned is not None or self._up_to_date is None:
            return []
        return self._indices_of([name for name in self._up_to_date if name not in self._unclean], link)

    def _note_unclean(self, engines: Sequence[Any]) -> None:
        self._unclean += [name for name in self._names(engines) if name not in self._unclean]

    def _names(self, engines: Sequence[Any]) -> list[Any]:
        """What engines are remembered by: who they are, or the handle where it does not say. A Ray handle would keep its actor
        alive, and by that the GPU of an engine that was replaced."""
        return [self._rank.seam.identity(engine) or engine for engine in engines]

    def _indices_of(self, names: Sequence[Any], link: Connection) -> list[int]:
        return [i for i, name in enumerate(self._names(link.fleet.engines)) if name in names]

    def _account(self, reports: Sequence[StageReport]) -> None:
        metrics = self._rank.metrics
        for report in reports:
            metrics.add("bytes", report.bytes)
            metrics.add("buckets", report.buckets)
            metrics.add("tensors", report.count)
        if self._rank.number == Topology.LEAD:
            phases = ", ".join(f"{phase} {metrics.get(phase + '_s'):.2f}" for phase in PHASES)
            logger.info("weight version %d is on all engines: %d tensors, %.3f GB, %d buckets, %d stages in %.2f s (%s)",
                        self.weight_version, metrics.get("tensors"), metrics.get("bytes") / 1e9, metrics.get("buckets"),
                        len(reports), metrics.get("total_s"), phases)

    def pop_metrics(self) -> dict[str, float]:
        """Of the last update: `update_weight/<phase>_s` (seconds on this rank, barriers included), `…/total_s`, `…/bytes`,
        `…/buckets`, `…/tensors` (over all stages). Empty when called twice."""
        return self._rank.metrics.pop()

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        """Refuse a second call while one runs on this rank: their collectives would meet each other's."""
        if not self._busy.acquire(blocking=False):
            raise UpdateInProgress(f"{what}() was called on rank {self._rank.number} while another weight sync call is "
                                   f"running on it ({self._rank.trace.position.text()}); wait for it to return")
        try:
            yield
        finally:
            self._rank.trace.forget_error()
            self._busy.release()
