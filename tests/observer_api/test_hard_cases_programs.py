"""What a careful reading found wrong where the observer looks at programs: sizes 0 and 1, ONNX models."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.helper as oh
import pytest
import torch

from pytest_exportcheck import InputCandidate
from pytest_exportcheck.checks.compare import Tolerances, compare_leaves

from .helpers import DYNAMIC, call, f, observe
from .test_discrepancies import BOOL, FLOAT, INT64, graph

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest_exportcheck.ObserverWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)


# Sizes 0 and 1


@pytest.mark.parametrize(
    ("inputs", "shapes", "expected"),
    [
        ({"x": {0: f(1, 2), 1: f(3, 3)}}, {"x": {0: {0: DYNAMIC}, 1: {}}}, True),
        ({"x": {}, "y": f(1)}, {"x": {}, "y": {0: DYNAMIC}}, True),
        ({"x": {}, "y": f(2)}, {"x": {}, "y": {0: DYNAMIC}}, False),
        ({"x": {}}, {"x": {}}, False),
        ({"x": [], "y": f(2), "z": f(1)}, {"x": [], "y": {0: DYNAMIC}, "z": {}}, False),
        ({"x": {1: None}, "y": f(2, 1)}, {"x": {1: None}, "y": {1: DYNAMIC}}, True),
        ({"x": {1: None, 2: f(1)}, "y": f(2)}, {"x": {1: None, 2: {0: DYNAMIC}}, "y": {}}, True),
        ({"x": {0: f(2), 1: 3}, "y": f(1)}, {"x": {0: {}, 1: None}, "y": {0: DYNAMIC}}, True),
        ({"x": {0: f(1), 1: f(2)}, "y": f(2)}, {"x": None, "y": {0: DYNAMIC}}, False),
        ({"x": [f(1), f(2)], "y": f(1)}, {"x": None, "y": {0: DYNAMIC}}, True),
        ({"x": f(1, 2)}, {"x": (DYNAMIC, None)}, True),
        ({"x": [f(1, 2)]}, {"x": [(None, DYNAMIC)]}, False),
        ({"y": f(1), "x": f(2)}, {"x": {0: DYNAMIC}, "y": {}}, False),
        ({"x": f(2), "k": f(1)}, {"x": {0: DYNAMIC}, "more": {"k": {0: DYNAMIC}}}, True),
        ({"x": {"a": {}, "b": f(1)}}, {"x": {"a": {}, "b": {0: "n"}}}, True),
        ({"x": (f(2), {3: f(0)})}, {"x": ({}, {3: {0: DYNAMIC}})}, True),
        ({"x": None, "y": f(1)}, {"x": None, "y": {0: DYNAMIC}}, True),
    ],
)
def test_sizes_0_and_1_are_those_of_the_right_tensor(inputs: Any, shapes: Any, expected: bool) -> None:
    assert InputCandidate((), inputs).needs_backed_size_oblivious(shapes) is expected
    if set(inputs) == set(shapes):
        by_position = tuple(shapes[name] for name in inputs)
        assert InputCandidate(tuple(inputs.values()), {}).needs_backed_size_oblivious(by_position) is expected


def test_sizes_0_and_1_of_variadic_arguments() -> None:
    def function(a: Any, *args: Any, **kwargs: Any) -> Any:
        return a

    for last, expected in ((3, False), (1, True)):
        observer = observe(
            function, *(call(f(4, n), f(n), f(2), x=f(n - last)) for n in (last + 5, 2 * last))
        )
        shapes = observer.infer_dynamic_shapes()
        assert set(shapes) == {"a", "args", "kwargs"}
        assert observer.needs_backed_size_oblivious(shapes, 1) is expected
        assert observer.info.inputs[1].needs_backed_size_oblivious(shapes) is expected


@pytest.mark.parametrize(
    ("inputs", "shapes", "message"),
    [
        ({"x": f(2)}, {"x": {}, "y": {0: DYNAMIC}}, "no 'y'"),
        ({"x": {"a": f(2)}}, {"x": {"b": {0: DYNAMIC}}}, r"x\.b"),
        ({"x": [f(2)]}, {"x": [{}, {0: DYNAMIC}]}, "2 entries, more than the 1 of x"),
        ({"x": f(2)}, {"x": (None, DYNAMIC)}, "axis 1 for a tensor of 1 axis"),
        ({"x": f(2)}, {"x": {"a": {0: DYNAMIC}}}, "axis 'a'"),
        ({"x": 3}, {"x": {0: DYNAMIC}}, "x, which is a int"),
    ],
)
def test_shapes_of_what_is_no_input_are_refused(inputs: Any, shapes: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        InputCandidate((), inputs).needs_backed_size_oblivious(shapes)


# ONNX models


def outputs_of(value: Any, *given: tuple[Any, int]) -> dict[str, Any]:
    """The row of a call that returned `value`, for an ONNX model that gives constants."""
    names = [f"out_{k}" for k in range(len(given))]
    model = graph(
        [oh.make_node("Identity", [f"c_{name}"], [name]) for name in names],
        {},
        {name: kind for name, (_, kind) in zip(names, given, strict=True)},
        {f"c_{name}": array for name, (array, _) in zip(names, given, strict=True)},
    )
    row: dict[str, Any] = observe(lambda x: value, call(f(2))).check_discrepancies(model)[0]
    return row


@pytest.mark.parametrize(
    ("value", "array", "kind", "success"),
    [
        (float("nan"), np.array(np.nan, np.float32), FLOAT, True),
        (0.1, np.array(0.1, np.float32), FLOAT, True),
        (3, np.array(3), INT64, True),
        (3, np.array(4), INT64, False),
        (3, np.array([3, 3]), INT64, False),
        (3, np.array(3.0, np.float32), FLOAT, False),
        (True, np.array(1), INT64, False),
        (1, np.array(True), BOOL, False),
        (np.array([1.0, 2.0], np.float32), np.array([1.0, 2.0 + 1e-6], np.float32), FLOAT, True),
        (torch.tensor([float("inf"), 1.0]), np.array([1.0, np.inf], np.float32), FLOAT, False),
        (torch.tensor([3e38, 1.0]), np.array([np.inf, 1.0], np.float32), FLOAT, False),
        (torch.tensor([float("nan"), 1.0]), np.array([1.0, np.nan], np.float32), FLOAT, False),
        (torch.tensor([float("nan"), float("nan")]), np.full(2, np.nan, np.float32), FLOAT, True),
    ],
)
def test_a_row_says_what_compare_says(value: Any, array: Any, kind: int, success: bool) -> None:
    assert outputs_of(value, (array, kind))["SUCCESS"] is success
    (result,) = compare_leaves([("out", value)], [("out", torch.from_numpy(array))], Tolerances())
    assert result.ok is success


@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8)]
)
def test_an_output_that_cannot_be_read_fails_its_row(make: Any) -> None:
    value = make(torch.eye(2))
    row = outputs_of(value, (np.eye(2, dtype=np.float32), FLOAT))
    assert row["SUCCESS"] is False
    assert "is not compared" in row["error"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_outputs_called_like_the_keys_of_a_dict_come_by_name(order: str) -> None:
    nodes = [oh.make_node("Identity", ["x"], ["a"]), oh.make_node("Neg", ["x"], ["b"])]
    right = graph(nodes, {"x": FLOAT}, dict.fromkeys(order, FLOAT))
    assert observe(lambda x: {"a": x, "b": -x}, call(f(2))).check_discrepancies(right)[0]["SUCCESS"] is True
    assert observe(lambda x: {"b": x, "a": -x}, call(f(2))).check_discrepancies(right)[0]["SUCCESS"] is False


def test_containers_of_outputs_do_not_count() -> None:
    ab = (np.ones(2, np.float32), FLOAT), (np.array(3), INT64)
    tensor = torch.ones(2)
    for value in ((tensor, 3), [tensor, [3]], {"t": (tensor,), "n": {"k": 3}}, (None, tensor, {}, 3, None)):
        assert outputs_of(value, *ab)["SUCCESS"] is True, value
    for value in ((3, tensor), [tensor, tensor, 3], {"t": tensor, "n": None}, (tensor, 3, 3)):
        assert outputs_of(value, *ab)["SUCCESS"] is False, value
