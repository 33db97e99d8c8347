"""How the ranks of a simulated trainer export, by name."""

from __future__ import annotations

from typing import Literal, TypeAlias

from harness.recording.bridge import bridge
from harness.recording.job import MakeExporter

Export: TypeAlias = Literal["raw", "bridge", "prefetching", "stage-local", "declared wrongly"]
"""
raw               our own: gathers in the groups that each unit needs
bridge            an iterator that all ranks meet in at every step, declared pipeline_collective
prefetching       the same, but they meet in every third step only, and bring three tensors together there
stage-local       an iterator that the ranks of one stage meet in, declared stage_local
declared wrongly  the iterator of `bridge`, declared stage_local: only a deadline ends it, and the error must say why
"""

EXPORTERS: dict[Export, MakeExporter | None] = {
    "raw": None, "bridge": bridge("pipeline_collective"), "prefetching": bridge("pipeline_collective", together=3),
    "stage-local": bridge("stage_local", ("tp",)), "declared wrongly": bridge("stage_local", ("pp", "tp")),
}

COLLECTIVE: frozenset[Export] = frozenset({"bridge", "prefetching"})
"""Those that every rank iterates, and that the source of stage 0 alone sends."""
