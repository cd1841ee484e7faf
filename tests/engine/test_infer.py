"""From recorded calls to shapes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pytest_exportcheck.dims import DimExpr
from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import infer, rows

Pair = namedtuple("Pair", "left right")


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def args(*values: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return values, kwargs


def take(x: Any, y: Any = None, scale: Any = 1.0, **more: Any) -> Any:
    return torch.zeros(1)


# axes


def test_an_axis_is_dynamic_if_its_size_varies() -> None:
    shapes, _ = infer(take, args(f(2, 6)), args(f(3, 6)), args(f(2, 6)))
    assert rows(shapes) == {"x": "float32[x_dim_0, 6]"}
    assert shapes.sizes == {0: {"x_dim_0": 2}, 1: {"x_dim_0": 3}, 2: {"x_dim_0": 2}}


def test_one_call_shows_no_axis_and_says_so() -> None:
    shapes, _ = infer(take, args(f(2, 6)))
    assert rows(shapes) == {"x": "float32[2, 6]"}
    assert any("only one call" in warning for warning in shapes.warnings)


@pytest.mark.parametrize(
    ("batch", "x", "y"),
    [(True, "[batch, 3]", "[batch, 4]"), ({"y"}, "[2, 3]", "[batch, 4]"), (False, "[2, 3]", "[2, 4]")],
)
def test_batch_dims(batch: Any, x: str, y: str) -> None:
    shapes, _ = infer(take, args(f(2, 3), f(2, 4)), batch_dims=batch)
    assert rows(shapes) == {"x": f"float32{x}", "y": f"float32{y}"}


def test_a_scalar_tensor_has_no_batch() -> None:
    shapes, _ = infer(take, args(f(2, 3), torch.tensor(1.0)), batch_dims=True)
    assert rows(shapes) == {"x": "float32[batch, 3]", "y": "float32[]"}


def test_equal_sizes_share_a_symbol_and_different_ones_do_not() -> None:
    shapes, _ = infer(take, args(f(4, 3), f(4, 3)), args(f(2, 3), f(6, 3)))
    x, y = shapes.tensors()
    assert x.dims[0] != y.dims[0]
    assert len(shapes.symbols) == 2
    shapes, _ = infer(take, args(f(4, 3), f(4, 3)), args(f(2, 3), f(2, 3)))
    assert len(shapes.symbols) == 1


def test_symbols_of_transformers_and_their_sum() -> None:
    def forward(input_ids: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        return torch.zeros(1)

    def call(batch: int, seq: int, past: int) -> Any:
        cache = DynamicCache()
        cache.update(f(batch, 1, past, 4), f(batch, 1, past, 4), 0)
        return args(input_ids=ids(batch, seq), attention_mask=ids(batch, past + seq), cache=cache)

    shapes, _ = infer(forward, call(2, 3, 5), call(3, 1, 8), call(2, 4, 2))
    assert rows(shapes) == {
        "input_ids": "int64[batch, seq]",
        "attention_mask": "int64[batch, past + seq]",
        "cache.layers.0.keys": "float32[batch, 1, past, 4]",
        "cache.layers.0.values": "float32[batch, 1, past, 4]",
    }
    assert shapes.symbols == ["batch", "seq", "past"]
    assert shapes.dims("attention_mask", {"batch": 1, "past": 7, "seq": 2}) == (1, 9)


def test_declared_dims_name_the_symbols() -> None:
    declared = {("x", 0): DimExpr.symbol("rows"), ("x", 1): DimExpr.symbol("width")}
    shapes, _ = infer(take, args(f(2, 6)), args(f(3, 7)), declared=declared)
    assert rows(shapes) == {"x": "float32[rows, width]"}


# arguments that are there or not


def test_an_optional_argument_is_inferred_from_the_calls_that_have_it() -> None:
    shapes, calls = infer(take, args(f(2, 3)), args(f(3, 3), f(3, 4)), args(f(4, 3), y=f(4, 4)))
    assert rows(shapes) == {"x": "float32[x_dim_0, 3]", "y": "float32[x_dim_0, 4]"}
    assert shapes.missing(calls[0]) == ["y"]
    with pytest.raises(ObserveError, match="call 0 has no y"):
        shapes.complete(calls[0])
    assert list(shapes.complete(calls[2])) == ["x", "y"]


def test_the_order_is_that_of_the_signature() -> None:
    shapes, _ = infer(take, args(y=f(2, 1), x=f(2, 2)), args(x=f(3, 2), y=f(3, 1)))
    assert list(rows(shapes)) == ["x", "y"]


@pytest.mark.parametrize("late", [False, True])
def test_positional_and_keyword_calls_are_one(late: bool) -> None:
    calls = [args(f(2, 3), f(2, 1)), args(f(3, 3), y=f(3, 1)), args(y=f(4, 1), x=f(4, 3))]
    shapes, _ = infer(take, *(reversed(calls) if late else calls))
    assert rows(shapes) == {"x": "float32[x_dim_0, 3]", "y": "float32[x_dim_0, 1]"}


def test_value_if_missing_counts_as_an_observation() -> None:
    stand_in = f(0, 4)
    shapes, calls = infer(
        take,
        args(f(2, 3)),
        args(f(3, 3), f(3, 4)),
        value_if_missing=lambda name, sizes: stand_in if name == "y" else None,
    )
    assert rows(shapes)["y"] == "float32[y_dim_0, 4]"
    completed = shapes.complete(calls[0])
    assert completed["y"] is stand_in
    assert calls[0].arguments.keys() == {"x"}, "the recorded call is left alone"


def test_value_if_missing_may_depend_on_the_sizes_of_the_call() -> None:
    def stand_in(name: str, sizes: Any) -> Any:
        if name != "y" or not sizes or "x_dim_0" not in sizes:
            return None
        return f(sizes["x_dim_0"], 4)

    shapes, calls = infer(take, args(f(2, 3)), args(f(3, 3), f(3, 4)), value_if_missing=stand_in)
    assert rows(shapes) == {"x": "float32[x_dim_0, 3]", "y": "float32[x_dim_0, 4]"}
    assert tuple(shapes.complete(calls[0])["y"].shape) == (2, 4)


def test_an_empty_cache_is_a_cache_of_length_0() -> None:
    def forward(input_ids: Any, cache: Any = None) -> Any:
        return torch.zeros(1)

    full = DynamicCache()
    for layer in range(2):
        full.update(f(2, 1, 5, 4), f(2, 1, 5, 4), layer)
    shapes, calls = infer(
        forward,
        args(ids(2, 5), DynamicCache()),
        args(ids(2, 1), full),
        args(ids(2, 2), full),
        batch_dims=True,
    )
    assert rows(shapes)["cache.layers.1.values"] == "float32[batch, 1, past, 4]"
    assert [shapes.sizes[k]["past"] for k in range(3)] == [0, 5, 5]
    with register_flattening_functions():
        completed = shapes.complete(calls[0])["cache"]
    assert [tuple(layer.keys.shape) for layer in completed.layers] == [(2, 1, 0, 4)] * 2
    assert len(calls[0].arguments["cache"].layers) == 0


# containers and constants


@pytest.mark.parametrize(
    "container", [lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}, Pair]
)
def test_containers(container: Any) -> None:
    shapes, _ = infer(
        take, args(container(f(2, 1), f(5, 1)), f(7, 1)), args(container(f(3, 1), f(5, 2)), f(7, 2))
    )
    first, second, last = rows(shapes).values()
    assert first == "float32[batch, 1]"
    assert second.startswith("float32[5, x_")
    assert last == second.replace("[5", "[7")


def test_a_none_leaf_keeps_the_pairing_of_the_others() -> None:
    shapes, _ = infer(take, args([f(2), None, f(3)], f(4)), args([f(3), None, f(3)], f(5)))
    assert rows(shapes) == {
        "x.0": "float32[batch]",
        "x.1": "none",
        "x.2": "float32[3]",
        "y": "float32[y_dim_0]",
    }


def test_a_tensor_that_is_none_in_another_call_needs_a_stand_in() -> None:
    shapes, calls = infer(take, args([f(2), None]), args([f(3), f(4)]))
    assert shapes.missing(calls[0]) == ["x.1"]
    with pytest.raises(ObserveError, match=r"call 0 has no x\.1"):
        shapes.complete(calls[0])


def test_the_constants_of_a_container_that_a_call_lacks_are_missing_too() -> None:
    full = {"t": f(2, 3), "n": 3, "inner": [f(2, 3), "text"]}
    other = {"t": f(4, 3), "n": 3, "inner": None}
    expected = {
        "x": "float32[2, 3]", "y.t": "float32[y_t_dim_0, 3]", "y.n": "int = 3", "y.inner.0": "float32[2, 3]",
        "y.inner.1": "str = 'text'",
    }  # fmt: skip
    calls = [args(f(2, 3), full), args(f(2, 3), other), args(f(2, 3)), args(f(2, 3), None)]
    for order in (calls, calls[::-1]):
        shapes, _ = infer(take, *order)
        found = {path: text.replace("batch", "y_t_dim_0") for path, text in rows(shapes).items()}
        assert found == expected
    # Without a tensor beside them they are the whole difference.
    with pytest.raises(ObserveError, match=r"y\.n is a constant that differs"):
        infer(take, args(f(2, 3), {"n": 3}), args(f(2, 3)))


def test_the_kinds_of_containers_are_written_down() -> None:
    value = {"a": (f(1), [f(1)]), "b": Pair(f(1), f(1)), "c": OrderedDict(k=f(1)), "d": [], "e": {0: f(1)}}
    shapes, _ = infer(take, args(value))
    assert shapes.containers == {
        "x.a": "tuple",
        "x.b": f"namedtuple {__name__}:Pair",
        "x.c": "OrderedDict",
        "x.d": "list",
        "x.e": "dict",
    }


def test_another_structure_is_an_error() -> None:
    with pytest.raises(ObserveError, match=r"argument x has a different structure in call 1: it holds x\.b"):
        infer(take, args({"a": f(1), "c": f(1)}), args({"a": f(1), "b": f(1)}))


@pytest.mark.parametrize(
    "value", [2, True, 0.5, "a", float("nan"), np.float32(2), np.array([1, 2]), slice(0, 2)]
)
def test_a_constant_is_kept(value: Any) -> None:
    shapes, _ = infer(take, args(f(2), scale=value), args(f(3), scale=value))
    assert list(shapes.leaves) == ["x", "scale"]


class _Config:
    def __init__(self, width: int) -> None:
        self.width = width


def test_an_object_is_a_constant_by_what_it_holds() -> None:
    shapes, _ = infer(take, args(f(2), scale=_Config(3)), args(f(3), scale=_Config(3)))
    assert list(shapes.leaves) == ["x", "scale"]
    with pytest.raises(ObserveError, match="argument scale is a constant that differs"):
        infer(take, args(f(2), scale=_Config(3)), args(f(3), scale=_Config(4)))


def test_a_default_that_is_passed_says_nothing_but_true_is_not_1() -> None:
    shapes, _ = infer(take, args(f(2), scale=1.0), args(f(3)))
    assert list(shapes.leaves) == ["x"]
    with pytest.raises(ObserveError, match="argument scale is a constant that differs"):
        infer(take, args(f(2), scale=True), args(f(3)))


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            [args(f(2), scale=2), args(f(3), scale=3)],
            "scale is a constant that differs between calls (2 in call 0; 3 in call 1)",
        ),
        (
            [args(f(2), scale=2), args(f(3))],
            "scale is a constant that differs between calls (2 in call 0; 1.0 in call 1)",
        ),
        (
            [args(f(2), flag="a"), args(f(3))],
            "flag is a constant that differs between calls ('a' in call 0; None in call 1)",
        ),
        (
            [args([f(2), 1]), args([f(3), 2]), args([f(4), 1])],
            "x.1 is a constant that differs between calls (1 in calls 0, 2; 2 in call 1)",
        ),
        ([args(f(2)), args(f(2, 2))], "argument x changes its rank: 1 in call 0; 2 in call 1"),
        ([args(f(2)), args(ids(2))], "argument x changes its dtype: float32 in call 0; int64 in call 1"),
        ([args(f(2)), args(3)], "argument x is a tensor in call 0 and int (3) in call 1"),
    ],
)
def test_calls_that_one_graph_cannot_serve(calls: Any, message: str) -> None:
    with pytest.raises(ObserveError) as caught:
        infer(take, *calls)
    assert message in caught.value.message
    if "constant" in message:
        assert any("graphs:" in line for line in caught.value.details)


def test_a_relation_needs_more_than_two_sizes_that_differ_by_one() -> None:
    shapes, _ = infer(take, args(f(5, 4)), args(f(9, 8)))
    assert rows(shapes) == {"x": "float32[x_dim_0, x_dim_1]"}
    shapes, _ = infer(take, args(f(5, 4)), args(f(9, 8)), args(f(7, 6)))
    assert rows(shapes) == {"x": "float32[x_dim_0, x_dim_0 - 1]"}


def test_a_batch_is_part_of_no_relation() -> None:
    def forward(input_ids: Any, extra: Any) -> Any:
        return torch.zeros(1)

    shapes, _ = infer(forward, *(args(ids(b, s), f(b + s)) for b, s in ((2, 3), (3, 5), (4, 4))))
    assert rows(shapes) == {"input_ids": "int64[batch, seq]", "extra": "float32[extra_dim_0]"}


def test_a_float_that_differs_may_be_a_tensor() -> None:
    """Of an integer a shape may be made, for which a tensor is of no use."""
    for pair, offered in (((1.5, 2.5), True), ((2, 3), False), ((1.5, 2), False)):
        with pytest.raises(ObserveError, match="scale is a constant that differs") as caught:
            infer(take, *(args(f(2), scale=value) for value in pair))
        text = "as a 0-d tensor (torch.tensor(1.5), in a spec float32[]) it is an input of the program"
        assert (text in caught.value.message) == offered
