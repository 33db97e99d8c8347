"""Buckets: edges by the byte, and what must hold for any stream."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staged_sync.buckets import Bucketer, Pace
from staged_sync.exporter import NamedTensor


def unit(*sizes: int) -> list[NamedTensor]:
    return [(f"t{size}", torch.zeros(size, dtype=torch.uint8)) for size in sizes]


def cut(limit: int, units: list[list[NamedTensor]]) -> list[list[int]]:
    bucketer = Bucketer(limit)
    buckets = [bucketer.add(one) for one in units] + [bucketer.flush()]
    return [[tensor.numel() for _, tensor in bucket] for bucket in buckets if bucket]


@pytest.mark.parametrize(("units", "buckets"), [
    ([[10]], [[10]]),
    ([[5], [5]], [[5, 5]]),                       # exactly full
    ([[5], [6]], [[5], [6]]),                     # one byte over
    ([[11]], [[11]]),                             # larger than the limit: a bucket of its own, first …
    ([[3], [11], [3]], [[3], [11], [3]]),         # … in the middle …
    ([[3], [11]], [[3], [11]]),                   # … and last
    ([[4, 4], [4]], [[4, 4], [4]]),               # a unit is not split
    ([[6, 6], [1]], [[6, 6], [1]]),               # not even one larger than the limit
    ([[], [4], []], [[4]]),                       # a unit may convert to nothing
    ([], []),
])
def test_edges_of_a_bucket_of_ten_bytes(units: list[list[int]], buckets: list[list[int]]) -> None:
    assert cut(10, [unit(*sizes) for sizes in units]) == buckets


@given(limit=st.integers(1, 40), units=st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=12))
def test_nothing_is_lost_reordered_or_split_and_no_bucket_is_empty(limit: int, units: list[list[int]]) -> None:
    buckets = cut(limit, [unit(*sizes) for sizes in units])
    assert [size for bucket in buckets for size in bucket] == [size for one in units for size in one]
    assert all(buckets)
    ends = {0}
    for one in units:
        ends.add(max(ends) + len(one))
    position = 0
    for bucket in buckets:
        position += len(bucket)
        assert position in ends, "a unit was split over two buckets"
        assert sum(bucket) <= limit or len([one for one in units if one and sum(one) > limit]) > 0


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 30))
def test_ranks_that_only_count_turn_where_the_source_closes_a_bucket(sizes: list[int], limit: int) -> None:
    bucketer, pace = Bucketer(limit), Pace(limit)
    closes = [bool(bucketer.add(unit(size))) for size in sizes]
    assert [pace.turns(size) for size in sizes] == closes
    assert not pace.turns(0), "the end of the export begins no bucket"
    assert pace.turn == sum(closes)
