"""Which other values are tried of an input with one value throughout each call, and where they are put."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_exportcheck.checks import uniform_values
from pytest_exportcheck.checks.uniform_values import Change, Uniform, changed_arguments, changes


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 5, dtype=torch.int64), [((0, 4), 0), ((1, 1), 0)]),
        (torch.ones(2, 2, dtype=torch.int64), [((0, 1), 0), ((1, 1), 0)]),
        (torch.ones(2, 1, dtype=torch.int64), []),
        (torch.zeros(2, 1, dtype=torch.int64), [((0, 0), 1), ((1, 0), 1)]),
        (torch.zeros(2, 1, dtype=torch.bool), []),
        (torch.ones(5, dtype=torch.bool), [((4,), False), ((1,), False)]),
        (torch.zeros(1, 5, dtype=torch.bool), [((0, 4), True), ((0, 1), True)]),
        (torch.ones(2, 3, 4, dtype=torch.int32), [((0, 2, 3), 0), ((1, 1, 1), 0)]),
        (torch.ones(2, 5), [((0, 4), 0.0), ((1, 1), 0.0)]),
        (torch.ones(2, 1), [((0, 0), 0.75), ((1, 0), 0.75)]),
        (torch.ones(()), [((), 0.75)]),
        (torch.zeros(2, 5), [((0, 4), 0.25), ((1, 1), 0.25)]),
        (torch.full((2, 5), -8.0), [((0, 4), -6.0), ((1, 1), -6.0)]),
        (torch.full((3,), 9), [((2,), 8), ((1,), 8)]),
        (torch.full((2, 3), -100), []),
        (torch.tensor(9), [((), 8)]),
        (torch.tensor(4), []),
        (torch.tensor(True), [((), False)]),
    ],
)
def test_other_values(tensor: torch.Tensor, expected: list[Any]) -> None:
    uniform = Uniform("x", {0: tensor.flatten()[0].item()}, (), (0,))
    found = [each for each in changes(uniform, 0, tensor, (4, 7)) if each.count == 1]
    assert [(each.index, each.value) for each in found] == expected
    assert all(type(each.value) is type(tensor.flatten()[0].item()) for each in found)


@pytest.mark.parametrize(
    ("tensor", "hidden"),
    [
        (torch.ones(2, 5, dtype=torch.int64), True),
        (torch.zeros(2, 5, dtype=torch.bool), True),
        (torch.ones(5), True),
        (torch.zeros(2, 5, dtype=torch.int64), False),
        (torch.ones(2, 1, 5, 5), False),
    ],
)
def test_what_may_hide_a_position(tensor: torch.Tensor, hidden: bool) -> None:
    uniform = Uniform("x", {0: tensor.flatten()[0].item()}, (), (0,))
    assert {each.hidden for each in changes(uniform, 0, tensor, ())} == {hidden}


def test_a_part_of_a_row_is_the_last_choice() -> None:
    change = changes(Uniform("x", {0: 1}, (), (0,)), 0, torch.ones(2, 9, dtype=torch.int64), ())[-1]
    assert change.text("x") == "x[0, 6:9] = 0"
    (made,) = changed_arguments({"x": torch.ones(2, 9)}, "x", change).values()
    assert made.tolist() == [[1.0] * 6 + [0.0] * 3, [1.0] * 9]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 1, 2, 3], "x[0, 0:4] = 1, 2, 3, 4"),
        ([4, 5, 6, 7, 8], "x[0, 0:5] = 5, 6, 7, 8, ..."),
        ([3, 2, 1, 0], "x[0, 3] = 1"),
        ([5, 5, 5, 3], "x[0, 3] = 5"),
        ([1, 1, 0, 0], "x[0, 3] = 1"),
        ([0, 0, 1, 1], "x[0, 3] = 0"),
        ([0, 0, 0, 1], "x[0, 2] = 1"),
        ([1, 1, 1, 0], "x[0, 2] = 0"),
        ([0, 1], ""),
    ],
)
def test_a_value_of_the_same_row(row: list[int], expected: str) -> None:
    """Of flags a row that has both keeps both."""
    found = changes(Uniform("x", {}, (0,), (0,)), 0, torch.tensor(row).expand(2, len(row)), ())
    assert [each.text("x") for each in found[:1]] == [expected] * bool(expected)
    assert all(each.count > 1 or each.index[0] == 1 for each in found[1:])


def test_positions_within_those_that_were_given_where_others_are_refused() -> None:
    tensor = torch.arange(4).repeat(2, 1)
    uniform = Uniform("x", {}, (0,), (0,))
    change = changes(uniform, 0, tensor, ())[1]
    assert change.text("x") == "x[0, 0:4] = 0, 0, 1, 2"
    (made,) = changed_arguments({"x": tensor}, "x", change).values()
    assert made.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_flags_that_are_equal_in_each_row() -> None:
    tensor = torch.tensor([[True] * 3, [False] * 3])
    found = changes(Uniform("x", {}, (1,), (0,)), 0, tensor, ())
    assert [each.text("x") for each in found] == ["x[0, 2] = False", "x[1, 1] = True"]


def test_no_index_out_of_range_where_that_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform_values, "_is_safe", lambda tensor, value: value != 0)
    for value in (0, 1):
        uniform = Uniform("x", {0: value}, (), (0,))
        assert bool(changes(uniform, 0, torch.full((2, 5), value), ())) == bool(value)


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, 4), torch.ones(4, 3).T, torch.ones(1, 4).expand(3, 4), torch.ones(3, 8)[:, ::2]]
)
def test_one_value_is_changed_however_the_tensor_lies(tensor: torch.Tensor) -> None:
    made = changed_arguments({"a": [tensor], "b": tensor}, "a.0", Change((0, 3), 0.0))
    (other,) = made["a"]
    assert made["b"] is tensor
    assert other.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert bool((tensor == 1).all())
