"""`to_plain`: what may travel on a report, and what JSON can hold."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.reports.record import json_ready, sort_key, to_plain


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclass
class Point:
    x: float
    where: Path


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2**80, 2**80),
        (0.5, 0.5),
        ("é", "é"),
        ("\ud800", "\\ud800"),
        (Text("a"), "a"),
        (b"a\xff", "a\\xff"),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, 1}), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (
            {1: "a", (1, 2): "b", None: "c", Colour.RED: "d"},
            {"1": "a", "[1, 2]": "b", "None": "c", "red": "d"},
        ),
        (Path("a") / "b", "a/b"),
        (Colour.RED, "red"),
        (Number.ONE, 1),
        (Point(1.0, Path("p")), {"x": 1.0, "where": "p"}),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.zeros((2000,), dtype=np.float32), "<float32 [2000]>"),
        (torch.tensor(3), 3),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (torch.ones(1, requires_grad=True), [1.0]),
        (torch.zeros(40, 50), "<torch.float32 [40, 50]>"),
        (torch.Size([1, 2]), [1, 2]),
        (torch.float32, "torch.float32"),
        (int, "<class 'int'>"),
        (Broken(), "<Broken: RuntimeError>"),
        (ValueError("no"), "no"),
    ],
)
def test_to_plain(value, plain):
    result = to_plain(value)
    assert result == plain
    assert_plain(result)


def assert_plain(value: object) -> None:
    assert type(value) in (type(None), bool, int, float, str, list, dict)
    if isinstance(value, list):
        for item in value:
            assert_plain(item)
    if isinstance(value, dict):
        for key, item in value.items():
            assert type(key) is str
            assert_plain(item)


def test_what_is_plain_can_be_sent_by_xdist():
    execnet = pytest.importorskip("execnet")
    value = to_plain({"a": (np.float32(1), Path("p")), "nan": math.nan, "s": "\udcff"})
    assert execnet.loads(execnet.dumps(value))["a"] == [1.0, "p"]


def test_cycles_end():
    value: list[object] = [1]
    value.append(value)
    assert to_plain(value) == [1, "<cycle>"]
    shared = [1]
    assert to_plain([shared, shared]) == [[1], [1]]


def test_json_has_no_infinite_numbers():
    value = json_ready(to_plain({"a": [math.nan, math.inf, -math.inf, np.float32("nan"), 1.0]}))
    assert value == {"a": ["nan", "inf", "-inf", "nan", 1.0]}
    json.dumps(value, allow_nan=False)


def test_a_case_id_is_a_mapping_of_its_fields():
    assert to_plain(CaseId("s.yaml", None, None, "cpu", "float32"))["exporter"] is None


def test_records_sort_by_spec_with_the_shapes_check_first():
    records = [
        {"spec": "b", "exporter": "x", "device": "cpu", "dtype": "float32"},
        {"spec": "a", "exporter": "x", "device": "cpu", "dtype": "float32"},
        {"spec": "a", "exporter": None, "device": "cpu", "dtype": "float32"},
    ]
    assert sorted(records, key=sort_key) == records[::-1]
