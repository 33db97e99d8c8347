"""Every HF tensor exactly once: checked at connect against the HF checkpoint, and per update against what was really sent.

The expectation is the checkpoint's own index: `model.safetensors.index.json`, or the header of a single safetensors file.
Only headers are read, never weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from staged_sync.exporter import NamedTensor, TensorMeta

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}
"""dtype names of the safetensors header (safetensors format description, `dtype`)."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on a header; a larger number means that the file is not safetensors."""


class CheckpointIndexError(ValueError):
    """The HF checkpoint directory has no readable tensor index."""


def read_index(checkpoint: str | Path) -> dict[str, TensorMeta]:
    """Name -> meta of every tensor of an HF checkpoint directory. Raises `CheckpointIndexError` with what is missing."""
    folder = Path(checkpoint)
    index_file, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    found = (_read_sharded(folder, index_file) if index_file.is_file()
             else read_header(single) if single.is_file() else None)
    if found:
        return found
    if found is not None:
        raise CheckpointIndexError(f"the checkpoint in {folder} names no tensors: there would be nothing to send")
    raise CheckpointIndexError(
        f"no weights index in {folder}: expected model.safetensors.index.json or model.safetensors. The sync is checked "
        f"against it; point args.hf_checkpoint at the checkpoint the engines were started from")


def _read_sharded(folder: Path, index_file: Path) -> dict[str, TensorMeta]:
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointIndexError(f"{index_file} is not a safetensors index: {error!r}") from error
    shards: dict[str, dict[str, TensorMeta]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointIndexError(f"{index_file} names {shard}, which is not in {folder}")
        shards[shard] = read_header(folder / shard)
    if missing := [f"{name} in {shard}" for name, shard in sorted(weight_map.items()) if name not in shards[shard]]:
        raise CheckpointIndexError(f"{index_file} names tensors that are not in their shard: {missing[:5]} ({len(missing)} in "
                                   f"all)")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def read_header(file: Path) -> dict[str, TensorMeta]:
    """The header of one safetensors file: 8 bytes of length (little endian), then that many bytes of JSON."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(f.read(length))
        header.pop("__metadata__", None)
        return {name: TensorMeta(name, SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]))
                for name, entry in header.items()}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointIndexError(f"{file} is not a readable safetensors file: {error!r}") from error


# --- at connect ---------------------------------------------------------------------------------------------------------

def coverage_problems(stages: Sequence[Sequence[TensorMeta]], index: Mapping[str, TensorMeta],
                      optional: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Everything that is wrong with what the stages will send, against `index`; empty if each tensor comes exactly once.

    `optional(name)`: the family's rule for names that the checkpoint may have and nobody sends (a tied lm_head, a vision
    tower), or that are sent although the checkpoint lacks them. A numbered layer of such names comes whole or not at all.
    """
    senders: dict[str, list[int]] = {}
    for stage, metas in enumerate(stages):
        for meta in metas:
            senders.setdefault(meta.name, []).append(stage)
    problems = [f"missing: {name} {_shape(index[name])} is in the checkpoint, no stage sends it"
                for name in index if name not in senders and not optional(name)]
    problems += _partly_sent(senders, index, optional)
    problems += [f"duplicate: {name} is sent {len(s)} times, by stages {s}" for name, s in senders.items() if len(s) > 1]
    for stage, metas in enumerate(stages):
        problems += [p for meta in metas if (p := _meta_problem(stage, meta, index, optional))]
    return problems


_BLOCK = re.compile(r"(.*?\.\d+)\.")
"""The numbered layer that a name belongs to."""


def _partly_sent(senders: Container[str], index: Mapping[str, TensorMeta], optional: Callable[[str], bool]) -> list[str]:
    """A layer that may be left out must be left out whole: an engine would hold half of it old and half new."""
    blocks: dict[str, list[str]] = {}
    for name in index:
        if found := _BLOCK.match(name):
            blocks.setdefault(found[1], []).append(name)
    problems = []
    for block, names in blocks.items():
        unsent = [name for name in names if name not in senders]
        if 0 < len(unsent) < len(names) and all(map(optional, names)):
            problems += [f"partly: of {block} some tensors are sent, but nobody sends {name} {_shape(index[name])}"
                         for name in unsent]
    return problems


def _meta_problem(stage: int, meta: TensorMeta, index: Mapping[str, TensorMeta],
                  optional: Callable[[str], bool]) -> str | None:
    expected = index.get(meta.name)
    if expected is None:
        return None if optional(meta.name) else f"extra: stage {stage} sends {meta.name} {_shape(meta)}, not in the checkpoint"
    if expected.shape != meta.shape:
        return f"shape: {meta.name} is {list(expected.shape)} in the checkpoint, stage {stage} sends {list(meta.shape)}"
    if expected.dtype != meta.dtype:
        return f"dtype: {meta.name} is {expected.dtype} in the checkpoint, stage {stage} sends {meta.dtype}"
    return None


def _shape(meta: TensorMeta) -> str:
    return f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')}"


# --- per update ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage's source sent in one update: carried by its closing barrier, judged by the lead."""

    stage: int
    count: int
    digest: str
    bytes: int
    buckets: int
    offender: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "count": self.count, "digest": self.digest, "bytes": self.bytes,
                "buckets": self.buckets, "offender": self.offender}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageReport:
        return cls(**data)


class SentRecord:
    """Watches what one source sends and compares it with what its stage announced at connect (order does not matter)."""

    def __init__(self, stage: int, announced: Iterable[TensorMeta]) -> None:
        self.stage = stage
        self._left = Counter(announced)
        self._digest = MetaDigest()
        self._bytes = 0
        self._buckets = 0
        self._offender = ""

    def bucket(self, tensors: Sequence[NamedTensor]) -> None:
        """Record one bucket that has been sent."""
        self._buckets += 1
        for name, tensor in tensors:
            meta = TensorMeta(name, tensor.dtype, tuple(tensor.shape))
            if self._left[meta] <= 0 and not self._offender:
                self._offender = self._what_is_wrong_with(meta)
            self._left[meta] -= 1
            self._digest.add(meta)
            self._bytes += meta.nbytes

    def _what_is_wrong_with(self, meta: TensorMeta) -> str:
        other = next((a for a in self._left if a.name == meta.name and a != meta and self._left[a] > 0), None)
        if other is not None:
            return f"{meta.name} was announced as {_shape(other)} at connect and sent as {_shape(meta)}"
        return f"{meta.name} {_shape(meta)} was sent more often than announced at connect"

    def report(self) -> StageReport:
        left = next((meta for meta, n in self._left.items() if n > 0), None)
        offender = self._offender or (f"{left.name} {_shape(left)} was announced at connect and not sent" if left else "")
        return StageReport(self.stage, self._digest.count, self._digest.hex(), self._bytes, self._buckets, offender)


class MetaDigest:
    """A digest of a set of metas that does not depend on their order: the sum of their SHA-256 values modulo 2**256."""

    def __init__(self, metas: Iterable[TensorMeta] = ()) -> None:
        self.count = 0
        self._sum = 0
        for meta in metas:
            self.add(meta)

    def add(self, meta: TensorMeta) -> None:
        text = f"{meta.name}\0{meta.dtype}\0{meta.shape}"
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")) % (1 << 256)
        self.count += 1

    def hex(self) -> str:
        return f"{self._sum:064x}"


def judge(report: StageReport, announced: Sequence[TensorMeta]) -> str | None:
    """The lead's verdict on one stage: None, or what is wrong."""
    expected = MetaDigest(announced)
    if report.count == expected.count and report.digest == expected.hex():
        return None
    return (f"stage {report.stage} sent {report.count} tensors, announced {expected.count} at connect; first offender: "
            f"{report.offender or 'unknown (digests differ)'}")
