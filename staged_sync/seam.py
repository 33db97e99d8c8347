"""The one door to the world outside: torch.distributed, Megatron's process groups, engines, transports and the clock.

Everything in `staged_sync` that waits, sends, asks or tells goes through a `Seam`. Three families of implementations exist:
`staged_sync.live_seam.LiveSeam` (the real thing), `harness.recording` and `harness.sim` (many ranks in one process). The
interface is frozen and written down in docs/seam.md; change both together.

Three rules hold for every implementation:

* **No wait without a deadline.** Every method that can wait takes `timeout_s` and raises `DeadlineExceeded` when it is over.
  `math.inf` is refused.
* **Long operations are `Work`.** RPCs, dialling a transfer group and sending are started at once and finish later, so that
  the caller can watch several of them together (`wait_any`): an engine's error is seen while the source is still sending.
* **Nobody else's state.** A seam never touches the default process group's registry for transfer groups: they do not derive
  from the trainer's groups (pytorch splits the parent communicator otherwise, which needs every parent rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)

GatherGroup = Literal["tp", "etp", "ep"]
"""Megatron's groups that an export gathers in: tensor, expert-tensor and expert model parallel."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one trainer rank sits, as Megatron's `parallel_state` says.

    `dp` counts data parallel *with* context parallel; `edp` is the expert-data-parallel rank. Sizes are those of the groups.
    """

    rank: int
    tp: int = 0
    pp: int = 0
    dp: int = 0
    etp: int = 0
    ep: int = 0
    edp: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    etp_size: int = 1
    ep_size: int = 1
    edp_size: int = 1


@dataclass(frozen=True, slots=True)
class Wire:
    """What both ends of a transfer group must agree on before a byte moves.

    `packed_buffer_size_bytes` cuts the packed stream: a chunk is closed by the tensor that takes it *over* this many bytes
    (vllm/distributed/weight_transfer/packed_tensor.py, `pack_tensors`).
    """

    backend: Literal["gloo", "nccl"]
    packed: bool
    packed_buffer_size_bytes: int


class Work(Protocol[T_co]):
    """Something under way outside this thread: an RPC, a dial, a send."""

    def poll(self) -> bool:
        """True once it has ended, well or badly. Never blocks."""

    def result(self) -> T_co:
        """What it returned, or raises what it failed with. Call only after `poll()` is True."""


class Listener(Protocol):
    """A bound, listening socket: the address that engines are told to dial."""

    host: str
    port: int

    def close(self) -> None:
        """Release the port, and end a dial still under way on it, so that workers that wait there fail at once. Harmless
        when called again, or after a group came up."""


class TransferGroup(Protocol):
    """The source's end (rank 0) of {source} + {all workers of all engines}."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Work[None]:
        """Start broadcasting `tensors` one after the other from rank 0.

        Tensors must be contiguous (gloo ships wrong bytes for strided tensors, NCCL reads past them); the group keeps them
        alive until the work has ended. Raises `TransportError` where this transport cannot move bytes.
        """

    def synchronize(self) -> Work[None]:
        """Ends when everything sent so far has left this device."""

    def close(self, *, timeout_s: float) -> None:
        """Destroy the communicator. Idempotent, bounded; also right in the middle of a failed send (it aborts)."""


class ControlGroup(Protocol):
    """One generation of the group of all trainer ranks that status barriers run on."""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Every rank's payload, by rank. Raises `RanksAbsent` (naming them) when some did not come in time.

        After it has raised, the group is dead for good (gloo); open the next generation.
        """

    def close(self) -> None:
        """Release it. Never waits."""


class Seam(Protocol):
    backend: Literal["gloo", "nccl"]
    """The transport for this process' weights: nccl for CUDA parameters, gloo for CPU ones."""

    # --- who am I -------------------------------------------------------------------------------------------------
    def coordinates(self) -> Coordinates: ...

    # --- the clock ------------------------------------------------------------------------------------------------
    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, seconds: float) -> None:
        """Give way; only for polling an outside state (a lock). Never a means of ordering."""

    def wait_any(self, works: Sequence[Work[Any]], *, timeout_s: float) -> bool:
        """Wait until at least one of `works` has ended (True) or `timeout_s` is over (False). Does not raise on time-out."""

    # --- the trainer's own groups ---------------------------------------------------------------------------------
    def all_gather(self, tensor: torch.Tensor, group: GatherGroup, *, timeout_s: float) -> list[torch.Tensor]:
        """`tensor` of every member of this rank's `group`, by group rank; same shape and dtype everywhere. A collective."""

    def open_control_group(self, generation: int, *, timeout_s: float) -> ControlGroup:
        """Join all trainer ranks in a fresh control group. A collective over all ranks; raises `RanksAbsent`."""

    def broken_control_generation(self) -> int:
        """The highest generation that any rank has reported broken, -1 if none. Never a collective."""

    def report_broken_control(self, generation: int, reason: str) -> str:
        """Tell all ranks that `generation` is dead, and why; returns the reason that was reported first."""

    # --- engines --------------------------------------------------------------------------------------------------
    def call(self, target: Any, method: str, /, **kwargs: Any) -> Work[Any]:
        """`target.method.remote(**kwargs)`; returns at once."""

    def identity(self, target: Any) -> str:
        """What this engine alone is, on every rank and in every handle alike (a Ray actor's id); "" where handles do not say."""

    def has_method(self, target: Any, method: str) -> bool:
        """Whether `target.method` exists, without calling it (a Ray handle knows its class' methods)."""

    # --- transfer groups ------------------------------------------------------------------------------------------
    def listen(self, *, address: str | None, port_range: tuple[int, int] | None) -> Listener:
        """Bind and listen: `address` (or this host's address on the route to the engines), port 0 or inside the range."""

    def open_transfer_group(self, listener: Any, *, name: str, world_size: int, wire: Wire,
                            timeout_s: float) -> Work[TransferGroup]:
        """Start rank 0 of a transfer group on `listener`; ends when all `world_size - 1` workers have joined."""

    # --- hang reports ---------------------------------------------------------------------------------------------
    def stacks(self) -> str:
        """The Python stacks of this rank, as text, for a hang report."""
