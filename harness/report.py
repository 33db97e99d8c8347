"""What a person sees after a world run: one row per update. And the same as JSON, for machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from harness.world.job import SyncReport
from harness.world.receiver import EngineReport

_PHASES = ("pause", "start", "send", "finish", "publish", "resume")
_WIDTH = 400
"""More than any row needs: a row that is cut proves nothing."""

_CAPTION = """\
pause … resume: seconds on the lead, barriers included. bit-exact: tensors on arrival against the safetensors file, per engine,
over all of its workers. after finish: parameters against a reference engine's (in brackets: those read as they were before vLLM
packed them). tokens, logprobs: every prompt of every engine against the reference engine's."""


def print_summary(reports: Sequence[SyncReport], file: TextIO) -> None:
    table = Table(title="weight updates", title_justify="left", caption=_CAPTION, caption_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0))
    for column in ("scenario", "world", "version", "stages, in order"):
        table.add_column(column, no_wrap=True)
    for column in ("buckets", "bytes", *_PHASES):
        table.add_column(column, no_wrap=True, justify="right")
    for column in ("bit-exact", "after finish", "tokens", "logprobs"):
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
            _each(f"{e.tensors_equal}/{e.tensors_total}" for e in engines),
            _each(f"{e.parameters_equal}/{e.parameters_total} ({e.parameters_unpacked})" for e in engines),
            _verdict(all(e.tokens_equal for e in engines)), _verdict(all(e.logprobs_equal for e in engines))]


def _each(texts: Iterable[str]) -> str:
    """One text per engine, said once where all are the same."""
    texts = list(texts)
    if len(set(texts)) == 1:
        return texts[0] if len(texts) == 1 else f"{len(texts)} × {texts[0]}"
    return ", ".join(texts)


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def one_line(engine: EngineReport) -> str:
    """For logs: what one engine got."""
    return (f"engine {engine.engine}: {engine.tensors_equal}/{engine.tensors_total} tensors bit-exact over "
            f"{', then '.join(engine.groups)}; tokens {_verdict(engine.tokens_equal)}, "
            f"logprobs {_verdict(engine.logprobs_equal)}")
