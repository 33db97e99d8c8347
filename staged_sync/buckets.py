"""Cuts a stream of converted units into buckets; pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from staged_sync.exporter import NamedTensor


class Bucketer:
    """Collects units until the next one would take the bucket over `limit_bytes`.

    A unit is never split (what an exporter converts together arrives together). A unit larger than the limit is a bucket of
    its own. No bucket is empty.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._bucket: list[NamedTensor] = []
        self._bytes = 0

    def add(self, unit: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Take one converted unit; returns the bucket that it closed, or []."""
        size = sum(nbytes(tensor) for _, tensor in unit)
        closed = self.flush() if self._bucket and self._bytes + size > self.limit_bytes else []
        self._bucket.extend(unit)
        self._bytes += size
        return closed

    def flush(self) -> list[NamedTensor]:
        """The bucket collected so far, [] if there is none."""
        bucket, self._bucket, self._bytes = self._bucket, [], 0
        return bucket


class Pace:
    """Counts the bytes of an export that several ranks iterate, so that all of them turn to the next bucket at the same item."""

    def __init__(self, limit_bytes: int) -> None:
        self.turn = 0
        """Buckets that are behind us."""
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def turns(self, size: int) -> bool:
        """Count the next item; True where it no longer fits into the bucket so far, and begins the next one. The end of the
        export, which has no bytes, begins none."""
        turned = self._bytes > 0 and size > 0 and self._bytes + size > self._limit_bytes
        self._bytes = size if turned else self._bytes + size
        self.turn += turned
        return turned


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
