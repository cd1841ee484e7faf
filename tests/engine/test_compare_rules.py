"""The rules of comparison, as properties, and for values that are rarely thought of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_exportcheck.checks.compare import LeafComparison, Tolerances, compare_leaf, compare_leaves, table
from pytest_exportcheck.pytrees import flatten_with_paths

NAN, INF = float("nan"), float("inf")


def one(expected: Any, got: Any, tolerances: Tolerances | None = None) -> LeafComparison:
    return compare_leaf("y", expected, got, tolerances or Tolerances())


# properties

FLOATS = st.one_of(
    st.floats(width=32, allow_subnormal=True), st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e-45, 3e38])
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape, equal in most places."""
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    count = int(np.prod(shape))
    first = draw(st.lists(FLOATS, min_size=count, max_size=count))
    changed = draw(st.dictionaries(st.integers(0, max(count - 1, 0)), FLOATS, max_size=2))
    second = [changed.get(at, value) for at, value in enumerate(first)]
    dtype = draw(st.sampled_from(DTYPES))
    return (
        torch.tensor(first, dtype=torch.float64).to(dtype).reshape(shape),
        torch.tensor(second, dtype=torch.float64).to(dtype).reshape(shape),
    )


@settings(deadline=None, max_examples=150)
@given(pairs(), st.sampled_from([0.0, 1e-3]))
def test_what_it_would_need_passes_and_less_does_not(pair: Any, rtol: float) -> None:
    expected, got = pair
    assert one(expected, expected.clone()).ok
    result = one(expected, got, Tolerances(rtol=rtol))
    if result.ok:
        return
    # Where it is wrong is where it is said to be.
    assert not torch.equal(expected[result.at], got[result.at])
    if result.would_need is None:
        assert not (torch.isfinite(expected[result.at]) and torch.isfinite(got[result.at]))
        assert not one(expected, got, Tolerances(1e300, 0.0)).ok
        return
    assert one(expected, got, Tolerances(result.would_need, rtol)).ok
    shown = float(table([result])[1].split("atol ")[1].split()[0])
    assert shown >= result.would_need
    assert one(expected, got, Tolerances(shown, rtol)).ok
    assert not one(expected, got, Tolerances(result.would_need * 0.99, rtol)).ok


@settings(deadline=None, max_examples=80)
@given(pairs(), st.floats(0, 1e6), st.floats(0, 1))
def test_a_larger_tolerance_never_fails_what_a_smaller_one_passes(
    pair: Any, atol: float, rtol: float
) -> None:
    expected, got = pair
    if one(expected, got, Tolerances(atol, rtol)).ok:
        assert one(expected, got, Tolerances(atol * 2 + 1, rtol)).ok


@settings(deadline=None, max_examples=80)
@given(pairs())
def test_equal_where_numpy_says_so(pair: Any) -> None:
    expected, got = (value.double().numpy() for value in pair)
    exact = bool(np.array_equal(expected, got, equal_nan=True))
    assert one(*pair, Tolerances(0.0, 0.0)).ok is exact


# a small head inside a large output


def detector(batch: int = 2, cells: int = 20) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    boxes = torch.rand(batch, cells, 4, generator=draw) * 1000
    return torch.cat([boxes, torch.rand(batch, cells, 2, generator=draw)], -1)


@pytest.mark.parametrize("axis", [1, 2])
def test_an_error_in_a_small_slice_is_not_hidden_by_a_large_one(axis: int) -> None:
    expected = detector().transpose(axis, 2)
    got = expected.clone()
    got.select(axis, 5).add_(3e-3)  # a third of a percent of a score; the boxes allow 1e-2
    result = one(expected, got)
    assert not result.ok
    assert result.atol < 1e-3 < result.max_abs
    assert one(expected, got, Tolerances(atol=1e-2)).ok, "what a spec says is taken as it is"
    assert one(expected, expected * (1 + 1e-6)).ok


def test_a_slice_of_few_values_says_nothing_about_its_size() -> None:
    """A value that is small by cancellation has the rounding errors of the large ones it came from."""
    expected = torch.tensor([[1.0, 0.7, 1e-5], [0.8, 0.9, -1e-5]])
    assert one(expected, expected + 2e-6).ok


def test_the_furthest_out_is_shown_where_the_largest_error_is_allowed() -> None:
    expected, got = detector(), detector()
    got[0, 3, 0] += 5e-3
    got[1, 7, 5] += 3e-3
    result = one(expected, got)
    assert not result.ok
    assert result.at == (1, 7, 5)
    assert "at [1, 7, 5], larger errors are within their tolerance" in result.note


# types


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        (complex(NAN, 1), complex(NAN, 1), True),
        (complex(NAN, 1), complex(NAN, 2), False),
        (complex(1, NAN), complex(NAN, 1), False),
        (complex(INF, 1), complex(INF, 1), True),
        (complex(INF, 1), complex(-INF, 1), False),
        (complex(INF, NAN), complex(INF, NAN), True),
    ],
)
def test_special_values_of_complex_numbers_part_by_part(expected: complex, got: complex, ok: bool) -> None:
    assert one(torch.tensor([expected]), torch.tensor([got]), Tolerances(1e9, 1e9)).ok is ok


def test_views_with_a_lazy_sign_are_read_right() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert one(x.conj(), x.conj().resolve_conj().clone()).ok
    assert not one(x.conj(), x).ok


def test_subnormals_flushed_to_zero_are_no_difference() -> None:
    assert one(torch.tensor([1e-40, 1.0]), torch.tensor([0.0, 1.0])).ok


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_read_is_said(value: torch.Tensor, kind: str) -> None:
    dense = torch.eye(3)
    for expected, got, owner in ((value, dense, "the model's"), (dense, value, "the program's")):
        result = one(expected, got)
        assert not result.ok
        assert result.reason == f"{owner} is a {kind} tensor, which is not compared: return a dense one"
        assert table([result])


def test_quantized_tensors_are_said_to_be_unreadable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert "a quantized tensor" in one(value, torch.ones(2)).reason


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        (np.float32([1, 2]), torch.tensor([1.0, 2.0]), True),
        (np.float32([1, 2]), np.float32([1, 2 + 1e-6]), True),
        (np.float32([1, 2]), torch.tensor([1.0, 2.1]), False),
        (np.float64([1, 2]), torch.tensor([1.0, 2.0]), False),
        (np.int64([1, 2]), np.int64([1, 3]), False),
        (np.float32(0.5), torch.tensor(0.5), True),
        (np.bool_(True), torch.tensor(1), False),
        (np.array(["a"]), np.array(["a"]), True),
        (np.array(["a"]), np.array(["b"]), False),
    ],
)
def test_numpy_values_are_compared_as_tensors(expected: Any, got: Any, ok: bool) -> None:
    assert one(expected, got).ok is ok


@pytest.mark.parametrize("value", ["text", b"bytes", ["a", "b"]])
def test_strings(value: Any) -> None:
    assert one(value, value).ok
    assert not one(value, value[:-1]).ok


# containers


def test_keys_that_read_alike_are_matched_in_turn() -> None:
    def leaves(*values: float) -> list[tuple[str, Any]]:
        return [("1", torch.tensor(value)) for value in values]

    assert all(result.ok for result in compare_leaves(leaves(1.0, 2.0), leaves(1.0, 2.0), Tolerances()))
    swapped = compare_leaves(leaves(1.0, 2.0), leaves(2.0, 1.0), Tolerances())
    assert [result.ok for result in swapped] == [False, False]
    assert not all(result.ok for result in compare_leaves(leaves(1.0, 2.0), leaves(1.0), Tolerances()))
    assert not all(result.ok for result in compare_leaves(leaves(1.0), leaves(1.0, 2.0), Tolerances()))


def test_one_tensor_twice() -> None:
    x = torch.ones(2)
    expected = flatten_with_paths((x, x))
    assert all(result.ok for result in compare_leaves(expected, flatten_with_paths([x, x + 0]), Tolerances()))
    wrong = compare_leaves(expected, flatten_with_paths([x, x + 1]), Tolerances())
    assert [result.ok for result in wrong] == [True, False]


@dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


def test_model_outputs_are_compared_by_field() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2)
    expected = flatten_with_paths(BaseModelOutput(last_hidden_state=x))
    assert [path for path, _ in expected] == ["last_hidden_state"]
    got = flatten_with_paths({"last_hidden_state": x})
    assert all(result.ok for result in compare_leaves(expected, got, Tolerances()))


def test_unregistered_dataclasses_are_compared_by_value() -> None:
    assert one(Output(torch.ones(2)), Output(torch.ones(2))).ok
    assert not one(Output(torch.ones(2)), Output(torch.zeros(2))).ok
    assert not one(Output(torch.ones(2)), Output(torch.ones(2), extra=3)).ok
