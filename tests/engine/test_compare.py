"""The verdict on numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks.compare import (
    LeafComparison,
    Tolerance,
    Tolerances,
    compare_leaf,
    compare_leaves,
    table,
)

NAN, INF = float("nan"), float("inf")
DEFAULT = Tolerances()


def t(*values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def one(expected: Any, got: Any, tolerances: Tolerances = DEFAULT, where: Any = None) -> LeafComparison:
    result = compare_leaf("y", expected, got, tolerances, where)
    # Whatever it is, it can be written into a report and shown.
    json.dumps(result.to_record())
    assert table([result])
    return result


# shape and dtype


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), "shape 2x4 instead of 2x3"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape 3x2 instead of 2x3"),
        (torch.zeros(()), torch.zeros(1), "shape 1 instead of scalar"),
        (torch.zeros(0, 3), torch.zeros(3, 0), "shape 3x0 instead of 0x3"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype float64 instead of float32"),
        (
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int32),
            "dtype int32 instead of int64",
        ),
        (torch.zeros(2, dtype=torch.bool), torch.zeros(2), "dtype float32 instead of bool"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64), "dtype int64 instead of float32"),
    ],
)
def test_shape_and_dtype_come_first(expected: torch.Tensor, got: torch.Tensor, reason: str) -> None:
    result = one(expected, got)
    assert not result.ok
    assert result.reason == reason
    assert result.would_need is None


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_zero_size_matches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert one(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)).ok


# special values, by position


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        ((NAN, 1.0), (NAN, 1.0), True),
        ((NAN, 1.0), (1.0, NAN), False),
        ((0.0, 1.0), (NAN, 1.0), False),
        ((NAN, 1.0), (0.0, 1.0), False),
        ((NAN,), (1e10,), False),
        ((NAN,), (INF,), False),
        ((INF, 1.0), (INF, 1.0), True),
        ((-INF, 1.0), (-INF, 1.0), True),
        ((-INF, 1.0), (INF, 1.0), False),
        ((INF, 1.0), (3e38, 1.0), False),
        ((3e38, 1.0), (INF, 1.0), False),
        ((NAN, NAN), (NAN, NAN), True),
        ((0.0,), (-0.0,), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_and_infinities(expected: Any, got: Any, ok: bool, dtype: torch.dtype) -> None:
    result = one(t(*expected, dtype=dtype), t(*got, dtype=dtype), Tolerances(1e30, 1e30))
    assert result.ok is ok
    if not ok:
        assert "instead of" in result.reason
        assert result.would_need is None, "no tolerance makes up for a special value"


def test_a_special_value_is_located() -> None:
    expected, got = torch.zeros(2, 3), torch.zeros(2, 3)
    got[1, 2] = NAN
    result = one(expected, got)
    assert result.at == (1, 2)
    assert result.reason == "nan instead of 0 in 1 of 6"
    assert math.isfinite(result.max_abs)


# integers and booleans, exactly


@pytest.mark.parametrize(
    ("expected", "got", "max_abs"),
    [
        (t(2**53 + 1, dtype=torch.int64), t(2**53, dtype=torch.int64), 1),
        (t(2**63 - 1, 0, dtype=torch.int64), t(-(2**63), 0, dtype=torch.int64), 2**64 - 1),
        (t(0, 255, dtype=torch.uint8), t(255, 255, dtype=torch.uint8), 255),
        (t(7, dtype=torch.int32), t(8, dtype=torch.int32), 1),
    ],
)
def test_integers_are_exact_whatever_the_tolerance(expected: Any, got: Any, max_abs: int) -> None:
    assert one(expected, expected.clone()).ok
    result = one(expected, got, Tolerances(1e9, 1e9, {"*": {"atol": 1e9, "rtol": 1.0}}))
    assert not result.ok
    assert result.max_abs == float(max_abs)
    assert f"{got[0].item()} instead of {expected[0].item()}" in result.reason


def test_booleans() -> None:
    assert one(t(True, False, dtype=torch.bool), t(True, False, dtype=torch.bool)).ok
    result = one(t(True, False, dtype=torch.bool), t(True, True, dtype=torch.bool))
    assert not result.ok
    assert result.at == (1,)
    assert result.outside == 0.5


# python values


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        (3, 3, True),
        (3, 4, False),
        (3, True, False),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (1, 1.0, False),
        (1.0, 1.0, True),
        (0.1, 0.1, True),
        (0.1, 0.2, False),
        (NAN, NAN, True),
        ("a", "a", True),
        ("a", "b", False),
        (None, None, True),
        (None, 0, False),
        (0, None, False),
        (3, torch.tensor(3), True),
        (3, torch.tensor(4), False),
        (3, torch.tensor([3]), False),
        (3, torch.tensor(3.0), False),
        (True, torch.tensor(True), True),
        (True, torch.tensor(1), False),
        (0.1, torch.tensor(0.1), True),
        (0.1, torch.tensor(0.1001), False),
        (0.1, 0.1 + 1e-12, False),
        (0.1, torch.tensor(0.1000001), True),
        (0.1, torch.tensor([0.1]), False),
        (0.1, 1, False),
        (1.0, True, False),
        (1.0, torch.tensor(1), False),
        (1e-4, 0.0, False),
        (NAN, torch.tensor(NAN), True),
        (0.1, torch.tensor(NAN), False),
        (INF, torch.tensor(INF), True),
        (INF, -INF, False),
        (1 + 2j, torch.tensor(1 + 2.0000001j), True),
        (1 + 2j, 1 - 2j, False),
        (None, torch.tensor(0.0), False),
        (torch.tensor(0.0), None, False),
        (torch.tensor(3), 3, False),
        (torch.float32, torch.float32, True),
        (slice(0, 3), slice(0, 4), False),
    ],
)
def test_python_values(expected: Any, got: Any, ok: bool) -> None:
    result = one(expected, got)
    assert result.ok is ok
    assert bool(result.reason) is not ok


def test_a_float_of_item_is_as_exact_as_its_tensor() -> None:
    """`x.mean().item()`: another runtime sums in another order."""
    computed = Tolerances(computed_in=torch.float32)
    expected = 0.05998796969652176
    assert one(expected, torch.tensor(0.059987977147102356), computed).ok
    result = one(expected, torch.tensor(0.0601), computed)
    assert not result.ok
    assert result.reason.startswith("0.0601000")
    assert (result.shape, result.dtype) == (None, "float")
    assert one(expected, torch.tensor(0.0601), Tolerances(atol=1e-3)).ok
    assert not one(expected, torch.tensor(expected + 1e-6), Tolerances(atol=0.0, rtol=1e-6)).ok


@pytest.mark.parametrize("expected", [0.5, 0.5 + 0.25j])
def test_python_numbers_are_exact_whatever_the_tolerance(expected: Any) -> None:
    """A number that the program keeps as one was baked in, not computed."""
    assert one(expected, expected, Tolerances(atol=1.0)).ok
    assert not one(expected, expected + 1e-9, Tolerances(atol=1.0)).ok


class _Unregistered:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_objects_are_compared_by_what_they_hold() -> None:
    """Not by their text: that shows four digits of a tensor, and an address."""
    assert one(_Unregistered(t(1.0)), _Unregistered(t(1.0))).ok
    assert not one(_Unregistered(t(1.0)), _Unregistered(t(1.000001))).ok


# floats


def test_the_formula_is_the_documented_one() -> None:
    tolerances = Tolerances(atol=0.5, rtol=0.25)
    assert one(t(4.0), t(5.5), tolerances).ok
    assert not one(t(4.0), t(5.5001), tolerances).ok
    assert one(t(-4.0), t(-2.5), tolerances).ok
    # The share is of the expected value, not of the one that came.
    assert not one(t(1.0), t(4.0), Tolerances(0.0, 1.0)).ok


def test_the_worst_element() -> None:
    expected = torch.zeros(2, 3, 4)
    got = expected.clone()
    got[1, 2, 3], got[0, 0, 1] = 0.5, -0.25
    result = one(expected, got)
    assert (result.at, result.max_abs, result.outside) == ((1, 2, 3), 0.5, 2 / 24)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("rtol", [0.0, 1e-3])
@pytest.mark.parametrize("seed", range(6))
def test_the_suggested_tolerance_passes(dtype: torch.dtype, rtol: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(5, 7, generator=generator).to(dtype) * 10 ** (seed - 3)
    got = expected + torch.randn(5, 7, generator=generator).to(dtype) * 0.3 * 10 ** (seed - 3)
    result = one(expected, got, Tolerances(1e-12, rtol))
    assert not result.ok
    assert result.would_need is not None
    assert one(expected, got, Tolerances(result.would_need, rtol)).ok
    assert not one(expected, got, Tolerances(result.would_need * 0.999, rtol)).ok
    # The text that people copy is rounded, and passes too.
    shown = table([result])[1].split("atol ")[1].split()[0]
    assert one(expected, got, Tolerances(float(shown), rtol)).ok


def test_what_it_would_need_is_enough_for_a_small_excess_of_large_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        value = torch.rand(1, generator=generator, dtype=torch.float64) * 1e12
        got = value * (1 + 1e-2) + 10.0 ** torch.randint(-6, 0, (1,), generator=generator)
        result = one(value, got, Tolerances(0.0, 1e-2))
        if not result.ok:
            assert result.would_need is not None
            assert one(value, got, Tolerances(result.would_need, 1e-2)).ok


@pytest.mark.parametrize(
    ("size", "error", "ok"),
    [
        (1.0, 1e-3, False),
        (0.01, 1e-3, False),
        (0.01, 1e-5, False),
        (1.0, 4e-6, True),
        (100.0, 5e-4, True),
        (100.0, 1.5e-1, False),
        (1e-6, 1e-7, False),
        (1e-6, 5e-9, True),
        (1e-30, 2e-30, True),
    ],
)
def test_the_default_atol_follows_the_size_of_the_output(size: float, error: float, ok: bool) -> None:
    expected = t(size, 0.0)
    assert one(expected, t(size, error)).ok is ok


@pytest.mark.parametrize(
    ("dtype", "fine", "bad"),
    [
        (torch.float64, 1e-10, 1e-7),
        (torch.float32, 5e-6, 1e-3),
        (torch.float16, 2e-3, 0.05),
        (torch.bfloat16, 1e-2, 0.2),
    ],
)
def test_defaults_by_dtype(dtype: torch.dtype, fine: float, bad: float) -> None:
    expected = torch.ones(4, dtype=dtype)
    assert one(expected, (expected.double() + fine).to(dtype)).ok
    assert not one(expected, (expected.double() + bad).to(dtype)).ok


def test_complex_numbers_count_their_imaginary_part() -> None:
    expected = torch.tensor([1 + 1j, 2j])
    assert one(expected, expected.clone()).ok
    result = one(expected, torch.tensor([1 + 1j, 2.5j]))
    assert not result.ok
    assert result.max_abs == 0.5
    assert not one(torch.tensor([complex(NAN, 0)]), torch.tensor([0j])).ok
    assert one(torch.tensor([complex(0, INF)]), torch.tensor([complex(0, INF)])).ok


def test_tolerances_by_pattern_first_match_wins() -> None:
    tolerances = Tolerances(
        1e-6, 0.0, {"logits": {"atol": 0.5}, "cache.*": {"rtol": 0.5, "atol": None}, "*": {"atol": 9.0}}
    )
    x = torch.ones(2)
    assert tolerances.of("logits", x) == Tolerance(0.5, 0.0)
    assert tolerances.of("cache.layers.0.keys", x) == Tolerance(1e-6, 0.5)
    assert tolerances.of("hidden", x) == Tolerance(9.0, 0.0)
    assert tolerances.of("hidden", x.int()) == Tolerance(0.0, 0.0)
    assert Tolerances(0.0, 0.0).of("y", x) == Tolerance(0.0, 0.0)


# where


def test_where_limits_the_comparison_and_says_so() -> None:
    expected, got = torch.zeros(2, 2), torch.tensor([[0.0, 5.0], [0.0, 0.0]])
    where = torch.tensor([[True, False], [True, True]])
    result = one(expected, got, where=where)
    assert result.ok
    assert result.note == "1 differing element outside `where` ignored"
    assert any("ignored" in line for line in table([result]))
    assert not one(expected, got, where=~where).ok
    assert one(expected, torch.full((2, 2), NAN), where=torch.zeros(2, 2, dtype=torch.bool)).ok
    assert not one(expected, torch.full((2, 2), NAN), where=where).ok


def test_where_and_integers() -> None:
    where = torch.tensor([True, False])
    assert one(t(1, 2, dtype=torch.int64), t(1, 3, dtype=torch.int64), where=where).ok
    assert not one(t(1, 2, dtype=torch.int64), t(2, 2, dtype=torch.int64), where=where).ok


def test_the_worst_element_is_among_those_that_count() -> None:
    expected, got = torch.zeros(3), torch.tensor([0.1, 9.0, 0.2])
    result = one(expected, got, where=torch.tensor([True, False, True]))
    assert not result.ok
    assert result.at == (2,)
    assert result.max_abs == pytest.approx(0.2)
    assert result.would_need == pytest.approx(0.2)


# lists of leaves


def test_missing_and_additional_outputs() -> None:
    x = torch.zeros(1)
    results = compare_leaves([("a", x), ("b", x), ("c", None)], [("a", x), ("d", x), ("e", None)], DEFAULT)
    reasons = {result.path: result.reason for result in results}
    assert reasons == {
        "a": "",
        "b": "missing, expected a float32 tensor",
        "d": "additional output, a float32 tensor",
    }
    assert [result.ok for result in results] == [True, False, False]
    assert table(results)


def test_outputs_are_matched_by_path_not_by_position() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert all(r.ok for r in compare_leaves([("a", a), ("b", b)], [("b", b), ("a", a)], DEFAULT))


def test_no_output_at_all_on_one_side_is_a_failure() -> None:
    assert not all(result.ok for result in compare_leaves([("a", torch.zeros(1))], [], DEFAULT))


def test_the_table_reads_like_the_documentation() -> None:
    results = compare_leaves(
        [("logits", torch.zeros(2, 3)), ("n", 3), ("none", None), ("ids", t(1, dtype=torch.int64))],
        [("logits", torch.full((2, 3), 0.5)), ("n", 4), ("none", None), ("ids", t(1, dtype=torch.int64))],
        Tolerances(0.1, 0.0),
    )
    lines = table(results)
    assert lines[0].split("  ")[0] == "output"
    assert lines[1].split() == [
        "logits",
        "2x3",
        "float32",
        "5.0e-01",
        "[0,",
        "0]",
        "inf",
        "100.0%",
        "atol",
        "5.1e-01",
        "FAIL",
    ]
    assert lines[2].split() == ["n", "int", "0%", "FAIL", "4", "instead", "of", "3"]
    assert lines[3].endswith("ok")
    assert lines[4].endswith("ok")


def test_many_rows_show_the_failures() -> None:
    x = torch.ones(1)
    expected = [(f"y{k}", x) for k in range(40)]
    got = [(f"y{k}", x + (k == 37)) for k in range(40)]
    lines = table(compare_leaves(expected, got, DEFAULT))
    assert any(line.startswith("y37") and "FAIL" in line for line in lines)
    assert lines[-1] == "... and 39 more outputs"


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("kept", [2, 50, 99])
def test_fill_values_do_not_widen_the_tolerance(fill: float, kept: int) -> None:
    """All but the top k are filled: also where nearly everything is."""
    expected = torch.full((100,), fill)
    expected[:kept] = torch.linspace(0.5, 1.5, kept)
    got = expected.clone()
    got[0] += 1e-3
    result = one(expected, got)
    assert not result.ok
    assert result.atol < 1e-4


def test_an_output_that_was_cast_up_is_as_exact_as_what_it_was_computed_from() -> None:
    expected = torch.ones(4)
    got = expected + 2e-3  # float16 noise in `logits.float()`
    assert not one(expected, got).ok
    assert one(expected, got, Tolerances(computed_in=torch.float16)).ok
    assert not one(expected, expected + 0.05, Tolerances(computed_in=torch.float16)).ok
    # The other way round the output's own dtype counts.
    assert one(expected.half(), got.half(), Tolerances(computed_in=torch.float32)).ok
    assert one(expected.double(), expected.double() + 1e-6, Tolerances(computed_in=torch.float32)).ok
    # What a spec says is taken as it is.
    assert not one(expected, got, Tolerances(atol=1e-5, rtol=0.0, computed_in=torch.float16)).ok


def test_a_relative_error_at_a_zero_of_eager_is_infinite_and_told() -> None:
    # The largest relative error elsewhere is within the tolerance, and alone would contradict `outside`.
    result = one(t(0.0, 0.0, 2.0, 0.0), t(0.5, 0.25, 2.0, 0.0))
    assert (result.max_rel, result.outside) == (INF, 0.5)
    lines = table([result])
    assert " inf " in lines[1]
    assert "y: 2 of 2 elements outside are 0 in eager" in lines[2]
    assert "(elsewhere max rel 0.0e+00)" in lines[2]


def test_an_error_within_the_tolerance_at_a_zero_of_eager_is_not_infinite() -> None:
    result = one(t(0.0, 2.0), t(1e-7, 2.0 + 1e-4))
    assert result.ok
    assert math.isfinite(result.max_rel)
    assert not result.note
    # Nor does it count where it is not compared.
    result = one(t(0.0, 2.0), t(1.0, 3.0), where=torch.tensor([False, True]))
    assert result.max_rel == 0.5
    assert "in eager" not in result.note


@pytest.mark.parametrize(("expected", "got", "rel"), [([4, 2], [4, 3], 0.5), ([0, 2], [3, 2], INF)])
def test_integers_have_a_relative_error(expected: list[int], got: list[int], rel: float) -> None:
    result = one(t(*expected, dtype=torch.int64), t(*got, dtype=torch.int64))
    assert (result.ok, result.max_rel) == (False, rel)
