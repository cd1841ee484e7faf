"""`max_diff` and `string_diff`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from pytest_exportcheck import (
    CacheKeyValue,
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    max_diff,
    string_diff,
)

INF = math.inf
ONES, NAN = torch.ones(2), float("nan")


def test_none_beside_none_and_beside_something() -> None:
    assert max_diff(None, None) == {"abs": 0, "rel": 0, "sum": 0, "n": 0, "dnan": 0}
    for pair in ((None, ONES), (ONES, None), ([None], [ONES]), ({"a": None}, {"a": ONES})):
        with pytest.raises(TypeError, match="None beside a Tensor"):
            max_diff(*pair)
        assert max_diff(*pair, skip_none=True)["abs"] == 0
    assert max_diff([ONES, None], [ONES], skip_none=True)["n"] == 2
    assert max_diff([None, ONES], [ONES], skip_none=True)["abs"] == 0


def test_numbers() -> None:
    diff = max_diff(torch.tensor([1.0, 2.0, -4.0]), torch.tensor([1.0, 2.5, -3.0]))
    assert diff == {
        "abs": 1.0, "rel": 0.25, "sum": 1.5, "n": 3, "dnan": 0, "dev": 0, "argm": (2,),
    }  # fmt: skip
    assert max_diff(torch.zeros(2), torch.ones(2))["rel"] == 0
    assert max_diff(5, 5.0)["abs"] == 0
    assert max_diff(True, False)["abs"] == 1
    assert max_diff(torch.zeros(0), torch.zeros(0))["abs"] == 0
    big = torch.tensor([2**62 + 1])
    assert max_diff(big, big - 1)["abs"] >= 1
    assert max_diff(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [5, 4]]))["argm"] == (1, 0)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, 1)),
        ([ONES], [ONES, ONES]),
        ((ONES, ONES), [ONES]),
        ({"a": ONES}, {"b": ONES}),
        ({"a": ONES}, {"a": ONES, "b": ONES}),
        (ONES, [ONES, ONES]),
        (ONES, [[1], [1, 2]]),
        (ONES, {"a": ONES}),
        (ONES, "text"),
        ("a", "b"),
        (ONES, object()),
    ],
)
def test_a_mismatch_is_infinite_and_no_exception(expected: Any, got: Any) -> None:
    assert max_diff(expected, got)["abs"] == INF


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (ONES, ONES.numpy()),
        (np.ones(2, np.float32), ONES),
        (ONES, [1, 1]),
        ([1.0, 1.0], ONES),
        (np.ones((2, 2)), [[1, 1], [1, 1]]),
        (ONES, [ONES]),
        ((ONES,), ONES),
        ([ONES, ONES], (ONES, ONES)),
        ({"a": ONES, "b": 2}, {"b": 2, "a": ONES}),
        (BaseModelOutput(last_hidden_state=ONES), [ONES]),
        (BaseModelOutput(last_hidden_state=ONES), BaseModelOutput(last_hidden_state=ONES)),
        (BaseModelOutput(last_hidden_state=ONES), {"last_hidden_state": ONES}),
        (3, 3),
        ("a", "a"),
        (torch.tensor(1), 1),
        ([[ONES], [1, [ONES]]], [[ONES], [1, [ONES]]]),
    ],
)
def test_equal_in_other_forms(expected: Any, got: Any) -> None:
    diff = max_diff(expected, got)
    assert (diff["abs"], diff["rel"], diff["dnan"]) == (0, 0, 0)


def test_a_list_of_one_may_be_told_from_a_tensor() -> None:
    assert max_diff(ONES, [ONES], allow_unique_tensor_with_list_of_one_element=False)["abs"] == INF


def test_nan_and_infinity() -> None:
    both = max_diff(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.5]))
    assert (both["abs"], both["dnan"]) == (0.5, 0)
    for pair in (([NAN, 1.0], [1e10, 1.0]), ([0.0, 1.0], [NAN, 1.0])):
        diff = max_diff(*map(torch.tensor, pair))
        assert (diff["abs"], diff["dnan"]) == (INF, 1)
    assert max_diff(torch.tensor([INF]), torch.tensor([INF]))["abs"] == 0
    assert max_diff(torch.tensor([INF]), torch.tensor([-INF]))["abs"] == INF
    assert max_diff(torch.tensor([INF]), torch.tensor([1.0]))["rel"] == INF


def test_complex_numbers_keep_their_imaginary_part() -> None:
    for make in (torch.tensor, np.array):
        assert max_diff(make([1 + 2j]), make([1 + 5j]))["abs"] == 3
    assert max_diff(torch.tensor([1 + 2j]), torch.tensor([1.0]))["abs"] == 2


def test_dtypes_that_differ_are_counted() -> None:
    ints = torch.ones(2, dtype=torch.int64)
    diff = max_diff([ONES, ints, ONES], [ONES.double(), ints.float(), ONES])
    assert (diff["abs"], diff["ddtype"]) == (0, 2)
    assert "ddtype" not in max_diff(ONES, ONES)


def test_thresholds() -> None:
    a, b = torch.zeros(4), torch.tensor([0.0, 0.05, 0.2, 0.3])
    assert max_diff(a, b, hist=[0.1, 0.01])["rep"] == {">0.1": 2, ">0.01": 3}
    assert max_diff([a, a], [b, b], hist=[0.1])["rep"] == {">0.1": 4}
    assert max_diff(a, b, hist=True)["rep"][">0.1"] == 2
    assert max_diff([a, torch.zeros(0)], [b, torch.zeros(0)], hist=[0.1])["rep"] == {">0.1": 2}


def test_limits() -> None:
    expected, got = [torch.zeros(1)] * 3, [torch.zeros(1), torch.ones(1), torch.full((1,), 5.0)]
    assert max_diff(expected, got)["abs"] == 5
    assert max_diff(expected, got, end=2)["abs"] == 1
    assert max_diff(expected, got, begin=1, end=2)["n"] == 1
    assert max_diff(expected, got, end=1)["abs"] == 0


def test_the_place_of_the_largest_difference() -> None:
    expected = {"a": [ONES, torch.zeros(2, 3)], "b": ONES}
    got = {"a": [ONES, torch.zeros(2, 3)], "b": ONES + 1}
    got["a"][1][1, 2] = 9
    assert max_diff(expected, got)["argm"] == ("a", 1, 1, 2)


def test_caches() -> None:
    pairs = [(torch.rand(1, 1, 3, 2), torch.rand(1, 1, 3, 2)) for _ in range(2)]
    other = [(key + 1, value) for key, value in pairs]
    cache, moved = make_dynamic_cache(pairs), make_dynamic_cache(other)
    keys, values = [k for k, _ in pairs], [v for _, v in pairs]
    for same in (cache, (keys, values), [keys, values], CacheKeyValue(cache), CacheKeyValue(cache).aslist()):
        assert max_diff(cache, same)["abs"] == 0
        assert max_diff(same, cache)["abs"] == 0
    assert max_diff(cache, moved)["abs"] == pytest.approx(1)
    both = make_encoder_decoder_cache(cache, cache)
    assert max_diff(both, make_encoder_decoder_cache(cache, moved))["abs"] == pytest.approx(1)
    static = make_static_cache(pairs, max_cache_len=5)
    assert max_diff(static, make_static_cache(pairs, max_cache_len=5))["abs"] == 0
    assert max_diff(cache, make_dynamic_cache(pairs[:1]))["abs"] == INF


def test_text() -> None:
    diff = max_diff(torch.zeros(4), torch.tensor([0.0, 0.05, 0.2, NAN]), hist=[0.1])
    assert string_diff(diff) == "abs=inf, rel=inf, n=4, dnan=1, argm=(3,), >0.1: 2"
    assert ">0.1: 0.5" in string_diff(diff, ratio=True)
    assert string_diff(max_diff(None, None)) == "abs=0, rel=0"
