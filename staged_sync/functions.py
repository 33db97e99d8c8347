"""vime's three module functions over one transfer group, for callers that drive the buckets themselves.

They speak to the engines at once from the calling rank: no stages, no session, no agreement between ranks. Use
`UpdateWeightFromDistributed` wherever you can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staged_sync.config import engine_counts, read_settings
from staged_sync.control import Deadline
from staged_sync.errors import ConfigurationError
from staged_sync.exporter import NamedTensor
from staged_sync.seam import Seam, Wire
from staged_sync.session import Fleet
from staged_sync.trace import Trace
from staged_sync.transfer_group import OpenGroup, open_group


def connect_rollout_engines_from_distributed(args: Any, group_name: str, rollout_engines: Sequence[Any],
                                             engine_gpu_counts: Sequence[int] | None = None, *,
                                             seam: Seam | None = None) -> OpenGroup:
    """Open transfer group `group_name` from this rank to all engines. Raises `ConfigurationError`, `EngineError`,
    `DeadlineExceeded`."""
    settings, problems = read_settings(args)
    counts, wrong = engine_counts(args, rollout_engines, engine_gpu_counts)
    if problems + wrong:
        raise ConfigurationError(problems + wrong)
    if seam is None:
        from staged_sync.live_seam import LiveSeam  # needs torch.distributed
        seam = LiveSeam([])
    trace = Trace(0, seam.now)  # the group's rank 0; which trainer rank that is does not matter here
    packed_in_init = tuple(seam.has_method(engine, "get_weight_transfer_info") for engine in rollout_engines)
    fleet = Fleet(tuple(rollout_engines), tuple(counts), None, packed_in_init)
    wire = Wire(seam.backend, settings.packed, settings.packed_buffer_bytes)
    deadline = Deadline(seam.now() + settings.timeouts.call_s, "update_weight_call_timeout")
    with trace.at(phase="connect", group=group_name):
        return open_group(seam, trace, fleet, group_name, wire, deadline, timeouts=settings.timeouts,
                          address=settings.address, port_range=settings.port_range)


def disconnect_rollout_engines_from_distributed(args: Any, group_name: str, model_update_groups: OpenGroup,
                                                rollout_engines: Sequence[Any]) -> None:
    """Tell the engines to drop the group, and close this end. Engines that are gone do not matter."""
    model_update_groups.leave()


def update_weights_from_distributed(group_name: str, group: OpenGroup, weight_version: int, rollout_engines: Sequence[Any],
                                    converted_named_tensors: Sequence[NamedTensor], *, packed: bool | None = None) -> list[Any]:
    """Announce one bucket and broadcast it; returns when every engine has it, so there are no references left to wait for.

    `weight_version` is not passed on: a version is published once, after the session is finished. `packed`: as the group was
    opened, where it is not given; another value raises `ValueError`. Raises the first thing that goes wrong on either side.
    """
    group.send_bucket(converted_named_tensors, packed=packed)
    return []
