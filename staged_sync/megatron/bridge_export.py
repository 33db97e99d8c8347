"""Bridge export: HF tensors that somebody else's iterator yields (Megatron-Bridge, mbridge, the caller's own).

Who may export with whom is not visible from outside, so a `MarkedExport` declares its contract. docs/bridge.md says which
bridge has which.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from staged_sync.errors import CompletenessError, DeadlineExceeded, GatherError
from staged_sync.exporter import ITERATED_PASS, Contract, NamedTensor, Part, TensorMeta
from staged_sync.in_step import WRONG_CONTRACT
from staged_sync.megatron.families.common import HF_EMBEDDING, HF_HEAD
from staged_sync.megatron.sharing import Sharing
from staged_sync.megatron.sizes import read_hf_config
from staged_sync.seam import Seam
from staged_sync.trace import Trace


@dataclass(frozen=True)
class MarkedExport:
    """An export as an iterator of (HF name, full tensor), and what its maker declares about it.

    `begin()` starts one export and returns its iterator. Every rank that iterates must be given the same names and shapes in
    the same order. A tensor may be strided, on another device, wider than the checkpoint's, or a view of a buffer that the
    next item overwrites. `contract`: `stage_local` if the ranks of one pipeline stage can iterate it to its end alone,
    `pipeline_collective` if every rank must iterate. `names()`: the HF names that this rank's stage will yield, where a stage
    exports alone: nobody else knows them before. `reads_model`: whether it reads the model's own parameters.
    """

    name: str
    contract: Contract
    begin: Callable[[], Iterable[tuple[Any, ...]]]
    names: Callable[[], Iterable[str]] | None = None
    reads_model: bool = True


@dataclass(frozen=True, slots=True)
class Item:
    """What one step of the iterator gave; `pair` is None at the end."""

    pair: tuple[Any, Any] | None

    @property
    def nbytes(self) -> int:
        tensor = None if self.pair is None else self.pair[1]
        return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


@dataclass(slots=True)
class Step:
    """The unit of a bridge export: one `next()`."""

    number: int
    stream: Iterator[tuple[Any, ...]]
    ended: bool = False

    @property
    def label(self) -> str:
        return f"item {self.number}"


class BridgeExporter:
    """Drives a `MarkedExport` (`staged_sync.exporter.Exporter`). `hf_tensors` is the header of the HF checkpoint.

    What is announced at connect is the checkpoint's index (a stage's names of it, where stages export alone), since a bridge
    cannot say what it will yield before it yields it; names, shapes and dtypes are checked as they come, the whole per update.

    Memory: each tensor is copied once, into the bucket that is being filled. Ranks that do not send keep nothing.
    """

    def __init__(self, args: Any, model: Sequence[nn.Module], export: MarkedExport, *, seam: Seam,
                 hf_tensors: Mapping[str, TensorMeta] | None, trace: Trace | None = None) -> None:
        self.contract = export.contract
        self.passes = ITERATED_PASS[export.contract]
        self._model = model
        self._export = export
        self._seam = seam
        self._trace = trace
        self._hf_tensors = hf_tensors or {}
        self._usual_dtype = Counter(meta.dtype for meta in self._hf_tensors.values()).most_common(1)
        self._hf_config, self._setup_problems = read_hf_config(args)
        self._sharing = Sharing(self._hf_config, model)
        self._copies = {copy for name in self._hf_tensors for copy in self._sharing.copies_of(name)} & set(self._hf_tensors)
        self._seen: set[str] = set()

    # --- before anything is paused --------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Everything that stands in the way on this rank, as full sentences; empty if nothing. Local."""
        problems = list(self._setup_problems)
        empty = [name for chunk in self._model for name, p in chunk.named_parameters() if p.numel() == 0]
        if empty and self._export.reads_model:
            problems.append(f"parameters without storage (offloaded?): {', '.join(empty[:5])} ({len(empty)} in all). Load the "
                            f"model back to the device before weights are synchronised")
        if self._export.names is None and self.contract == "stage_local" and self._seam.coordinates().pp_size > 1:
            problems.append(f"{self._export.name} is declared stage_local, so it must say which HF names this stage will yield "
                            f"(MarkedExport.names), or nobody could tell at connect whether every tensor is sent")
        return problems

    def describe(self) -> list[TensorMeta]:
        """What the HF checkpoint says about the stage's names; or all of it, without what the trainer does not have."""
        if self._export.names is None:
            return [meta for name, meta in self._hf_tensors.items() if name in self._copies or not self.optional(name)]
        names = list(self._export.names())
        if unknown := [name for name in names if name not in self._hf_tensors]:
            raise CompletenessError(f"{self._export.name} will yield {', '.join(unknown[:5])} ({len(unknown)} in all), which the "
                                    f"HF checkpoint does not name")
        return [self._hf_tensors[name] for name in names]

    def gathers(self, part: Part) -> list[str]:
        """Which bridge: ranks that iterate different ones would hang."""
        return [f"{self._export.name}, {self.contract}"]

    def optional(self, name: str) -> bool:
        """The family's rule for names that the checkpoint may have and nobody sends; without a family, a tied head only."""
        return self._sharing.optional(name)

    # --- the export -----------------------------------------------------------------------------------------------------

    def units(self, part: Part) -> Generator[Step, None, None]:
        """One step per item, until the iterator ends; a new iterator each time, so that nothing is left of the last update."""
        self._seen.clear()
        return _steps(iter(self._export.begin()))

    def gather(self, unit: Step, *, timeout_s: float) -> Item:
        """The next item. Whatever the iterator raises ends it, so it is a `GatherError`.

        Not bounded by `timeout_s`: the collectives inside are the bridge's own, over groups of the trainer, and end with the
        time-out of those groups.
        """
        began_s, entered = self._seam.now(), False
        try:
            with nullcontext() if self._trace is None else self._trace.waiting("gather", detail=unit.label, group="export"):
                entered = True
                found = next(unit.stream, None)
        except Exception as error:
            if not entered:
                raise
            late = self._seam.now() - began_s >= timeout_s or _timed_out(error)
            raise GatherError(f"{self._export.name} failed at {unit.label}: {type(error).__name__}: {error}"
                              f"{self._declared_wrongly() if late else ''}") from error
        unit.ended = found is None
        return Item(None if found is None else (found[0], found[1]))

    def _declared_wrongly(self) -> str:
        if self.contract == "stage_local" and self._seam.coordinates().pp_size > 1:
            return f". If its ranks of other stages were not there, the {WRONG_CONTRACT}"
        return ""

    def convert(self, unit: Step, gathered: Item) -> list[NamedTensor]:
        """The item as it goes into a bucket: a copy of its own, contiguous, on the model's device, in the checkpoint's dtype.

        Raises `CompletenessError` for what the checkpoint does not name, names otherwise, or has come before.
        """
        if gathered.pair is None:
            return []
        name, tensor = gathered.pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise CompletenessError(f"{self._export.name} yields {type(name).__name__} and {_kind(tensor)} as {unit.label}; it "
                                    f"must be an HF name and a tensor with its bytes, on every rank that iterates")
        if self._comes_again(name):
            return []
        own = self._own_copy(name, tensor)
        # A copy that the checkpoint names (a tied head, MTP's embedding) is sent as well, once, whether or not it is yielded.
        names = [name, *(copy for copy in self._sharing.copies_of(name) if copy in self._copies - self._seen)]
        self._seen.update(names)
        return [(name, own) for name in names]

    def _comes_again(self, name: str) -> bool:
        """Whether `name` was sent already and may come again: what has copies, and copies, which bridges yield once per stage
        that holds them (mbridge) or per name (Megatron-Bridge). The first one counts."""
        if name not in self._seen:
            return False
        if name in self._copies or self._sharing.copies_of(name):
            return True
        raise CompletenessError(f"{self._export.name} yields {name} twice; only a tied embedding may come again")

    def _own_copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        meta = self._hf_tensors.get(name)
        if meta is None:
            raise CompletenessError(f"{self._export.name} yields {name} {_kind(tensor)}, which the HF checkpoint does not name")
        tensor = _without_padding(name, tensor, meta)
        if tuple(tensor.shape) != meta.shape:
            raise CompletenessError(f"{self._export.name} yields {name} as {_kind(tensor)}; it is {list(meta.shape)} in the "
                                    f"checkpoint")
        if tensor.dtype != meta.dtype and (why := self._cannot_become(tensor.dtype, meta.dtype)):
            raise CompletenessError(f"{self._export.name} yields {name} as {_kind(tensor)}; it is {_short(meta.dtype)} in the "
                                    f"checkpoint: {why}")
        device = next((p.device for chunk in self._model for p in chunk.parameters()), torch.device("cpu"))
        return torch.empty(meta.shape, dtype=meta.dtype, device=device).copy_(tensor.detach())

    def _cannot_become(self, have: torch.dtype, want: torch.dtype) -> str:
        """Why a tensor must not be cast on its way; empty if it may, as a raw export does it."""
        if not (have.is_floating_point and want.is_floating_point) or want.itemsize < 2:
            return "these are no two precisions of one number"
        if want.itemsize > have.itemsize and self._usual_dtype and want != self._usual_dtype[0][0]:
            return (f"it is kept wider than the others there, and the export has rounded it. Keep the trainer's copy in "
                    f"{_short(want)}")
        return ""


def _steps(stream: Iterator[tuple[Any, ...]]) -> Generator[Step, None, None]:
    try:
        for number in itertools.count():
            step = Step(number, stream)
            yield step
            if step.ended:
                return
    finally:
        if isinstance(stream, Generator):
            stream.close()  # also in the middle: what it holds is freed now and not whenever it is collected


def _without_padding(name: str, tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Megatron pads the vocabulary to what its ranks can share, and bridges may yield the padding."""
    if name.endswith((HF_EMBEDDING, HF_HEAD)) and tensor.shape[1:] == meta.shape[1:] and len(tensor) > meta.shape[0]:
        return tensor[:meta.shape[0]]
    return tensor


def _timed_out(error: Exception) -> bool:
    """gloo and NCCL say it in words only."""
    return isinstance(error, (TimeoutError, DeadlineExceeded)) or any(w in str(error).lower() for w in ("timed out", "timeout"))


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{list(value.shape)} {_short(value.dtype)} on {value.device}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
