"""The world harness on real forked ranks: results, errors, deaths, hangs, freeze points, remote calls. Nobody waits for ever,
nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.world.deadline import Deadline
from harness.world.pool import WorldPool
from harness.world.process import Life
from harness.world.wire import Topology
from harness.world.world import ScenarioFailed, World, WorldHung
from tests_cpu.meta.world import dummies

SOON_S = 10.0
"""For what takes milliseconds; long, because cores are shared."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    pool = WorldPool(("torch", "torch.distributed"), tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


@pytest.fixture
def world(pool: WorldPool) -> World:
    return pool.get(Topology(pp=2, engines=1))


def test_every_rank_answers_and_knows_who_it_is(world: World) -> None:
    answers = world.run(dummies.who, on=range(3), deadline=Deadline.after(SOON_S), greeting="good morning")
    assert [answer["actor"] for answer in answers] == ["rank0", "rank1", "engine0"]
    assert [answer["torchrun"] for answer in answers] == ["0", "1", None], "vLLM must not see torchrun's variables"
    assert {answer["greeting"] for answer in answers} == {"good morning"}
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 4


def test_ranks_meet_over_torchruns_store(world: World) -> None:
    assert world.run(dummies.add_ranks, on=world.trainer_ranks, deadline=Deadline.after(SOON_S)) == [3.0, 3.0]


def test_a_world_serves_many_tests_and_is_replaced_after_a_failed_scenario(pool: WorldPool, world: World) -> None:
    assert pool.get(world.topology) is world
    with pytest.raises(ScenarioFailed) as caught:
        world.run(dummies.raises_on, on=range(3), deadline=Deadline.after(SOON_S), ranks=[1, 2])
    text = str(caught.value)
    assert "rank1 (rank 1): ValueError: planted on ranks [1, 2]" in text
    assert "engine0 (rank 2): the same as rank1 (rank 1)" in text
    assert text.count("in raises_on") == 1, "the remote traceback must be shown, once"
    assert caught.value.outcomes[0].value == "fine"
    assert pool.get(world.topology) is not world


def test_an_answer_that_does_not_travel_is_an_error_of_the_scenario(world: World) -> None:
    outcomes = world.start(dummies.returns_an_object, on=[0]).wait(Deadline.after(SOON_S))
    assert outcomes[0].problem is not None
    assert outcomes[0].problem.text == "object does not travel between processes; send numbers, text, lists or dicts"
    assert world.healthy


def test_a_rank_that_dies_is_reported_and_its_world_replaced(pool: WorldPool, world: World) -> None:
    outcomes = world.start(dummies.dies, on=range(3), rank=2).wait(Deadline.after(SOON_S))
    assert outcomes[0].value == outcomes[1].value == "fine"
    problem = outcomes[2].problem
    assert problem is not None
    assert problem.kind == "RankDied"
    assert problem.text.endswith("ended with signal SIGKILL")
    late = world.start(dummies.who, on=[2], greeting="").wait(Deadline.after(SOON_S))[2].problem
    assert late is not None
    assert problem.traceback == late.traceback == "these were my last words\n", "the end of its log must be shown, also later"
    assert not world.healthy
    assert pool.get(world.topology) is not world


def test_a_killed_rank_can_be_replaced_by_a_fresh_process(world: World) -> None:
    before = world.run(dummies.who, on=[1], deadline=Deadline.after(SOON_S), greeting="")[0]["pid"]
    world.kill(1, Deadline.after(SOON_S))
    assert Life(before).over()
    outcomes = world.start(dummies.who, on=[1], greeting="").wait(Deadline.after(SOON_S))
    assert outcomes[1].problem is not None, "a dead rank must not be waited for"
    world.respawn(1, Deadline.after(SOON_S))
    assert world.run(dummies.who, on=[1], deadline=Deadline.after(SOON_S), greeting="")[0]["pid"] != before
    assert world.healthy


def test_a_hang_becomes_a_table_and_a_file_and_the_world_is_killed(pool: WorldPool, world: World) -> None:
    pids = [state.child_pid for state in world.hub.ranks] + [state.supervisor_pid for state in world.hub.ranks]
    with pytest.raises(WorldHung) as caught:
        world.start(dummies.hangs_in_a_collective, on=world.trainer_ranks, absent=1).wait(Deadline.after(2.0))
    text = str(caught.value)
    table = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
             for line in text.splitlines() if line.startswith("│")}
    assert table["rank0"][1:6] == ["send", "1", "7", "vime-pp_1", "barrier sent"]
    assert table["rank1"][5] == "go at the freeze point 'never lifted'"
    assert table["engine0 (rank 2)"][0] == "sleeping"
    assert float(table["rank0"][6].removesuffix(" s")) >= 1.0
    report = Path(text.split("logs of every rank: ")[1].splitlines()[0]).read_text()
    assert "in barrier" in report.split("===== rank0")[1].split("===== rank1")[0], "rank 0's stack: torch's barrier"
    assert "in absent_rank_waits_for_a_call" in report.split("===== rank1")[1]
    assert "barrier sent  phase=send stage=1 bucket=7 group=vime-pp_1" in report
    assert all(Life(pid).wait(SOON_S) for pid in pids), "every process of the world must be gone"
    assert pool.get(world.topology) is not world


def test_a_stopped_rank_is_shown_as_stopped_with_its_stack(world: World) -> None:
    run = world.start(dummies.freezes, on=[0])
    run.wait_reached(0, "before the answer", Deadline.after(SOON_S))
    world.signal(0, signal.SIGSTOP, Deadline.after(SOON_S))
    run.go(0, "before the answer")
    with pytest.raises(WorldHung) as caught:
        run.wait(Deadline.after(1.0))
    (row,) = [line for line in str(caught.value).splitlines() if line.startswith("│ rank0")]
    assert "stopped" in row
    report = Path(str(caught.value).split("logs of every rank: ")[1].splitlines()[0]).read_text()
    assert "in freezes" in report


def test_a_world_with_a_rank_that_does_not_answer_is_not_used_again(pool: WorldPool, world: World) -> None:
    world.signal(2, signal.SIGSTOP, Deadline.after(SOON_S))
    assert world.healthy, "it lives, only an answer would tell"
    assert not world.responsive(Deadline.after(0.3))
    world.signal(2, signal.SIGCONT, Deadline.after(SOON_S))
    assert world.responsive(Deadline.after(SOON_S))
    assert pool.get(world.topology) is world


def test_freeze_points_order_ranks_without_sleeping(world: World) -> None:
    run = world.start(dummies.freezes, on=[0, 1])
    for rank in (0, 1):
        run.wait_reached(rank, "before the answer", Deadline.after(SOON_S))
        run.go(rank, "before the answer")
    outcomes = run.wait(Deadline.after(SOON_S))
    assert [outcomes[rank].value for rank in (0, 1)] == ["thawed", "thawed"]


def test_remote_calls_carry_dtypes_errors_and_deaths(world: World) -> None:
    (target,) = world.run(dummies.serve, on=[2], deadline=Deadline.after(SOON_S))
    assert target["methods"] == ["die", "echo", "fail"]

    def call(method: str, **arguments: object) -> object:
        outcome = world.start(dummies.call, on=[0], target=target, method=method, arguments=arguments).wait(
            Deadline.after(SOON_S))[0]
        return outcome.value if outcome.problem is None else outcome.problem

    assert call("echo", value=[1, "two"], dtype=torch.bfloat16) == [[1, "two"], torch.bfloat16]
    failed = call("fail")
    assert (failed.kind, failed.text) == ("RemoteCallFailed", "LookupError: nothing here")
    assert "in fail" in failed.traceback, "the traceback of the engine's process must be shown"
    missing = call("forget_everything")
    assert (missing.kind, missing.text) == ("AttributeError", "desk has no method 'forget_everything'; it has die, echo, fail")
    died = call("die")
    assert (died.kind, died.text) == ("PeerDied", f"desk (process {target['pid']}) ended while it owed the answer to die")


def test_the_lock_is_a_remote_object_that_never_waits(world: World) -> None:
    target = world.hub.lock_target
    arguments = {"target": {"name": target.name, "address": target.address, "pid": target.pid, "methods": target.methods},
                 "arguments": {}}
    answers = [world.run(dummies.call, on=[0], deadline=Deadline.after(SOON_S), method=method, **arguments)[0]
               for method in ("acquire", "release")]
    assert answers == [True, None]
    world.hub.lock.held = True
    run = world.start(dummies.call, on=[0], method="acquire", **arguments)
    world.hub.lock.held = True  # `start` frees it: every scenario begins with a free lock
    assert run.wait(Deadline.after(SOON_S))[0].value is False


def test_closing_a_pool_leaves_no_process_and_no_file_behind(tmp_path: Path) -> None:
    pool = WorldPool(("torch", "torch.distributed"), tmp_path)
    world = pool.get(Topology(engines=1))
    directory = world.files.directory
    pids = [pid for state in world.hub.ranks for pid in (state.child_pid, state.supervisor_pid)]
    assert len(set(pids)) == 4
    pool.close()
    assert all(Life(pid).wait(SOON_S) for pid in pids)
    assert not directory.exists()


def test_the_world_that_was_not_asked_for_the_longest_makes_room(pool: WorldPool, world: World,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.world.pool.MOST_WORLDS", 1)
    old = [state.supervisor_pid for state in world.hub.ranks]
    other = pool.get(Topology(engines=1))
    assert all(Life(pid).wait(SOON_S) for pid in old)
    assert pool.get(Topology(engines=1)) is other
