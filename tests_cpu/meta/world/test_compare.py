"""The byte comparison must see what it claims to see, and say where."""

from __future__ import annotations

import pytest
import torch

from harness.compare import compare, compare_arrivals, difference


def test_equal_bytes_are_equal_also_for_nan() -> None:
    tensor = torch.tensor([1.0, float("nan"), -0.0])
    assert difference("w", tensor, tensor.clone()) is None


def test_zero_and_minus_zero_differ() -> None:
    problem = difference("w", torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]))
    assert problem == ("w [2] float32: 1 of 2 elements differ, the first at [1]: expected 0.0 (0x00000000), "
                       "found -0.0 (0x80000000)")


@pytest.mark.parametrize("index", [(0, 0), (1, 2), (3, 4)])
def test_the_first_differing_index_and_both_values_are_named(index: tuple[int, int]) -> None:
    want = torch.arange(20, dtype=torch.bfloat16).reshape(4, 5)
    got = want.clone()
    got[index] += 100
    got[3, 4] += 1000
    problem = difference("model.w", got, want)
    assert problem is not None
    assert f"the first at {list(index)}: expected {want[index].item()!r}" in problem
    assert f"found {got[index].item()!r}" in problem


def test_strided_tensors_are_compared_by_value_position_not_by_memory() -> None:
    square = torch.arange(9.0).reshape(3, 3)
    assert difference("w", square.t(), square.t().contiguous()) is None
    problem = difference("w", square.t(), square)
    assert problem is not None
    assert "6 of 9 elements differ, the first at [0, 1]" in problem


def test_scalars_and_empty_tensors() -> None:
    assert difference("w", torch.tensor(1.0), torch.tensor(1.0)) is None
    assert difference("w", torch.empty(0, 3), torch.empty(0, 3)) is None
    problem = difference("w", torch.tensor(1.0), torch.tensor(2.0))
    assert problem is not None
    assert "the first at []" in problem


def test_shape_and_dtype_come_before_bytes() -> None:
    zeros = torch.zeros(4, 2, dtype=torch.bfloat16)
    assert difference("w", torch.zeros(2, 4, dtype=torch.bfloat16), zeros) == "w: expected [4, 2] bfloat16, found [2, 4] bfloat16"
    assert difference("w", torch.zeros(4, 2), zeros) == "w: expected [4, 2] bfloat16, found [4, 2] float32"


def test_missing_and_extra_names_count_against_the_expected_number() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    result = compare({"a": a, "c": b}, {"a": a, "b": b})
    assert (result.equal, result.total, result.exact) == (1, 2, False)
    assert result.problems == ["b: missing", "c: not in the checkpoint, but here"]


def test_nothing_received_is_not_exact() -> None:
    result = compare({}, {"a": torch.ones(1)})
    assert not result.exact
    assert result.text() == "0/1 tensors bit-exact\n  - a: missing"


def test_a_tensor_that_comes_twice_is_a_problem_even_if_right() -> None:
    a = torch.ones(2)
    result = compare_arrivals([("a", a), ("a", a)], {"a": a})
    assert (result.equal, result.total, result.exact) == (1, 1, False)
    assert result.problems == ["a: came more than once"]
