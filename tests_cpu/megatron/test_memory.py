"""How much memory an export takes, measured by torch's own allocation events.

The seam allocates what a live one does: the gathered tensors, one per member. On the source, everything that the export holds at
once, with the bucket that is being filled, stays within two buckets plus the largest tensor; a gather peer holds one gathered
unit (half a bucket) and what it takes to gather it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.checkpoints import checkpoint_tensors, hf_config
from staged_sync.buckets import Bucketer
from staged_sync.megatron import raw_export, units
from staged_sync.megatron.raw_export import RawExporter
from tests_cpu.megatron.fakes import PARTS, RecordingSeam, World, exporter, stage_model, world, write_config

CONFIG = hf_config("qwen3_moe", num_layers=6, heads=4, groups=2, num_experts=16, vocab_size=1021)
LARGEST = 1024 * 96 * 2
"""The embedding, with its padding rows: 196,608 bytes."""
BUCKET = 1 << 18
EXPERTS_OF_ALL_LAYERS = 6 * 16 * 3 * 64 * 96 * 2
"""3.5 million bytes: thirteen buckets."""

LAYOUTS = {"ep4": world(CONFIG, ep=4, dp=4, padded_vocab=1024), "etp2·ep2": world(CONFIG, ep=2, etp=2, dp=4, padded_vocab=1024),
           "tp2·ep2": world(CONFIG, tp=2, ep=2, padded_vocab=1024),
           "grouped": world(CONFIG, ep=2, etp=2, dp=4, container="grouped", padded_vocab=1024)}


class AllocatingSeam(RecordingSeam):
    """Allocates like a live all-gather, keeps nothing."""

    def all_gather(self, tensor: torch.Tensor, group: str, *, timeout_s: float) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(getattr(self.coordinates(), f"{group}_size"))]


def peak_bytes(function: Callable[[], None]) -> int:
    """The most bytes that were allocated at once while `function` ran, above what there was before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    live = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def export_as_source(export: RawExporter, bucket: int) -> None:
    """As `staged_sync.stage` drives a source; a closed bucket is dropped as soon as it would have been sent."""
    for part in PARTS:
        bucketer = Bucketer(bucket)
        for unit in export.units(part):
            gathered = export.gather(unit, timeout_s=7)
            bucketer.add(export.convert(unit, gathered))
        bucketer.flush()


def join_as_peer(export: RawExporter) -> None:
    for unit in export.units("expert"):
        export.gather(unit, timeout_s=7)


def make(folder: Path, at: World, bucket: int = BUCKET) -> RawExporter:
    args = write_config(folder, at.config, update_weight_buffer_size=bucket)
    return exporter(args, stage_model(checkpoint_tensors(at.config), at), AllocatingSeam(at))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_holds_at_most_two_buckets_and_the_largest_tensor(layout: str, tmp_path: Path) -> None:
    export = make(tmp_path, LAYOUTS[layout])
    peak = peak_bytes(lambda: export_as_source(export, BUCKET))
    assert BUCKET < peak <= 2 * BUCKET + LARGEST
    assert peak < EXPERTS_OF_ALL_LAYERS / 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_peer_holds_one_gathered_unit_and_nothing_else(layout: str, tmp_path: Path) -> None:
    export = make(tmp_path, LAYOUTS[layout])
    assert peak_bytes(lambda: join_as_peer(export)) <= BUCKET


def test_describing_allocates_no_weights(tmp_path: Path) -> None:
    export = make(tmp_path, LAYOUTS["ep4"])
    assert peak_bytes(lambda: export.describe()) == 0


def test_the_measure_sees_units_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same assertions, red: everything in one unit."""
    stock = units.units_of
    monkeypatch.setattr(raw_export, "units_of", lambda pieces, part, limit: stock(pieces, part, 1 << 40))
    export = make(tmp_path, LAYOUTS["ep4"])
    assert peak_bytes(lambda: export_as_source(export, BUCKET)) > EXPERTS_OF_ALL_LAYERS
    assert peak_bytes(lambda: join_as_peer(export)) > EXPERTS_OF_ALL_LAYERS


def test_the_measure_sees_a_copy(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    assert peak_bytes(lambda: copy_twice(tensor)) >= 2 << 20


def copy_twice(tensor: torch.Tensor) -> None:
    copies = [tensor.clone(), tensor.clone()]
    del copies
