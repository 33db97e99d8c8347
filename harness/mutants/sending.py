"""Defects of one bucket: what is announced, what is sent, what is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from staged_sync import transfer_group, update
from staged_sync.buckets import Bucketer
from staged_sync.control import Deadline
from staged_sync.exporter import NamedTensor
from staged_sync.rank import FirstFailure, Rank
from staged_sync.seam import Listener, Seam, TransferGroup, Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.transfer_group import OpenGroup
from staged_sync.waiting import Pending, call_engine, wait_all


def _announce(group: OpenGroup, bucket: Sequence[NamedTensor], names: Sequence[str] | None = None) -> list[Pending]:
    told = [name for name, _ in bucket] if names is None else list(names)
    return [call_engine(group._seam, group._trace, i, engine, "update_weights_from_distributed", names=told,
                        dtypes=[t.dtype for _, t in bucket], shapes=[tuple(t.shape) for _, t in bucket],
                        group_name=group.name, packed=group._wire.packed) for i, engine in enumerate(group.fleet.engines)]


def _sends(function: Any) -> AbstractContextManager[Any]:
    """`function(group, bucket, deadline)` instead of `OpenGroup.send_bucket`, traced as one send."""
    def send_bucket(self: OpenGroup, bucket: Sequence[NamedTensor], deadline: Deadline | None = None, *,
                    packed: bool | None = None) -> None:
        assert deadline is not None
        with self._trace.waiting("send", detail=" ".join(name for name, _ in bucket)):
            function(self, bucket, deadline)
    return patch.object(OpenGroup, "send_bucket", send_bucket)


def names_from_another_iteration() -> AbstractContextManager[Any]:
    """Names are listed in another order than the tensors: grouped by dtype, filtered, sorted."""
    def send(group: OpenGroup, bucket: Sequence[NamedTensor], deadline: Deadline) -> None:
        replies = _announce(group, bucket, sorted((name for name, _ in bucket), reverse=True))
        sent = Pending("broadcast", group._group.send([tensor.contiguous() for _, tensor in bucket]))
        wait_all(group._seam, group._trace, [sent, *replies], deadline)
    return _sends(send)


def metadata_from_another_iteration() -> AbstractContextManager[Any]:
    """Names, shapes and dtypes are listed in one order, the tensors sent in another."""
    def send(group: OpenGroup, bucket: Sequence[NamedTensor], deadline: Deadline) -> None:
        replies = _announce(group, bucket)
        sent = Pending("broadcast", group._group.send([tensor.contiguous() for _, tensor in reversed(bucket)]))
        wait_all(group._seam, group._trace, [sent, *replies], deadline)
    return _sends(send)


def sent_before_it_is_announced() -> AbstractContextManager[Any]:
    """The broadcast is waited for before any engine is told to receive."""
    def send(group: OpenGroup, bucket: Sequence[NamedTensor], deadline: Deadline) -> None:
        sent = Pending("broadcast", group._group.send([tensor.contiguous() for _, tensor in bucket]))
        wait_all(group._seam, group._trace, [sent], deadline)
        wait_all(group._seam, group._trace, _announce(group, bucket), deadline)
    return _sends(send)


def buffer_used_again_too_early() -> AbstractContextManager[Any]:
    """One staging buffer for all buckets, filled again while the device may still read it."""
    staging = torch.empty(1 << 16, dtype=torch.uint8)

    def send(group: OpenGroup, bucket: Sequence[NamedTensor], deadline: Deadline) -> None:
        _announce(group, bucket)
        group._group.send(_staged(staging, [tensor for _, tensor in bucket]))
    return _sends(send)


def _staged(staging: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        view = staging[at:at + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append(view)
        at += size
    return views


def last_bucket_lost() -> AbstractContextManager[Any]:
    """What is left over at the end of a pass is not sent."""
    return patch.object(Bucketer, "flush", lambda self: [])


@contextmanager
def last_bucket_lost_and_nobody_judges() -> Iterator[None]:
    """The same, in a library that compares nothing: only the bytes on the engines can tell."""
    with last_bucket_lost(), patch.object(update, "judge", lambda report, announced: None):
        yield


def packed_by_stage() -> AbstractContextManager[Any]:
    """Whether a stream is packed is decided anew by every stage's sender; the engines were told otherwise."""
    real = transfer_group._dial

    def dial(seam: Seam, trace: Trace, fleet: Fleet, name: str, wire: Wire, *args: Any, **kwargs: Any) -> TransferGroup:
        group = real(seam, trace, fleet, name, wire, *args, **kwargs)
        if name != "vime-pp_0":
            group._channel.wire = replace(wire, packed=not wire.packed)  # type: ignore[attr-defined]
        return group
    return patch.object(transfer_group, "_dial", dial)


def joins_one_engine_after_the_other() -> AbstractContextManager[Any]:
    """The next engine is asked to join only when the one before has answered, which it does when the group is complete."""
    real = transfer_group.call_engine

    def call(seam: Seam, trace: Trace, engine: int, handle: Any, method: str, **kwargs: Any) -> Pending:
        pending = real(seam, trace, engine, handle, method, **kwargs)
        if method == "init_weights_update_group":
            wait_all(seam, trace, [pending], Deadline(seam.now() + 30, "update_weight_call_timeout"))
        return pending
    return patch.object(transfer_group, "call_engine", call)


def dialled_before_anybody_is_asked() -> AbstractContextManager[Any]:
    """The source waits for its group to be complete before it has told an engine of it."""
    def dial(seam: Seam, trace: Trace, fleet: Fleet, name: str, wire: Wire, listener: Listener, world_size: int,
             deadline: Deadline, **kwargs: Any) -> TransferGroup:
        opening = Pending(name, seam.open_transfer_group(listener, name=name, world_size=world_size, wire=wire, timeout_s=30))
        with trace.waiting("open", detail=f"world_size={world_size}"):
            group: TransferGroup = wait_all(seam, trace, [opening], deadline)[0]
        return group
    return patch.object(transfer_group, "_dial", dial)


def failures_kept_to_itself() -> AbstractContextManager[Any]:
    """A rank logs its error and goes on."""
    return patch.object(FirstFailure, "keep", lambda self, error: None)


def group_kept_after_a_failure() -> AbstractContextManager[Any]:
    """`close` forgets the group without destroying it."""
    def close(self: Rank) -> None:
        self.source.group = None
    return patch.object(Rank, "close_group", close)
