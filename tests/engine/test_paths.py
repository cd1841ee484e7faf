"""Paths of leaves, and when two constants mean the same."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from pytest_exportcheck.pytrees import flatten_with_paths, is_constant, register_flattening_functions
from pytest_exportcheck.pytrees.paths import same_constant

Pair = namedtuple("Pair", "left right")
T = torch.zeros(1)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (T, ["output"]),
        (3, ["output"]),
        (None, ["output"]),
        ((T, None, 2), ["0", "1", "2"]),
        ([T, [T, T]], ["0", "1.0", "1.1"]),
        ({"b": T, "a": (T,)}, ["b", "a.0"]),
        (OrderedDict(z=T, a=T), ["z", "a"]),
        ({0: T, 1: T}, ["0", "1"]),
        (Pair(T, [T]), ["left", "right.0"]),
        (
            BaseModelOutput(last_hidden_state=T, hidden_states=(T, T)),
            ["last_hidden_state", "hidden_states.0"],
        ),
        ([], []),
        ({"a.b": T}, [r"a\.b"]),
        ({1: T, "1": T, "01": T, "-1": T, -1: T}, ["1", r"\1", r"\01", r"\-1", "-1"]),
        ({"a\\": {"b": T}, "a\\.b": T, r"a\b": T}, [r"a\\.b", r"a\\\.b", r"a\\b"]),
        ({"": T, True: T, "True": T, None: T, 1.5: T}, [r"\e", r"\:True", "True", r"\:None", r"\:1\.5"]),
    ],
)
def test_paths(value: Any, paths: list[str]) -> None:
    found = [path for path, _ in flatten_with_paths(value)]
    assert found[: len(paths)] == paths
    assert len(set(found)) == len(found)


def test_the_root_is_prepended_and_is_the_path_of_a_bare_leaf() -> None:
    assert [path for path, _ in flatten_with_paths((T, {"k": T}), "x")] == ["x.0", "x.1.k"]
    assert [path for path, _ in flatten_with_paths(T, "x")] == ["x"]


def test_a_cache_shows_layers_and_names() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with register_flattening_functions():
        pairs = flatten_with_paths({"cache": cache})
    assert [path for path, _ in pairs] == ["cache.layers.0.keys", "cache.layers.0.values"]
    assert float(pairs[1][1].sum()) == 8


def test_constants_are_what_is_neither_tensor_nor_object() -> None:
    assert all(map(is_constant, [None, True, 1, 1.0, 1j, "a", b"a"]))
    assert not any(map(is_constant, [T, object(), [1]]))


@dataclass
class _Options:
    scale: float
    table: torch.Tensor


class _Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (None, None, True),
        (None, 0, False),
        ("a", "a", True),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0]), False),
        (np.array([1]), np.array([1.0]), False),
        (_Plain(1), _Plain(1), True),
        (_Plain(1), _Plain(2), False),
        (_Plain([1, {"a": T}]), _Plain([1, {"a": T.clone()}]), True),
        (_Options(1.0, T), _Options(1.0, T.clone()), True),
        (_Options(1.0, T), _Options(1.0, T + 1e-6), False),
        ((1, 2), (1, 2, 3), False),
        ({"a": 1}, {"b": 1}, False),
        (slice(0, 2), slice(0, 2), True),
        (torch.float32, torch.float16, False),
    ],
)
def test_same_constant(first: Any, second: Any, same: bool) -> None:
    assert same_constant(first, second) is same
    assert same_constant(second, first) is same
