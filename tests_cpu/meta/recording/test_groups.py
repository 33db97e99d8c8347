"""Control groups and gather groups: who is missing is named, and a group that timed out once is dead for good."""

from __future__ import annotations

import torch

from harness.recording.world import RankContext, RecordingWorld
from staged_sync.errors import DeadlineExceeded, GatherError, RanksAbsent


def test_absent_ranks_are_named_and_the_group_is_dead_afterwards() -> None:
    groups = {}

    def first(context: RankContext) -> None:
        groups[context.rank] = context.seam.open_control_group(0, timeout_s=1)
        if context.rank not in (1, 3):
            groups[context.rank].exchange(b"", timeout_s=30)

    with RecordingWorld(tp=4) as world:
        result = world.run(first)
        assert {rank: (type(e), e.absent) for rank, e in result.errors.items() if isinstance(e, RanksAbsent)} == {
            0: (RanksAbsent, (1, 3)), 2: (RanksAbsent, (1, 3))}
        assert result.elapsed_s == 30
        late = world.run(lambda c: groups[c.rank].exchange(b"", timeout_s=30))
        assert set(late.errors) == {0, 1, 2, 3}
        assert late.elapsed_s == 0
        assert world.run(lambda c: c.seam.open_control_group(1, timeout_s=1) is not None).check().results == dict.fromkeys(
            range(4), True)


def test_payloads_arrive_by_rank_and_turns_do_not_mix() -> None:
    def talk(context: RankContext) -> list[list[bytes]]:
        group = context.seam.open_control_group(0, timeout_s=1)
        return [group.exchange(f"{context.rank}.{turn}".encode(), timeout_s=1) for turn in range(3)]

    with RecordingWorld(pp=3) as world:
        result = world.run(talk).check()
    expected = [[f"{rank}.{turn}".encode() for rank in range(3)] for turn in range(3)]
    assert result.results == dict.fromkeys(range(3), expected)


def test_the_first_reason_for_a_broken_generation_is_kept() -> None:
    def report(context: RankContext) -> tuple[int, str, int]:
        before = context.seam.broken_control_generation()
        return before, context.seam.report_broken_control(4, f"by {context.rank}"), context.seam.broken_control_generation()

    with RecordingWorld(tp=2) as world:
        assert world.run(report).results == {0: (-1, "by 0", 4), 1: (4, "by 0", 4)}


def test_a_gather_returns_the_shards_of_its_own_group_by_group_rank() -> None:
    with RecordingWorld(tp=2, dp=2, pp=2, ep=2) as world:
        for group, expected in (("tp", {0: [0, 1], 3: [2, 3], 6: [6, 7]}), ("ep", {0: [0, 2], 3: [1, 3], 6: [4, 6]})):
            result = world.run(lambda c, g=group: [int(t) for t in c.seam.all_gather(torch.tensor([c.rank]), g, timeout_s=1)])
            assert {rank: result.check().results[rank] for rank in expected} == expected


def test_a_gather_that_a_peer_skips_ends_at_its_deadline_and_names_the_peer() -> None:
    with RecordingWorld(tp=2) as world:
        result = world.run(lambda c: c.rank or c.seam.all_gather(torch.zeros(1), "tp", timeout_s=7))
    assert type(result.errors[0]) is DeadlineExceeded
    assert "gather in group tp[0,1]: rank 1 did not come within 7 s" in str(result.errors[0])
    assert result.elapsed_s == 7


def test_members_that_bring_different_shapes_are_told() -> None:
    with RecordingWorld(tp=2) as world:
        result = world.run(lambda c: c.seam.all_gather(torch.zeros(1 + c.rank), "tp", timeout_s=7))
    assert all(isinstance(error, GatherError) for error in result.errors.values())
    assert "members brought different tensors: [((1,), torch.float32), ((2,), torch.float32)]" in str(result.errors[1])
