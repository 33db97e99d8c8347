"""Plans are data: compared whole with literals. Roles over every legal layout of up to 32 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from harness.recording.topology import Layout
from staged_sync.plan import (
    Barrier,
    Close,
    Lead,
    Open,
    Role,
    Send,
    Synchronize,
    Topology,
    TopologyError,
    phases_of,
    plan_update,
    rank_offsets,
    takes_part,
)
from staged_sync.seam import Coordinates


def test_one_stage_uses_the_persistent_group_and_two_barriers_while_sending() -> None:
    assert plan_update(1) == (
        Lead("pause"), Lead("flush"), Barrier("paused"), Lead("start"), Barrier("started"),
        Send(0, "dense"), Barrier("stage 0 dense", 0), Send(0, "expert"), Barrier("stage 0 expert", 0, reports=True),
        Synchronize(0),
        Lead("finish"), Barrier("finished"), Lead("publish"), Barrier("published"), Lead("resume"), Barrier("resumed"))


def test_two_stages_take_turns_inside_one_session() -> None:
    assert plan_update(2) == (
        Lead("pause"), Lead("flush"), Barrier("paused"), Lead("start"), Barrier("started"),
        Open(0), Barrier("stage 0 open", 0), Send(0, "dense"), Barrier("stage 0 dense", 0), Send(0, "expert"),
        Barrier("stage 0 expert", 0), Synchronize(0), Close(0), Barrier("stage 0 closed", 0, reports=True),
        Open(1), Barrier("stage 1 open", 1), Send(1, "dense"), Barrier("stage 1 dense", 1), Send(1, "expert"),
        Barrier("stage 1 expert", 1), Synchronize(1), Close(1), Barrier("stage 1 closed", 1, reports=True),
        Lead("finish"), Barrier("finished"), Lead("publish"), Barrier("published"), Lead("resume"), Barrier("resumed"))


def test_a_plan_is_cut_where_a_phase_begins_and_every_stage_sends_in_a_phase_of_its_own() -> None:
    phases = phases_of(plan_update(2, post_process=True))
    assert [(phase.name, phase.stage, len(steps)) for phase, steps in phases] == [
        ("pause", None, 3), ("start", None, 3), ("send", 0, 9), ("send", 1, 9), ("finish", None, 2), ("publish", None, 3),
        ("resume", None, 2)]
    assert tuple(step for _, steps in phases for step in steps) == plan_update(2, post_process=True)
    assert phases[1][1] == [Lead("restore"), Lead("start"), Barrier("started")]
    assert phases[5][1] == [Lead("post_process"), Lead("publish"), Barrier("published")]


def test_an_empty_stage_opens_no_group_and_joins_every_barrier() -> None:
    assert plan_update(2, empty_stages={1})[14:19] == (
        Barrier("stage 1 open", 1), Send(1, "dense"), Barrier("stage 1 dense", 1), Send(1, "expert"),
        Barrier("stage 1 expert", 1))
    assert Open(1) not in plan_update(2, empty_stages={1})
    assert Close(1) not in plan_update(2, empty_stages={1})


def test_a_pipeline_collective_export_is_one_pass_and_one_barrier_whatever_the_number_of_stages() -> None:
    expected = (
        Lead("pause"), Lead("flush"), Barrier("paused"), Lead("start"), Barrier("started"),
        Send(0, "model"), Barrier("model exported", 0, reports=True), Synchronize(0),
        Lead("finish"), Barrier("finished"), Lead("publish"), Barrier("published"), Lead("resume"), Barrier("resumed"))
    for pp in (1, 2, 8):
        assert plan_update(pp, contract="pipeline_collective", passes=("model",)) == expected


def test_a_stage_local_bridge_takes_turns_with_three_barriers_a_stage() -> None:
    assert plan_update(2, contract="stage_local", passes=("stage",)) == (
        Lead("pause"), Lead("flush"), Barrier("paused"), Lead("start"), Barrier("started"),
        Open(0), Barrier("stage 0 open", 0), Send(0, "stage"), Barrier("stage 0 exported", 0), Synchronize(0), Close(0),
        Barrier("stage 0 closed", 0, reports=True),
        Open(1), Barrier("stage 1 open", 1), Send(1, "stage"), Barrier("stage 1 exported", 1), Synchronize(1), Close(1),
        Barrier("stage 1 closed", 1, reports=True),
        Lead("finish"), Barrier("finished"), Lead("publish"), Barrier("published"), Lead("resume"), Barrier("resumed"))


def test_all_ranks_iterate_a_collective_export_and_those_of_the_stage_a_stage_local_one() -> None:
    topology = Topology(tuple(Layout(2, 2, 2).ranks))  # tp2·pp2·dp2: stage 0 is ranks 0 to 3
    model = {rank: topology.role(rank, 0, "model") for rank in range(8)}
    assert model == {0: Role.SOURCE} | dict.fromkeys(range(1, 8), Role.GATHER_PEER)
    stage = {rank: topology.role(rank, 1, "stage") for rank in range(8)}
    assert stage == dict.fromkeys(range(4), Role.INACTIVE) | {4: Role.SOURCE} | dict.fromkeys((5, 6, 7), Role.GATHER_PEER)


@pytest.mark.parametrize(("pp", "send_barriers"), [(1, 2), (2, 8), (3, 12), (8, 32), (64, 256)])
def test_barrier_counts_are_two_for_one_stage_and_four_per_stage_else_with_five_around(pp: int, send_barriers: int) -> None:
    for empty in (set(), {pp - 1}):
        barriers = [step for step in plan_update(pp, empty_stages=empty) if isinstance(step, Barrier)]
        assert len([b for b in barriers if b.stage is not None]) == send_barriers
        assert len([b for b in barriers if b.stage is None]) == 5


def layouts(limit: int) -> Iterator[Layout]:
    """Every legal layout with at most `limit` ranks: expert ranks must divide the ranks of a stage."""
    sizes = range(1, limit + 1)
    for tp, pp, dp, cp in itertools.product(sizes, repeat=4):
        stage_ranks = tp * dp * cp
        if stage_ranks * pp > limit:
            continue
        for ep, etp in itertools.product(sizes, repeat=2):
            if stage_ranks % (ep * etp) == 0:
                yield Layout(tp, pp, dp, cp, ep, etp)


def test_roles_over_all_layouts_up_to_32_ranks() -> None:
    seen = 0
    for layout in layouts(32):
        topology = Topology(tuple(layout.ranks))
        topology.check()
        assert len(topology.sources) == layout.pp
        for stage, source in enumerate(topology.sources):
            dense = {c.rank for c in layout.ranks if topology.role(c.rank, stage, "dense") is not Role.INACTIVE}
            expert = {c.rank for c in layout.ranks if topology.role(c.rank, stage, "expert") is not Role.INACTIVE}
            assert dense == set(layout.members(source, "tp")), layout
            assert expert == {peer for tp_peer in layout.members(source, "etp") for peer in layout.members(tp_peer, "ep")}, layout
            assert [r for r in dense | expert if topology.role(r, stage, "dense") is Role.SOURCE] == [source], layout
        seen += 1
    assert seen == 6724, "the enumeration itself must not shrink"


def test_a_source_that_forgets_context_parallel_or_tensor_parallel_is_seen() -> None:
    """The mutants of bug report B18: the source predicate without CP, or TP only, gives more than one source a stage."""
    layout = Layout(2, 2, 2, 2, 1, 2)
    without_cp = [c for c in layout.ranks if c.dp // layout.cp == 0 and c.tp == 0]
    tp_only = [c for c in layout.ranks if c.tp == 0]
    assert len(without_cp) > layout.pp and len(tp_only) > layout.pp
    assert len(Topology(tuple(layout.ranks)).sources) == layout.pp


def test_two_sources_of_a_stage_are_an_error_that_names_them() -> None:
    twice = (Coordinates(0), Coordinates(1))
    with pytest.raises(TopologyError, match=r"stage 0 must have exactly one source .*got ranks \[0, 1\]"):
        Topology(twice).check()


def test_ranks_that_disagree_on_the_number_of_stages_are_an_error() -> None:
    with pytest.raises(TopologyError, match="rank 1 reports itself as rank 1 of 2 stages; rank 0 sees 1 stages"):
        Topology((Coordinates(0), Coordinates(1, pp=1, pp_size=2))).check()


def test_a_thousand_ranks_are_planned_quickly_and_most_of_them_do_nothing() -> None:
    layout = Layout(8, 16, 8, 1, 8, 1)
    topology = Topology(tuple(layout.ranks))
    plan = plan_update(layout.pp)
    idle = [c.rank for c in layout.ranks
            if not any(takes_part(step, topology, c.rank) for step in plan if not isinstance(step, Barrier))]
    assert len(layout.ranks) == 1024
    assert len(idle) == 1024 - 16 * 8, "per stage: 8 ranks of the source's TP group, which span its 8 EP ranks"


@pytest.mark.parametrize(("counts", "offsets"), [([1], [1]), ([1, 2, 4], [1, 2, 4]), ([4, 1, 1], [1, 5, 6])])
def test_engine_i_starts_behind_the_workers_of_the_engines_before_it(counts: list[int], offsets: list[int]) -> None:
    assert rank_offsets(counts) == offsets
