"""The source's side of one transfer group: open it, send buckets through it, close it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from staged_sync.config import Timeouts
from staged_sync.control import Deadline
from staged_sync.errors import StagedSyncError, TransportError
from staged_sync.exporter import NamedTensor
from staged_sync.plan import rank_offsets
from staged_sync.seam import Listener, Seam, TransferGroup, Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.waiting import Pending, call_engine, settle, wait_all

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.05
"""vime's lock answers at once with a bool, so a held lock is polled."""

NAMES_IN_TRACE = 32


class OpenGroup:
    """A live transfer group `{source} + {all workers of all engines}` on its source."""

    def __init__(self, seam: Seam, trace: Trace, fleet: Fleet, name: str, wire: Wire, timeouts: Timeouts,
                 group: TransferGroup) -> None:
        self.name = name
        self._timeouts = timeouts
        self._seam = seam
        self._trace = trace
        self.fleet = fleet
        self._wire = wire
        self._group = group

    def send_bucket(self, bucket: Sequence[NamedTensor], deadline: Deadline | None = None, *,
                    packed: bool | None = None) -> None:
        """Announce one bucket to every engine and broadcast it; returns when every engine has answered that it is in.

        `deadline`: default one call from now. `packed`: what the caller believes was agreed, if it wants it checked. Raises
        the first thing that goes wrong on either side; the group must be closed then.
        """
        if not bucket:
            raise ValueError("an empty bucket is never announced")
        if packed is not None and packed != self._wire.packed:
            raise ValueError(f"{self.name} was opened with packed={self._wire.packed}; a bucket cannot be sent packed={packed}")
        if deadline is None:
            deadline = Deadline(self._seam.now() + self._timeouts.call_s, "update_weight_call_timeout")
        names = [name for name, _ in bucket]
        # contiguous at the edge: gloo ships wrong bytes for strided tensors, NCCL reads past them
        tensors = [tensor.detach().contiguous() for _, tensor in bucket]
        shown = names if len(names) <= NAMES_IN_TRACE else [*names[:NAMES_IN_TRACE], f"(+{len(names) - NAMES_IN_TRACE})"]
        with lock_held(self._seam, self._trace, self.fleet.lock, deadline, grace_s=self._timeouts.grace_s):
            replies = [
                call_engine(self._seam, self._trace, i, engine, "update_weights_from_distributed", names=names,
                            dtypes=[t.dtype for t in tensors], shapes=[tuple(t.shape) for t in tensors],
                            group_name=self.name, packed=self._wire.packed)
                for i, engine in enumerate(self.fleet.engines)]
            with self._trace.waiting("send", detail=" ".join(shown)):
                sent = Pending(f"the broadcast over {self.name}", self._group.send(tensors))
                wait_all(self._seam, self._trace, [sent, *replies], deadline)

    def synchronize(self, deadline: Deadline) -> None:
        """Wait until everything sent has left this device."""
        with self._trace.waiting("synchronize"):
            done = Pending(f"the device to finish sending over {self.name}", self._group.synchronize())
            wait_all(self._seam, self._trace, [done], deadline)

    def close(self) -> None:
        """Destroy this end. Idempotent and bounded; engines that still receive fail at once."""
        with self._trace.waiting("close", group=self.name):
            self._group.close(timeout_s=self._timeouts.grace_s)

    def leave(self) -> None:
        """Tell the engines to drop a persistent group, then close this end. Engines that are gone do not matter."""
        deadline = Deadline(self._seam.now() + self._timeouts.grace_s, "update_weight_call_timeout")
        pending = []
        for i, engine in enumerate(self.fleet.engines):
            try:
                pending.append(call_engine(self._seam, self._trace, i, engine, "destroy_weights_update_group",
                                           group_name=self.name))
            except Exception as error:
                logger.warning("while disconnecting %s: %s", self.name, error)
        for outcome in settle(self._seam, pending, deadline):
            if isinstance(outcome, Exception):
                logger.warning("while disconnecting %s: %s", self.name, outcome)
        self.close()


def open_group(seam: Seam, trace: Trace, fleet: Fleet, name: str, wire: Wire, deadline: Deadline, *, timeouts: Timeouts,
               address: str | None, port_range: tuple[int, int] | None) -> OpenGroup:
    """Open transfer group `name` from this source to every worker of every engine.

    The source binds first and announces the port it got, so that nobody can take it in between. Raises the first thing that
    goes wrong: an engine that refuses is seen while the others are still dialling.
    """
    world_size = 1 + sum(fleet.counts)
    listener = seam.listen(address=address, port_range=port_range)
    try:
        trace.record("listen", detail=f"{listener.host}:{listener.port}")
        group = _dial(seam, trace, fleet, name, wire, listener, world_size, deadline, call_s=timeouts.call_s)
    finally:
        listener.close()
    return OpenGroup(seam, trace, fleet, name, wire, timeouts, group)


def _dial(seam: Seam, trace: Trace, fleet: Fleet, name: str, wire: Wire, listener: Listener, world_size: int,
          deadline: Deadline, *, call_s: float) -> TransferGroup:
    # The store is up before anybody is told where it is.
    dial = Pending(f"{world_size - 1} workers to join {name} at {listener.host}:{listener.port}",
                   seam.open_transfer_group(listener, name=name, world_size=world_size, wire=wire,
                                            timeout_s=deadline.left_s(seam.now())))
    joins: list[Pending] = []
    try:
        for i, (engine, offset) in enumerate(zip(fleet.engines, rank_offsets(fleet.counts), strict=True)):
            agreed: dict[str, Any] = {}
            if fleet.packed_in_init[i]:
                agreed = {"packed": wire.packed, "packed_buffer_size_bytes": wire.packed_buffer_size_bytes,
                          "timeout_s": call_s}
            joins.append(call_engine(seam, trace, i, engine, "init_weights_update_group", master_address=listener.host,
                                     master_port=listener.port, rank_offset=offset, world_size=world_size, group_name=name,
                                     backend=wire.backend, **agreed))
        with trace.waiting("open", detail=f"world_size={world_size}"):
            group: TransferGroup = wait_all(seam, trace, [dial, *joins], deadline)[0]
    except Exception:
        _discard(seam, dial, joins)
        raise
    return group


LINGER_S = 0.5
"""How long the store stays up after a failed dial: a worker that has not connected yet would go on trying for its whole
time-out (300 s for a stock one), one that has connected fails as soon as the store goes."""


def _discard(seam: Seam, dial: Pending, joins: Sequence[Pending]) -> None:
    """Let the workers that were told to join come and go; close a group that came up although an engine failed."""
    late = [join.work for join in joins if not join.work.poll()]
    if late:
        seam.wait_any(late, timeout_s=LINGER_S)
    with contextlib.suppress(Exception):
        if dial.work.poll():
            dial.work.result().close(timeout_s=LINGER_S)


@contextlib.contextmanager
def lock_held(seam: Seam, trace: Trace, lock: Any, deadline: Deadline, *, grace_s: float) -> Iterator[None]:
    """Hold the rollout engines' lock; released on every path, acquired and released under deadlines."""
    if lock is None:
        yield
        return
    with trace.waits_for("the rollout engine lock"):
        _acquire(seam, trace, lock, deadline, grace_s)
    try:
        yield
    except BaseException:
        # The first error is the cause: a failing release must not replace it.
        try:
            _release(seam, trace, lock, grace_s)
        except Exception as error:
            logger.warning("the rollout engine lock could not be released: %s", error)
        raise
    _release(seam, trace, lock, grace_s)


def _acquire(seam: Seam, trace: Trace, lock: Any, deadline: Deadline, grace_s: float) -> None:
    """Poll the lock until it is ours or `deadline` is over."""
    while True:
        acquire = _lock_call(seam, trace, lock, "acquire")
        try:
            granted = _lock_answer(seam, trace, acquire, deadline)
        except BaseException:
            # The lock may still say yes to a caller that has gone: nobody else would ever release it then.
            late = settle(seam, [acquire], Deadline(seam.now() + grace_s, deadline.setting))[0]
            if late and not isinstance(late, Exception):
                _release(seam, trace, lock, grace_s)
            raise
        if granted not in (True, False):
            raise TransportError(f"the rollout engine lock's acquire must answer True or False (got {granted!r}): nobody knows "
                                 f"who holds it now")
        if granted:
            return
        seam.sleep(min(LOCK_POLL_S, deadline.left_s(seam.now())))
        if deadline.left_s(seam.now()) <= 0:
            raise deadline.expired(trace.position.text(), "the rollout engine lock: somebody else holds it; a job that died "
                                   "while sending leaves it locked (restart the lock actor)")


def _release(seam: Seam, trace: Trace, lock: Any, grace_s: float) -> None:
    """Release the lock. Tried twice: releasing a free lock is harmless, a lock that stays held stops every later update."""
    deadline = Deadline(seam.now() + grace_s, "update_weight_call_timeout")
    try:
        _lock_answer(seam, trace, _lock_call(seam, trace, lock, "release"), deadline)
    except Exception as error:
        logger.warning("releasing the rollout engine lock failed, trying once more: %s", error)
        _lock_answer(seam, trace, _lock_call(seam, trace, lock, "release"), deadline)


def _lock_answer(seam: Seam, trace: Trace, call: Pending, deadline: Deadline) -> Any:
    try:
        return wait_all(seam, trace, [call], deadline)[0]
    except StagedSyncError:
        raise
    except Exception as error:
        raise TransportError(f"{call.name()} failed: {type(error).__name__}: {error}") from error


def _lock_call(seam: Seam, trace: Trace, lock: Any, method: str) -> Pending:
    try:
        trace.record("rpc", detail=f"{method} lock")
        return Pending(f"the rollout engine lock ({method})", seam.call(lock, method))
    except Exception as error:
        raise TransportError(f"the rollout engine lock failed in {method}: {type(error).__name__}: {error}") from error
