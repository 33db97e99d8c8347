"""What a person sees after a world run: one row per update. And the same as JSON, for machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from harness.world.job import SyncReport
from harness.world.receiver import EngineReport

_PHASES = ("pause", "start", "send", "finish", "publish", "resume")
_WIDTH = 200
_CAPTION = """\
bit-exact: tensors on arrival against the safetensors file, per engine. after finish: parameters against a reference engine \
(in brackets: those read as
they were before vLLM packed them). tokens, logprobs: all engines, all prompts, against the reference engine."""


def print_summary(reports: Sequence[SyncReport], file: TextIO) -> None:
    table = Table(title="weight updates", title_justify="left", caption=_CAPTION, caption_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0))
    for column in ("scenario", "world", "v", "stages, in order", "buckets", "bytes", *(f"{phase} s" for phase in _PHASES),
                   "bit-exact", "after finish", "tokens", "logprobs"):
        table.add_column(column, no_wrap=True)
    for report in reports:
        table.add_row(*_row(report))
    Console(file=file, width=_WIDTH, color_system=None).print(table)


def write_json(reports: Sequence[SyncReport], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(reports))))


def _row(report: SyncReport) -> list[str]:
    engines = report.engines
    return [report.scenario, report.topology, str(report.version), ", ".join(report.stages), str(report.buckets),
            f"{report.bytes:,}", *(f"{report.seconds.get(phase, 0.0):.3f}" for phase in _PHASES),
            " ".join(f"{e.tensors_equal}/{e.tensors_total}" for e in engines),
            " ".join(f"{e.parameters_equal}/{e.parameters_total}({e.parameters_unpacked})" for e in engines),
            _verdict(all(e.tokens_equal for e in engines)), _verdict(all(e.logprobs_equal for e in engines))]


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def one_line(engine: EngineReport) -> str:
    """For logs: what one engine got."""
    return (f"engine {engine.engine}: {engine.tensors_equal}/{engine.tensors_total} tensors bit-exact over "
            f"{', then '.join(engine.groups)}; tokens {_verdict(engine.tokens_equal)}, "
            f"logprobs {_verdict(engine.logprobs_equal)}")
