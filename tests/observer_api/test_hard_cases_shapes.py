"""What a careful reading of the inferred shapes and arguments found wrong, one test each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_exportcheck import ObserverWarning

from .helpers import DYNAMIC, call, f, observe

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest_exportcheck.ObserverWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)


def ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value))


# Tensors that are no plain numbers in memory


def per_tensor(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(f(*shape), 0.1, 3, torch.qint8)


def per_channel(*shape: int) -> torch.Tensor:
    scales = torch.arange(1, shape[1] + 1) / 10
    return torch.quantize_per_channel(f(*shape), scales, torch.arange(shape[1]), 1, torch.quint8)


@pytest.mark.parametrize("store", ["device", "cpu", "disk"])
@pytest.mark.parametrize("make", [per_tensor, per_channel])
def test_quantized_tensors_come_back_with_their_scale(make: Callable[..., torch.Tensor], store: Any) -> None:
    inputs = [make(n, 3) for n in (2, 4)]
    observer = observe(lambda x: x.dequantize(), *map(call, inputs), store=store)
    assert observer.num_obs() == 2
    for index, value in enumerate(inputs):
        (again,) = observer.infer_arguments(index)
        assert again.dtype == value.dtype
        assert again.qscheme() == value.qscheme()
        assert torch.equal(again.int_repr(), value.int_repr())
        assert torch.equal(again.dequantize(), value.dequantize())
        assert again.data_ptr() != value.data_ptr()
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC},)


def test_a_quantized_output_is_kept() -> None:
    observer = observe(
        lambda x: torch.quantize_per_tensor(x, 0.5, 2, torch.quint8), call(ones(3)), store="cpu"
    )
    assert observer.info.calls[0].outputs.q_zero_point() == 2


def test_shapes_of_quantized_tensors_beyond_the_limit_count() -> None:
    observer = observe(lambda x: x, *(call(per_channel(2 + n, 3)) for n in range(3)), store_n_calls=1)
    assert observer.infer_dynamic_shapes() == ({0: DYNAMIC},)


def test_a_missing_quantized_tensor_is_quantized() -> None:
    observer = observe(lambda x, y=None: x, call(ones(2), per_tensor(2, 3)), call(ones(3)))
    missing = observer.infer_arguments(1)[1]
    assert (missing.dtype, tuple(missing.shape)) == (torch.qint8, (2, 3))
    assert torch.equal(missing.dequantize(), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda n: per_tensor(1, n), "quantized"),
        (lambda n: per_channel(1, n), "quantized"),
        (lambda n: ones(1, n).to_sparse(), "only a dense one"),
    ],
)
def test_what_cannot_be_resized_is_exported_as_observed(value: Any, why: str) -> None:
    observer = observe(lambda x: x, *(call(value(n)) for n in (2, 3)))
    with pytest.warns(ObserverWarning, match=why):
        (example,) = observer.infer_arguments(export_safe=True, set_batch_dimension_for=True)
    assert example.dtype == value(2).dtype
    assert example.layout == value(2).layout


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_meta_tensors_are_recorded(store: Any) -> None:
    observer = observe(lambda x: x, *(call(torch.empty(2, n, device="meta")) for n in (3, 4)), store=store)
    assert observer.infer_dynamic_shapes() == ({1: DYNAMIC},)
    assert observer.infer_arguments()[0].device.type == "meta"


# Labels


def labelled(dim_names: Any, **options: Any) -> Any:
    """Of x (varies in both axes) and y (static)."""
    observer = observe(lambda x, y: x, call(f(2, 3), f(5, 2)), call(f(4, 7), f(5, 2)))
    return observer.infer_dynamic_shapes(dim_names=dim_names, **options)


def test_a_negative_axis_counts_from_the_end() -> None:
    assert labelled({"x": {-1: "last", -2: "first"}}) == ({0: "first", 1: "last"}, {})
    assert labelled({0: {-1: "last"}}) == ({0: "x_dim_0", 1: "last"}, {})


def test_a_negative_axis_counts_from_the_end_of_each_leaf() -> None:
    observer = observe(lambda x: x, *(call(x=[f(n), f(2, 3, n)]) for n in (4, 5)))
    shapes = observer.infer_dynamic_shapes(dim_names={"x": {-1: "length"}})
    assert shapes == {"x": [{0: "length"}, {2: "length"}]}


@pytest.mark.parametrize(
    ("dim_names", "error", "message"),
    [
        ({"x": {2: "a"}}, ValueError, r"dim_names\['x'\] names axis 2: x has 2 axes"),
        ({"x": {-3: "a"}}, ValueError, "axis -3: x has 2 axes"),
        ({"x": {-1: "a", 1: "b"}}, ValueError, "x axis 1 two labels, 'a' and 'b'"),
        ({"x": {0: "a"}, 0: {0: "b"}}, ValueError, "names x twice, as 'x' and as 0"),
        ({"x.3": {0: "a"}}, ValueError, r"no 'x\.3'"),
        ({"x": {"0": "a"}}, TypeError, "Unexpected type .*str.* for axis '0'"),
        ({"x": {True: "a"}}, TypeError, "for axis True"),
        ({"x": "a"}, TypeError, r"Unexpected type .*str.* for dim_names\['x'\]"),
        ({"x": ["a", "b"]}, TypeError, r"Unexpected type .*list.* for dim_names\['x'\]"),
        ({True: {0: "a"}}, TypeError, "Unexpected type .*bool"),
        ({1.0: {0: "a"}}, TypeError, "Unexpected type .*float"),
        ("batch", TypeError, "Unexpected type .*str.* for dim_names"),
        ({"x": {0: "a", 1: "a"}}, ValueError, "'a' .* call 0: x axis 0 of size 2 and x axis 1 of size 3"),
    ],
)
def test_labels_of_what_there_is_not_are_refused(
    dim_names: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        labelled(dim_names)


def test_a_label_without_effect_is_said() -> None:
    with pytest.warns(ObserverWarning, match=r"y axis 1 \('a'\), which has one size in every call"):
        assert labelled({"y": {-1: "a"}}) == ({0: "x_dim_0", 1: "x_dim_1"}, {})
    observer = observe(lambda x, mask=None: x, call(f(2, 3)), call(f(2, 4)))
    with pytest.warns(ObserverWarning, match="mask, which is a tensor in no call"):
        observer.infer_dynamic_shapes(dim_names={"mask": {0: "a"}})


@pytest.mark.parametrize("label", ["n", torch.export.Dim("n")])
def test_one_label_for_axes_of_different_sizes_is_refused(label: Any) -> None:
    def names(a: int, b: int) -> Any:
        observer = observe(lambda x, y: x, call(f(2), f(2)), call(f(a), f(b)))
        return observer.infer_dynamic_shapes(dim_names={"x": {0: label}, "y": {0: "n"}})

    assert names(3, 3) == ({0: label}, {0: "n"})
    with pytest.raises(ValueError, match="differ in call 1: x axis 0 of size 3 and y axis 0 of size 4"):
        names(3, 4)


def test_one_label_is_checked_in_calls_beyond_the_limit() -> None:
    calls = [call(f(2), f(2)), call(f(3), f(3)), call(f(4), f(5))]
    observer = observe(lambda x, y: x, *calls, store_n_calls=2)
    with pytest.raises(ValueError, match="differ in call 2"):
        observer.infer_dynamic_shapes(dim_names={"x": {0: "n"}, "y": {0: "n"}})


def test_a_hint_as_label_ties_nothing() -> None:
    auto = torch.export.Dim.AUTO
    assert labelled({"x": {0: auto, 1: auto}}) == ({0: auto, 1: auto}, {})


def test_a_leaf_has_labels_of_its_own() -> None:
    observer = observe(lambda x: x, *(call(x={"a": f(n), "b": f(2 * n)}) for n in (4, 5)))
    with pytest.raises(ValueError, match=r"x\.a axis 0 of size 4 and x\.b axis 0 of size 8"):
        observer.infer_dynamic_shapes(dim_names={"x": {0: "n"}})
    shapes = observer.infer_dynamic_shapes(dim_names={"x": {0: "n"}, "x.b": {-1: "twice"}})
    assert shapes == {"x": {"a": {0: "n"}, "b": {0: "twice"}}}


def test_a_label_that_is_made_up_is_that_of_no_other_axis() -> None:
    observer = observe(lambda x, x_0: x, *(call(x=[f(n)], x_0=f(n + 1)) for n in (4, 5)))
    shapes = observer.infer_dynamic_shapes(dim_names={"x_0": {}})
    assert shapes["x"][0][0] != shapes["x_0"][0]
    given = observer.infer_dynamic_shapes(dim_names={"x_0": {0: "x_0_dim_0"}})
    assert given["x_0"] == {0: "x_0_dim_0"}
    assert given["x"] != [{0: "x_0_dim_0"}]


@pytest.mark.parametrize("wrong", [{True}, {None}, {1.5}, 1, [("x",)]])
def test_what_is_neither_name_nor_position_is_no_batch(wrong: Any) -> None:
    with pytest.raises(TypeError, match="Unexpected type"):
        labelled(None, set_batch_dimension_for=wrong)
