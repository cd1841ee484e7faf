"""`InputCandidate` and the helpers beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_exportcheck import InputCandidate, InputObserver, InputObserverInfo, make_dynamic_cache

from .helpers import DYNAMIC as D
from .helpers import f


def test_a_candidate_of_ones_own() -> None:
    x, y = f(2, 3), f(4)
    candidate = InputCandidate((x,), {"y": [y, f(1)]}, clone=False, cst_kwargs={"add": True})
    assert candidate.args[0] is x
    assert [tuple(tensor.shape) for tensor in candidate.flat_list] == [(2, 3), (4,), (1,)]
    assert len(candidate) == 3
    assert candidate.cst_kwargs == {"add": True}
    assert candidate.aligned_flat_list is None
    with pytest.raises(RuntimeError, match="This input was not aligned with the others"):
        _ = candidate.n_aligned_tensors
    text = candidate.str_obs()
    assert "T1s2x3" in text
    assert "T1s4" in text
    copied = InputCandidate((x,), {}, True, {})
    assert copied.args[0] is not x


def test_a_cache_in_a_candidate_needs_no_block() -> None:
    candidate = InputCandidate((), {"cache": make_dynamic_cache([(f(1, 1, 2, 3), f(1, 1, 2, 3))])}, True, {})
    assert len(candidate.flat_list) == 2


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((), False),
        (None, False),
        ({}, False),
        (({0: D}, {}), False),
        (({1: D}, {}), True),
        (({}, {0: D}), True),
        (({}, {0: torch.export.Dim.AUTO}), True),
        (({}, {0: "batch"}), True),
        (({}, {0: torch.export.Dim("batch")}), True),
        (({}, {0: torch.export.Dim.STATIC}), False),
        (({}, {1: D}), False),
        ((None, {0: D}), True),
        ((None, {1: D}), False),
        ({"x": {}, "add": None, "y": {0: D}}, True),
        (({-1: D}, {}), True),
    ],
)
def test_backed_size_oblivious(shapes: Any, expected: bool) -> None:
    candidate = InputCandidate((f(2, 1),), {"y": f(0, 5)}, clone=False, cst_kwargs={})
    assert candidate.needs_backed_size_oblivious(shapes) is expected


def test_backed_size_oblivious_of_nested_shapes() -> None:
    candidate = InputCandidate(([f(2), f(1)], {"k": f(3)}), {}, clone=False, cst_kwargs={})
    assert candidate.needs_backed_size_oblivious(([{0: D}, {0: D}], {"k": {0: D}}))
    assert not candidate.needs_backed_size_oblivious(([{0: D}, {}], {"k": {0: D}}))


def test_shapes_that_do_not_fit() -> None:
    candidate = InputCandidate((f(2, 3),), {}, clone=False, cst_kwargs={})
    with pytest.raises(RuntimeError, match="2 entries, more than the 1"):
        candidate.needs_backed_size_oblivious(({}, {}))
    with pytest.raises(RuntimeError, match="axis 2"):
        candidate.needs_backed_size_oblivious(({2: D},))


def test_dynamic_dimensions() -> None:
    for infer in (InputObserver._infer_dynamic_dimensions, InputObserverInfo._infer_dynamic_dimensions):
        assert infer([(1, 2, 3), (1, 2, 4)]) == [2]
        assert infer([(1, 2, 3), (2, 2, 4)]) == [0, 2]
        assert infer([(1, 2, 3)], set_batch_dimension=True) == [0]
        assert infer([(), ()]) == []
        for wrong in ([(1, 2), (1, 2, 3)], []):
            with pytest.raises(RuntimeError, match="rank"):
                infer(wrong)
