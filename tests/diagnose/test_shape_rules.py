"""Sizes of outputs from sizes of inputs."""

from __future__ import annotations

import pytest

from pytest_exportcheck.diagnose.shape_rules import find_rule

CALLS = [[(2, 5), (3,), None], [(4, 7), (6,), None], [(5, 9), (8,), None]]


@pytest.mark.parametrize(
    ("sizes", "text", "for_next"),
    [
        ([16, 16, 16], "16", 16),
        ([2, 4, 5], "input 0 axis 0", 10),
        ([3, 6, 8], "input 1 axis 0", 30),
        ([3, 5, 6], "input 0 axis 0 + 1", 11),
        ([10, 20, 25], "input 0 axis 0 * 5", 50),
        ([7, 11, 14], "input 0 axis 0 + input 0 axis 1", 30),
        ([6, 24, 40], "input 0 axis 0 * input 1 axis 0", 300),
        ([5, 9, 11], "input 0 axis 0 * 2 + 1", 21),
        ([1, 30, 2], None, None),
    ],
)
def test_rules(sizes: list[int], text: str | None, for_next: int | None) -> None:
    rule = find_rule(CALLS, sizes)
    if text is None:
        assert rule is None
        return
    assert rule is not None
    assert rule.text == text
    assert rule.evaluate([(10, 20), (30,), None]) == for_next


def test_two_sizes_prove_no_line() -> None:
    assert find_rule([[(2,)], [(3,)]], [5, 8]) is None


def test_an_axis_that_a_call_lacks_is_no_source() -> None:
    assert find_rule([[(2, 3)], [(4,)]], [3, 9]) is None
