"""Rank order against literals taken from megatron-core 0.16.1 (`RankGenerator`, order tp-cp-ep-dp-pp)."""

from __future__ import annotations

import pytest

from harness.recording.topology import Layout
from staged_sync.seam import Coordinates


def test_dense_and_expert_coordinates_of_a_layout_with_everything() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert layout.world_size == 16
    sizes = {"tp_size": 2, "pp_size": 2, "dp_size": 4, "etp_size": 1, "ep_size": 4, "edp_size": 2}
    assert layout.ranks[11] == Coordinates(rank=11, tp=1, pp=1, dp=1, etp=0, ep=3, edp=0, **sizes)
    assert layout.ranks[14] == Coordinates(rank=14, tp=0, pp=1, dp=3, etp=0, ep=2, edp=1, **sizes)


def test_gather_groups_of_that_layout() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert [layout.members(11, group) for group in ("tp", "etp", "ep")] == [(10, 11), (11,), (8, 9, 10, 11)]


def test_expert_tensor_parallel_defaults_to_tensor_parallel() -> None:
    layout = Layout(tp=2, dp=4, ep=2)
    assert [layout.members(5, group) for group in ("tp", "etp", "ep")] == [(4, 5), (4, 5), (5, 7)]


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks cannot be cut into etp 2 x ep 4 x pp 1"):
        Layout(tp=2, dp=2, ep=4)
