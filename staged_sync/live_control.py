"""The control group of the live seam: one generation of the group of all trainer ranks, on gloo.

Ranks meet in blocks of `BLOCK`, the first ranks of the blocks in blocks of their own, and so on up to the lead. So what one
rank does in an exchange, and how many connections it holds, grows with the size of a block and the logarithm of the world.
Over a single group it would grow with the world: gloo connects every member with every other one, its all-reduce and all-gather
hand even eight bytes around a ring of all members (two thousand messages, one after the other, for a thousand ranks), and its
gather has one member take a message from each of the others (gloo/allreduce.cc, allgather.cc, gather.cc).

The groups are `ProcessGroupGloo` on a prefix of the trainer's store: not in torch's registry, never split from the default
group, and replaced by number after a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from staged_sync.errors import RanksAbsent
from staged_sync.vllm.rendezvous import check_timeout
from staged_sync.vllm.transport import never_destroy

BLOCK = 8
"""Ranks of one block: those of one host, as trainers number them. The first one takes a message from each of the others, which
costs it more than passing one on; up to this many ranks need no second level."""

VERDICT_S = 2.0
"""How long ranks wait for the lead to say who was absent, after a status barrier has failed on all of them."""

LOOK_S = 0.5
"""How often a rank that waits in a status barrier asks the store whether the barrier is lost; well inside the time that a rank
which has lost it waits for the others to say that they are there."""

SIGN_S = 5e-3
"""How often that rank looks who has said so."""

INLINE_BYTES = 4096
"""What of a status everybody gets at once; enough for any failure and any rank's introduction."""


LOST = "lost"
"""Set in a generation's store by the first rank that waits no longer; `lost/<rank>` by each rank that knows."""


def broken_key(generation: int) -> str:
    """Where the store says why a generation is dead."""
    return f"broken/{generation}"


# --- who sits where -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in one level: its position in its block, which has `size` members."""

    block: int
    position: int
    size: int


def seats(rank: int, world_size: int, block: int) -> list[Seat]:
    """The seats of `rank`, by level: it goes on to the next one as long as it is the first of its block and there is more than
    one. Level 0 has all ranks, level k+1 the first ones of the blocks of level k, in the same order."""
    found: list[Seat] = []
    member, members = rank, world_size
    while True:
        number, position = divmod(member, block)
        found.append(Seat(number, position, min(block, members - number * block)))
        member, members = number, -(-members // block)
        if position > 0 or members == 1:
            return found


# --- the group ----------------------------------------------------------------------------------------------------------

class GlooControlGroup:
    """One generation of the control group on this rank."""

    def __init__(self, store: dist.Store, generation: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._all_generations, self._generation = store, generation
        self._store = dist.PrefixStore(f"generation-{generation}", store)
        self._rank, self._world_size, self._block = rank, world_size, BLOCK
        self._work: Any = None
        self._seats = seats(rank, world_size, self._block)
        self._groups: list[Any] = []
        end_s = time.monotonic() + check_timeout(timeout_s)
        try:
            for level, seat in enumerate(self._seats):
                meeting = dist.PrefixStore(f"level-{level}/block-{seat.block}", self._store)
                left = timedelta(seconds=max(end_s - time.monotonic(), 0.001))
                self._groups.append(dist.ProcessGroupGloo(meeting, seat.position, seat.size, left))
        except (RuntimeError, dist.DistError) as error:
            raise self._absent(timeout_s, error) from error

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """The lengths of all payloads first; the payloads follow only where there are any."""
        timeout = timedelta(seconds=check_timeout(timeout_s))
        try:
            lengths = self._from_everybody(torch.tensor([len(payload)]), timeout).flatten().tolist()
            return self._all_payloads(payload, lengths, timeout) if any(lengths) else [b""] * self._world_size
        except RuntimeError as error:
            # Without its traceback, which holds the work and by that the connections: peers that wait for this rank must see
            # it leave when it closes the group.
            raise self._absent(timeout_s, error) from error.with_traceback(None)

    def close(self) -> None:
        """Peers that wait for this rank fail at once; where it waits for peers itself, they learn from the store."""
        groups, work, self._groups, self._work = self._groups, self._work, [], None
        if work is not None and not work.is_completed():
            never_destroy(groups)

    # --- moving bytes -----------------------------------------------------------------------------------------------------
    def _all_payloads(self, payload: bytes, lengths: Sequence[int], timeout: timedelta) -> list[bytes]:
        """The beginnings of all payloads at once; the rest of long ones from their own ranks, one after the other.

        At connect a few sources list thousands of tensors: gathering everything at the longest payload's size would cost that
        size times the number of ranks, on every rank.
        """
        inline = min(max(lengths), INLINE_BYTES)
        beginnings = self._from_everybody(_tensor(payload[:inline].ljust(inline, b"\0")), timeout)
        payloads = []
        for rank, length in enumerate(lengths):
            beginning = _bytes(beginnings[rank, :min(length, inline)])
            payloads.append(beginning + self._rest(payload[inline:], length - inline, rank, timeout))
        return payloads

    def _rest(self, mine: bytes, length: int, source: int, timeout: timedelta) -> bytes:
        """What `source` has beyond the beginning; nothing is sent where that is nothing."""
        if length <= 0:
            return b""
        tensor = _tensor(mine) if source == self._rank else torch.empty(length, dtype=torch.uint8)
        return _bytes(self._from_one(tensor, source, timeout))

    def _from_everybody(self, mine: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        """`mine` (1-d, as long on every rank) of all ranks, by rank: (world size, length). Level by level up to the lead, which
        tells everybody."""
        rows = mine[None]
        for seat, group in zip(self._seats, self._groups, strict=True):
            above = mine.new_zeros(self._block if self._world_size > self._block else seat.size, *rows.shape)
            gather = dist.GatherOptions()
            gather.rootRank, gather.timeout = 0, timeout
            self._wait(group.gather([list(above[:seat.size])] if seat.position == 0 else [], [rows], gather))
            rows = above.flatten(0, 1)
        everybody = rows[:self._world_size] if self._rank == 0 else mine.new_empty(self._world_size, mine.numel())
        return self._from_one(everybody, 0, timeout)

    def _from_one(self, tensor: torch.Tensor, source: int, timeout: timedelta) -> torch.Tensor:
        """`tensor` (contiguous) of rank `source`, on every rank in place: in the source's block, from its first member in its
        block, and so on up; then down in all other blocks."""
        member, above = source, []
        for seat, group in zip(self._seats, self._groups, strict=True):
            number, position = divmod(member, self._block)
            if seat.block == number:
                self._broadcast(group, tensor, position, timeout)
            else:
                above.append(group)
            member = number
        for group in reversed(above):
            self._broadcast(group, tensor, 0, timeout)
        return tensor

    def _broadcast(self, group: Any, tensor: torch.Tensor, position: int, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = position, 0, timeout
        self._wait(group.broadcast([tensor], options))

    # --- waiting ----------------------------------------------------------------------------------------------------------
    def _wait(self, work: Any) -> None:
        """Wait for gloo, whose own time-out ends the work, and now and then look whether a rank has said it will not come."""
        self._work = work
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # it has not ended yet, or it has failed: the last line raises that
                work.wait(timedelta(seconds=LOOK_S))
            if not work.is_completed() and self._is_lost():
                raise RuntimeError("another rank reported this control group broken")
        work.wait()  # raises what gloo met

    def _is_lost(self) -> bool:
        """Whether another rank has reported this generation broken, or waits no longer."""
        return bool(self._all_generations.check([broken_key(self._generation)]) or self._store.check([LOST]))

    # --- who is missing ---------------------------------------------------------------------------------------------------
    def _absent(self, timeout_s: float, error: Exception) -> RanksAbsent:
        """Find out who is missing: every rank that is still there signs, once it knows that this generation is lost."""
        try:
            missing = self._missing()
        except dist.DistError as gone:
            return store_is_gone(gone)
        who = f"trainer ranks {missing} did not come" if missing else "all ranks are there, but the group broke"
        return RanksAbsent(f"{who} (waited at most {timeout_s:g} s; gloo says: {_first_line(error)}). Look for an error or a "
                           f"stack of these ranks", tuple(missing))

    def _missing(self) -> list[int]:
        for key in (f"{LOST}/{self._rank}", LOST):
            self._store.set(key, "here")
        missing = [r for r in range(self._world_size) if r != self._rank]
        end = time.monotonic() + VERDICT_S / 2
        while missing and time.monotonic() < end:
            missing = [r for r in missing if not self._store.check([f"{LOST}/{r}"])]
            time.sleep(SIGN_S)
        return missing


def store_is_gone(error: Exception) -> RanksAbsent:
    return RanksAbsent(f"the store that all trainer ranks meet at does not answer ({_first_line(error)}). Without torchrun the "
                       f"first rank hosts it: look for an error or a stack of rank 0", None)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())  # without numpy, which torch may come without


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
