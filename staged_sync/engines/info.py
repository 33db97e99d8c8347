"""What a rollout engine says it is: the reply of `get_weight_transfer_info`, checked before anything is paused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from staged_sync.errors import StagedSyncError, bullets


class EngineInfoError(StagedSyncError):
    """An engine's answer to `get_weight_transfer_info` is not one."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine, as it is now. Plain values only, so that it travels over any control plane as a dict."""

    vllm_version: str
    backend: str
    """The transport it receives with: "gloo" or "nccl"."""
    workers: int
    """How many ranks of a transfer group it takes: tensor x pipeline x data parallel size."""
    packed_in: str
    """Where `packed` is agreed: "init" (vLLM >= 0.29, when the group is opened) or "update" (before, with each bucket)."""
    weight_version: str
    paused: bool
    session_open: bool
    """Between `start_weight_update` and `finish_weight_update`."""
    weights_complete: bool = True
    """False from `start_weight_update` until a `finish_weight_update`: parameters may be on the meta device, so
    generating would kill vLLM."""
    group_name: str | None = None
    """The transfer group it was last told to join, None if it holds none."""
    packed: bool | None = None
    """Whether that group is packed; None where no group is held or `packed_in` is "update"."""
    packed_buffer_size_bytes: int | None = None
    """Chunk size of that group's packed stream, or the fixed one where `packed_in` is "update"."""
    weight_transfer_backend: str = ""
    """The name under which vLLM knows its weight-transfer engine (`weight_transfer_config.backend`)."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, reply: Any) -> EngineInfo:
        """Read an engine's reply. Raises `EngineInfoError` that lists everything that is wrong; unknown keys are ignored."""
        if not isinstance(reply, Mapping):
            raise EngineInfoError(f"get_weight_transfer_info must answer a dict, got {reply!r}")
        problems = _missing(reply) + [text for name, wanted in _TYPES.items()
                                      if name in reply and (text := _wrong_type(name, reply[name], wanted))]
        if not problems:
            problems = _wrong_values(reply)
        if problems:
            raise EngineInfoError(bullets("get_weight_transfer_info answered something else than an engine's description:",
                                          problems))
        return cls(**{name: reply[name] for name in _TYPES if name in reply})


_TYPES: dict[str, tuple[type, ...]] = {
    "vllm_version": (str,), "backend": (str,), "workers": (int,), "packed_in": (str,), "weight_version": (str,),
    "paused": (bool,), "session_open": (bool,), "weights_complete": (bool,), "group_name": (str, type(None)),
    "packed": (bool, type(None)), "packed_buffer_size_bytes": (int, type(None)), "weight_transfer_backend": (str,),
}
_REQUIRED = [f.name for f in fields(EngineInfo)][:7]


def _missing(reply: Mapping[str, Any]) -> list[str]:
    return [f"{name!r} is missing" for name in _REQUIRED if name not in reply]


def _wrong_type(name: str, value: Any, wanted: tuple[type, ...]) -> str | None:
    right = isinstance(value, wanted) and (bool in wanted or not isinstance(value, bool))
    return None if right else f"{name!r} must be {' or '.join(t.__name__ for t in wanted)}, got {value!r}"


def _wrong_values(reply: Mapping[str, Any]) -> list[str]:
    problems = []
    if reply["backend"] not in ("gloo", "nccl"):
        problems.append(f"'backend' must be 'gloo' or 'nccl', got {reply['backend']!r}")
    if reply["packed_in"] not in ("init", "update"):
        problems.append(f"'packed_in' must be 'init' or 'update', got {reply['packed_in']!r}")
    if reply["workers"] < 1:
        problems.append(f"'workers' must be at least 1, got {reply['workers']}")
    return problems
