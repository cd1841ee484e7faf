"""What a careful reading of the inferred shapes and arguments found wrong, one test each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck import ObserverWarning, make_dynamic_cache
from pytest_exportcheck.observe.observer import InferenceError

from .helpers import DYNAMIC, call, f, module, observe, shapes_of
from .test_hard_cases import verdict

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


@pytest.mark.parametrize("name", ["a", "kw"])
def test_the_name_of_variadic_arguments_is_none_of_theirs(name: str) -> None:
    observer = observe(lambda *a, **kw: a[0], *(call(f(2), f(3), z=f(n)) for n in (3, 4)))
    message = rf"'{name}' is variadic: name what it caught \(a_0, a_1, z\)"
    with pytest.raises(ValueError, match=message):
        observer.infer_dynamic_shapes(set_batch_dimension_for={name})
    with pytest.raises(ValueError, match=message):
        observer.infer_dynamic_shapes(dim_names={name: {0: "n"}})
    with pytest.raises(ValueError, match=message):
        observer.infer_arguments({name: f(3)})
    named = observer.infer_dynamic_shapes(set_batch_dimension_for={"a_1"}, dim_names={1: {-1: "n"}})
    assert named == {"a": ({}, {0: "n"}), "kw": {"z": {0: "z_dim_0"}}}


def test_labels_of_a_cache() -> None:
    def cache(n: int, m: int) -> Any:
        return make_dynamic_cache([(f(2, 1, k, 2), f(2, 1, k, 2)) for k in (n, m)])

    observer = observe(lambda x, cache: x, call(f(2, 3), cache(3, 4)), call(f(2, 4), cache(5, 6)))
    with pytest.raises(
        ValueError, match=r"cache\.layers\.0\.keys axis 2 of size 3 and cache\.layers\.1\.keys"
    ):
        observer.infer_dynamic_shapes(dim_names={"cache": {2: "past"}})
    given = {"cache": {-2: "past"}, "cache.layers.1": {2: "window"}}
    assert observer.infer_dynamic_shapes(dim_names=given)[1] == [{2: "past"}] * 2 + [{2: "window"}] * 2
    with pytest.raises(ValueError, match=r"did you mean 'cache\.layers\.0\.keys'"):
        observer.infer_dynamic_shapes(dim_names={"cache.layers.0.key": {2: "past"}})


# Positions


def exported(observer: Any, model: torch.nn.Module) -> Any:
    """The inferred shapes, which torch.export takes for the inferred arguments."""
    shapes = observer.infer_dynamic_shapes()
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    expected = model(*args, **kwargs)
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*args, **kwargs), expected)
    return shapes


class Middle(torch.nn.Module):
    def forward(self, x: Any, k: Any = 2, z: Any = None, /, *, y: Any = None) -> Any:
        return x * k + (0 if z is None else z) + y


class Last(torch.nn.Module):
    def forward(self, x: Any, k: Any = 2, /, y: Any = None) -> Any:
        return x * k + y


class Variadic(torch.nn.Module):
    def forward(self, x: Any, k: Any = 2, *more: Any, y: Any = None) -> Any:
        return x * k + more[0] + y


@pytest.mark.parametrize(
    ("model", "make", "shapes"),
    [
        (Middle(), lambda t: call(t, 2, t, y=t), {"x": {0: DYNAMIC}, "k": None, "z": {0: DYNAMIC}}),
        (Middle(), lambda t: call(t, 3, None, y=t), {"x": {0: DYNAMIC}, "k": None}),
        (Last(), lambda t: call(t, 2, y=t), {"x": {0: DYNAMIC}}),
        (Variadic(), lambda t: call(t, 2, t, y=t), {"x": {0: DYNAMIC}, "k": None, "more": ({0: DYNAMIC},)}),
    ],
)
def test_a_constant_that_goes_by_position_keeps_its_place(model: Any, make: Any, shapes: Any) -> None:
    observer = observe(model, make(f(3, 4)), make(f(5, 4)))
    assert exported(observer, model) == {**shapes, "y": {0: DYNAMIC}}


def test_a_removed_position_is_its_default() -> None:
    def function(x: Any = None, y: Any = None, /, *, z: Any = None) -> Any:
        return y * z if x is None else x + y

    observer = observe(function, *(call(f(n), f(n), z=f(n)) for n in (3, 4)))
    observer.remove_inputs(["x"])
    assert observer.infer_dynamic_shapes() == {"x": None, "y": {0: DYNAMIC}, "z": {0: DYNAMIC}}
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert args[0] is None
    assert torch.equal(function(*args, **kwargs), args[1] * kwargs["z"])


def test_a_removed_position_without_default_is_said() -> None:
    observer = observe(lambda x, y, /: x, call(f(2), f(2)))
    observer.remove_inputs(["x"])
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        observer.infer_arguments(as_args_kwargs=True)


def test_what_is_left_of_star_args_goes_by_position() -> None:
    observer = observe(lambda x, *args: args[-1], *(call(f(2), f(2), f(n)) for n in (3, 4)))
    observer.remove_inputs(["x", "args_0"])
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        observer.infer_arguments(as_args_kwargs=True)  # no keyword `args_1`


def test_a_keyword_called_like_one_of_star_args_does_not_replace_it() -> None:
    calls = [call(torch.ones(size), args_0=torch.zeros(size)) for size in (2, 3)]
    observer = observe(lambda *args, **kwargs: args[0] - kwargs["args_0"], *calls)
    args, kwargs = observer.infer_arguments(0, as_args_kwargs=True)
    assert torch.equal(args[0], torch.ones(2))
    assert list(kwargs) == ["args_0"]
    assert torch.equal(kwargs["args_0"], torch.zeros(2))


# None that says something

NONE_CALLS = [
    ("x, mask", "x if mask is None else x * mask", "(x,), {'mask': None}"),
    ("mask, x", "x if mask is None else x * mask", "(None, x), {}"),
    ("mask, x, /", "x if mask is None else x * mask", "(None, x), {}"),
    ("x, s=2.0", "x if s is None else x * s", "(x,), {'s': None}"),
    ("x, s=2.0, y=None, /", "(x if s is None else x * s) + y", "(x, None, x), {}"),
    ("x, s=2.0, *more", "(x if s is None else x * s) + more[0]", "(x, None, x), {}"),
    ("x, *more", "(x if more[0] is None else x * 2) + more[1]", "(x, None, x), {}"),
    ("x, **more", "x if 'flag' in more else x * 2", "(x,), {'flag': None}"),
    ("*, x, mask", "x if mask is None else x * mask", "(), {'x': x, 'mask': None}"),
    ("x, items", "x if items is None else x * len(items)", "(x,), {'items': None}"),
]


@pytest.mark.parametrize(("parameters", "body", "made"), NONE_CALLS)
def test_a_none_that_a_call_passes_is_passed_to_the_program(
    tmp_path: Path, parameters: str, body: str, made: str
) -> None:
    model = f"""
        class Net(nn.Module):
            def forward(self, {parameters}):
                return {body}

        def calls():
            return [({made}) for x in (torch.ones(2, 3), torch.ones(4, 3))]
        """
    assert verdict(tmp_path, model, 'calls: "net.py:calls"\n') == "pass"


def test_a_none_in_the_place_of_a_number_is_a_constant_of_the_graph() -> None:
    calls = [call(f(n)) for n in (2, 3)]
    observer = observe(lambda x, s=2.0: x, *(call(*args, s=None) for args, _ in calls))
    assert observer.infer_dynamic_shapes() == {"x": {0: DYNAMIC}, "s": None}
    assert observer.infer_arguments()["s"] is None


@pytest.mark.parametrize("made", [lambda x: (x, None, None), lambda x: (x, x, None), lambda x: (x, None, x)])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_none_among_star_args_keeps_its_place(made: Any, scale: Any) -> None:
    def function(x: Any, *args: Any, s: Any = 1.0) -> Any:
        return x * len(args) * (3 if s is None else s)

    model = module(function)
    observer = observe(model, *(call(*made(f(n)), s=scale) for n in (2, 3)))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert len(args) == 3
    assert torch.equal(model(*args, **kwargs), observer.info.calls[0].outputs)
    assert len(exported(observer, model)["args"]) == 2


# Inputs of a person


def test_inputs_by_position_in_a_dict() -> None:
    observer = observe(lambda x, y: x, *(call(f(2, n), f(n)) for n in (3, 4)))
    x, y = observer.infer_arguments({1: f(9), 0: f(8, 8)})
    assert (x.shape, y.shape) == ((8, 8), (9,))
    with pytest.raises(ValueError, match="given twice"):
        observer.infer_arguments({"x": f(2, 3), 0: f(2, 4)})
    with pytest.raises(ValueError, match="no position 2"):
        observer.infer_arguments({2: f(2)})


@pytest.mark.parametrize(
    ("given", "lost"), [(f(4), "d"), ([f(4)], r"d\.0"), ({"a": f(4), "c": f(4)}, r"d\.c"), (3, "d")]
)
def test_inputs_of_another_structure_are_not_replaced_by_zeros(given: Any, lost: str) -> None:
    observer = observe(lambda d: d["a"], *(call(d={"a": f(n), "b": f(n)}) for n in (2, 3)))
    with pytest.raises(ValueError, match=rf"^{lost} has no place in d .*\(d\.a, d\.b\)"):
        observer.infer_arguments({"d": given})
    assert shapes_of(observer.infer_arguments({"d": {"a": f(9)}})) == {"d": {"a": (9,), "b": (0,)}}


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None


torch.export.register_dataclass(Pair, serialized_type_name="hard_cases_shapes.Pair")


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (lambda n: {"a": f(n)}, lambda n: {"b": f(n)}, r"dict of 'a'\) in call 0; .*dict of 'b'\) in call 1"),
        (
            lambda n: Pair(f(n)),
            lambda n: Pair(f(n), f(n)),
            r"Pair of first\) in .*Pair of first, second\) in",
        ),
    ],
)
def test_names_that_differ_inside_containers_of_one_class_are_said(one: Any, two: Any, message: str) -> None:
    observer = observe(lambda d: 1, call(one(2)), call(two(3)))
    with pytest.raises(InferenceError, match=message):
        observer.infer_dynamic_shapes()


# Stand-ins of a spec

MASKED = """
    class Net(nn.Module):
        def forward(self, x, mask=None):
            return x * 1 if mask is None else x + mask

    def calls():
        made = []
        for n, length in ((2, 3), (5, 3), (4, 3)):
            made.append(((torch.ones(n, length),), {"mask": torch.zeros(n, length)} if n < LIMIT else {}))
        return made
    """


@pytest.mark.parametrize("limit", [5, 6], ids=["one call lacks it", "no call lacks it"])
@pytest.mark.parametrize("dims", ["x_dm_0, 3", "x_dim_1, 3", "x_dm_0, x_dm_0 - x_dm_0 + 3"])
def test_a_misspelt_symbol_of_a_stand_in_is_no_new_one(tmp_path: Path, limit: int, dims: str) -> None:
    observed = 'calls: "net.py:calls"\nvalue_if_missing: {mask: "float32[DIMS] = 0"}\n'
    model = MASKED.replace("LIMIT", str(limit))
    given = verdict(tmp_path, model, observed.replace("DIMS", dims))
    assert given.startswith("observe"), given
    assert "net.yaml:5: unknown dim" in given
    assert "did you mean 'x_dim_0'?" in given
    for right in ("x_dim_0, 3", "rows, 3"):
        assert verdict(tmp_path, model, observed.replace("DIMS", right)) == "pass"


def test_a_symbol_of_a_stand_in_that_has_another_size_is_said(tmp_path: Path) -> None:
    model = """
        class Net(nn.Module):
            def forward(self, x, y, mask=None):
                return x + y.sum() if mask is None else x + mask + y.sum()

        def calls():
            return [
                ((torch.ones(n, 3), torch.ones(k)), {"mask": torch.zeros(n, 3)} if n == 2 else {})
                for n, k in ((2, 3), (3, 4), (5, 2))
            ]
        """
    observed = 'calls: "net.py:calls"\nvalue_if_missing: {mask: "float32[x_dim_0, 3] = 0"}\n'
    assert verdict(tmp_path, model, observed) == "pass"
    given = verdict(tmp_path, model, observed.replace("x_dim_0", "y_dim_0"))
    # The axis of x would be called `y_dim_0`.
    assert given.startswith("observe")
    assert "'y_dim_0', which is 3 in call 0, where mask has 2" in given


@pytest.mark.parametrize("value", [torch.zeros(1, 1), [torch.zeros(1, 1), None], 2])
@pytest.mark.parametrize("make", [lambda x: call(x), lambda x: call(x, None), lambda x: call(x=x)])
def test_what_stands_in_for_an_argument_that_no_call_has(make: Any, value: Any) -> None:
    model = module(lambda x, y=None: x)
    observer = observe(model, make(f(2, 3)), make(f(2, 4)), value_if_missing={"y": value})
    shape = {} if isinstance(value, torch.Tensor) else [{}, None] if isinstance(value, list) else None
    assert observer.infer_dynamic_shapes() == {"x": {1: DYNAMIC}, "y": shape}
    for arguments in (
        observer.infer_arguments(),
        observer.infer_arguments(1),
        observer.infer_arguments((f(5, 5),)),
        observer.infer_arguments(export_safe=True),
    ):
        assert shapes_of(arguments["y"]) == shapes_of(value)


def test_a_stand_in_by_position_that_no_call_has() -> None:
    calls = call(f(2, 3), None), call(f(2, 4), None)
    observer = observe(lambda x, y: x, *calls, value_if_missing={1: torch.zeros(5)})
    assert observer.infer_dynamic_shapes() == ({1: DYNAMIC}, {})
    assert shapes_of(observer.infer_arguments()) == ((2, 3), (5,))


@pytest.mark.parametrize(("stand_in", "expected"), [("0", "pass"), ("1", "eager itself answers differently")])
def test_a_stand_in_of_a_spec_that_no_call_has(tmp_path: Path, stand_in: str, expected: str) -> None:
    model = MASKED.replace("LIMIT", "0")
    observed = f'calls: "net.py:calls"\nvalue_if_missing: {{mask: "float32[x_dim_0, 3] = {stand_in}"}}\n'
    assert expected in verdict(tmp_path, model, observed)
