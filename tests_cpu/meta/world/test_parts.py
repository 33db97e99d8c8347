"""The small parts of the world harness, each alone."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from harness.world.deadline import Deadline
from harness.world.devices import TooFewGpus, choose, gpus_needed
from harness.world.files import WorldFiles
from harness.world.hang import hang_report
from harness.world.hub import Outcome, RunState
from harness.world.nesting import WORLD_GUARD_S, DeadlinesDoNotNest, check_nesting
from harness.world.position import PositionLog, PublishedEvents, as_dicts, read_log
from harness.world.process import Life, require_single_thread, state_of
from harness.world.wire import Problem, Request, Snapshot, Topology, decode, encode
from staged_sync.trace import Trace


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_a_deadline_is_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="a deadline must be a finite number of seconds"):
        Deadline.after(seconds)


def test_a_deadline_shortens_but_never_grows() -> None:
    deadline = Deadline.after(10)
    assert deadline.at_most(1).limit_s == 1
    assert deadline.at_most(100) is deadline
    assert Deadline.after(0).expired


# --- position -----------------------------------------------------------------------------------------------------------
def test_the_last_line_of_the_log_is_the_position(tmp_path: Path) -> None:
    log, clock = PositionLog(tmp_path / "log"), iter(range(100))
    trace = Trace(3, now=lambda: float(next(clock)))
    trace.events = PublishedEvents(trace, log)
    with trace.at(phase="send", stage=1, bucket=2, group="vime-pp_1"), trace.waiting("gather", detail="layers.7", group="tp"):
        last = read_log(tmp_path / "log")[-1]
        assert (last.phase, last.stage, last.bucket, last.group) == ("send", 1, 2, "tp")
        assert (last.event, last.waiting_for) == ("gather layers.7", "gather layers.7")
        assert last.since_s < last.time_s
    assert read_log(tmp_path / "log")[-1].event == "gather.done layers.7"
    assert read_log(tmp_path / "log")[-1].waiting_for == ""


def test_a_torn_last_line_is_left_out_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    log = PositionLog(tmp_path / "log")
    log.note("one")
    log.note("two")
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"time_s": 1, "ev')
    assert [standing.event for standing in read_log(tmp_path / "log")] == ["one", "two"]
    assert read_log(tmp_path / "nothing") == []


def test_a_new_scenario_starts_a_new_log(tmp_path: Path) -> None:
    log = PositionLog(tmp_path / "log")
    log.note("old")
    log.restart("module:function")
    assert [standing.event for standing in read_log(tmp_path / "log")] == ["scenario module:function"]


# --- hang report --------------------------------------------------------------------------------------------------------
def test_the_hang_table_says_who_waits_for_what_and_what_is_unknown(tmp_path: Path) -> None:
    log = PositionLog(tmp_path / "log")
    trace = Trace(0, now=lambda: 1.0)
    trace.events = PublishedEvents(trace, log)
    with trace.at(phase="send", stage=0, bucket=4, group="vime-pp_0"), trace.waiting("rpc", detail="update engine0"):
        standing = as_dicts(read_log(tmp_path / "log"))
    run = RunState(1, "module:function", pending={0},
                   outcomes={1: Outcome(1, None, Problem("GatherError", "lost", "Traceback …"))})
    snapshots = {0: Snapshot(0, 11, "sleeping", "Thread 0x1\n  in here", standing, "its log"),
                 1: Snapshot(1, 12, "ended", "", [], "")}
    text = hang_report(Topology(pp=2, engines=1), run, snapshots, limit_s=3, directory=tmp_path, lock_held=True)
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert text.startswith("module:function did not end within 3 s in the world tp1·pp2 + 1 engine on cpu; still busy: rank0")
    assert "rank1 (rank 1) had already failed: GatherError: lost" in text
    assert "the rollout engine lock is held" in text
    for cell in ("sleeping", "send", "0", "4", "vime-pp_0", "rpc update engine0"):
        assert f" {cell} " in rows["rank0"]
    assert "ended" in rows["rank1"]
    assert "supervisor silent" in rows["engine0 (rank 2)"]
    report = (tmp_path / "hang_report.txt").read_text()
    assert "in here" in report
    assert "its log" in report
    assert "rpc update engine0  phase=send stage=0 bucket=4 group=vime-pp_0" in report


# --- processes ----------------------------------------------------------------------------------------------------------
def test_life_sees_the_end_of_a_process_and_that_it_never_was() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = Life(process.pid)
    assert not life.over()
    process.communicate(b"\n", timeout=10)
    assert life.wait(10)
    assert Life(process.pid).over()
    assert state_of(process.pid) == "ended"


def test_a_process_with_threads_must_not_fork_ranks() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"the host must have one thread when it forks ranks; found \d+"):
            require_single_thread("the host")
    finally:
        stop.set()
        thread.join()


def test_a_directory_too_long_for_sockets_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set TMPDIR to a shorter directory"):
        WorldFiles(tmp_path / ("x" * 120))


# --- wire ---------------------------------------------------------------------------------------------------------------
def test_dtypes_travel_and_objects_do_not() -> None:
    request = Request(1, "update", {"dtypes": [torch.bfloat16, torch.float8_e4m3fn], "shapes": [[2, 3]], "packed": False})
    assert decode(encode(request)) == request
    with pytest.raises(TypeError, match=r"set does not travel|Tensor does not travel"):
        encode(Request(1, "update", {"tensor": torch.ones(1)}))


# --- choices ------------------------------------------------------------------------------------------------------------
def test_auto_takes_cuda_only_where_there_are_enough_gpus() -> None:
    assert choose("auto", 4, found=4).name == "cuda"
    assert choose("auto", 4, found=3).text() == (
        "device: CPU with gloo, vLLM's CPU build (--device auto; 4 GPUs needed, 3 found)")
    assert choose("cpu", 4, found=8).name == "cpu"


def test_cuda_fails_where_gpus_are_too_few() -> None:
    with pytest.raises(TooFewGpus, match="--device cuda: 4 GPUs needed, 1 found"):
        choose("cuda", 4, found=1)
    assert choose("cuda", 4, found=4).name == "cuda"


def test_gpus_needed_are_those_of_the_largest_world() -> None:
    assert gpus_needed(None, None) == 4 + 2
    assert gpus_needed(1, 2) == 2 + 2
    assert gpus_needed(None, 2) == 2 + 2


def test_deadlines_nest() -> None:
    check_nesting("test_x", 60, 60 + WORLD_GUARD_S)
    with pytest.raises(DeadlinesDoNotNest, match=r"test_x: timeout\(70\) must be at least nccl_timeout 60 s"):
        check_nesting("test_x", 60, 70)
