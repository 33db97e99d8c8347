"""Progress bars, the one line per update, metrics, hang reports."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.faults import Faults
from harness.recording.job import RecordingJob
from harness.recording.model import small_table
from staged_sync import stage


class Bar:
    """Stands in for tqdm and remembers what it was told."""

    made: list[Bar]

    def __init__(self, **options: Any) -> None:
        self.options, self.shown, self.closed = options, 0, False
        self.made.append(self)

    def update(self, amount: int) -> None:
        self.shown += amount

    def close(self) -> None:
        self.closed = True


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """On a terminal."""
    Bar.made = []
    monkeypatch.setattr(stage, "tqdm", Bar)
    monkeypatch.setattr(stage, "sys", SimpleNamespace(stderr=Terminal()))
    return Bar.made


def test_one_bar_per_source_that_fills_up_and_goes_away(bars: list[Bar]) -> None:
    with RecordingJob(tp=2, pp=2) as job:
        job.connect().check()
        job.update().check()
    assert [bar.options["desc"] for bar in bars] == ["[vime-pp_0] Update weights", "[vime-pp_1] Update weights"]
    assert all(bar.shown == bar.options["total"] > 0 and bar.closed for bar in bars)


def test_there_is_no_bar_where_stderr_is_no_terminal(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm would show nothing there, and yet start a thread that watches it."""
    monkeypatch.setattr(stage, "sys", SimpleNamespace(stderr=io.StringIO()))
    with RecordingJob(pp=2) as job:
        job.connect().check()
        job.update().check()
    assert bars == []


def test_a_bar_goes_away_after_a_failure_too(bars: list[Bar]) -> None:
    faults = Faults().fail_at(rank=1, event="send", stage=1)
    with RecordingJob(pp=2, faults=faults) as job:
        job.connect().check()
        job.update()
    faults.assert_all_fired()
    assert len(bars) == 2 and all(bar.closed for bar in bars)


@pytest.mark.parametrize("broken", ["__init__", "update", "close"])
def test_a_terminal_that_has_gone_fails_no_update(bars: list[Bar], monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Bar, broken, gone)
    with RecordingJob(pp=2, faults=Faults().fail_at(rank=1, event="send", stage=1, nth=1)) as job:
        job.connect().check()
        job.update().check()
        errors = job.update().errors
        assert len(errors) == 2 and all("injected: rank 1" in str(error) for error in errors.values()), "the cause is told"


def test_an_update_is_one_info_line_of_the_lead(caplog: pytest.LogCaptureFixture) -> None:
    with RecordingJob(tp=2, pp=2) as job, caplog.at_level(logging.INFO, "staged_sync"):
        job.connect().check()
        assert caplog.messages == []
        job.update().check()
        job.update().check()
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("weight version 1 is on all engines: 4 tensors, 0.000 GB, 2 buckets, 2 stages in 0.00 s "
                                         "(pause 0.00, start 0.00, send 0.00, finish 0.00, publish 0.00, resume 0.00)")
    assert caplog.messages[1].startswith("weight version 2 is on all engines")


def test_metrics_of_the_last_update_can_be_popped_once_on_every_rank() -> None:
    table = small_table(2)
    with RecordingJob(pp=2, table=table, args={"update_weight_buffer_size": 1}) as job:
        job.connect().check()
        job.update().check()
        job.update().check()
        for updater in job.updaters:
            metrics = updater.pop_metrics()
            assert metrics["update_weight/tensors"] == 4 and metrics["update_weight/buckets"] == 4
            assert metrics["update_weight/bytes"] == sum(m.nbytes for s in job.updaters[0]._link.announced for m in s)  # type: ignore[union-attr]
            assert {name for name in metrics if name.endswith("_s")} == {
                f"update_weight/{phase}_s" for phase in ("pause", "start", "send", "finish", "publish", "resume", "total")}
            assert updater.pop_metrics() == {}


@pytest.mark.parametrize(("more", "said"), [
    (1, "1 tensor(s) of the HF checkpoint are sent by nobody, so engines keep what they have for them: hf.s1.dense2"),
    (12, "12 tensor(s) of the HF checkpoint are sent by nobody, so engines keep what they have for them: hf.s1.dense10, "
         "hf.s1.dense11, hf.s1.dense12, hf.s1.dense13, hf.s1.dense2, hf.s1.dense3, hf.s1.dense4, hf.s1.dense5, hf.s1.dense6, "
         "hf.s1.dense7, …"),
])
def test_what_the_checkpoint_names_and_nobody_sends_is_one_line_of_the_lead(
        more: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = [small_table(2)[0], small_table(2, dense=2 + more)[1]]
    sent = {meta.name for stage in small_table(2) for unit in stage for meta in unit.tensors}
    with RecordingJob(pp=2, checkpoint=checkpoint) as job, caplog.at_level(logging.INFO, "staged_sync"):
        for exporter in job.exporters:
            exporter.optional = lambda name: name not in sent  # type: ignore[method-assign]
        job.connect().check()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", said)]


def test_a_deadline_leaves_a_table_on_the_console_and_the_rest_in_a_file(tmp_path: Path,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults().never_answers(engine=1, method="update_weights_from_distributed")
    args = {"update_weight_report_folder": str(tmp_path), "update_weight_call_timeout": 10.0,
            "update_weight_phase_timeout": 30.0, "update_weight_timeout": 90.0}
    with RecordingJob(pp=2, engines=[1, 1], faults=faults, args=args) as job:
        job.connect().check()
        job.update()
    (report,) = tmp_path.iterdir()
    table = next(message for message in caplog.messages if message.startswith("a deadline is over on rank 0:"))
    head, source, engine = table.splitlines()[1:4]
    assert head.split() == ["who", "phase", "stage", "bucket", "group", "waiting", "for", "since"]
    assert source.split()[:5] == ["rank0", "send", "0", "0", "vime-pp_0"] and source.endswith("10.0 s")
    assert engine.split()[:5] == ["engine1", "send", "0", "0", "vime-pp_0"]
    assert "has not answered update_weights_from_distributed" in engine
    text = report.read_text()
    assert table.splitlines()[2] in text and "--- stacks of rank 0 ---" in text
    assert "rpc vime-pp_0 stage=0 bucket=0 update_weights_from_distributed engine1" in text


def test_a_second_call_while_one_runs_is_refused_and_says_where_the_first_one_stands() -> None:
    with RecordingJob(pp=2) as job:
        job.connect().check()
        updater = job.updaters[0]
        updater.trace.on_event = lambda event: updater.update_weights() if event.event == "open" else None
        result = job.update()
    text = str(result.errors[0])
    assert "UpdateInProgress: update_weights() was called on rank 0 while another weight sync call is running on it" in text
    assert "phase send, stage 0, group vime-pp_0" in text
