"""`infer_dynamic_shapes`: return forms, containers, batch dimensions, labels, errors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from pytest_exportcheck import (
    InputObserver,
    ObserverWarning,
    make_dynamic_cache,
    make_encoder_decoder_cache,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

from .helpers import DYNAMIC as D
from .helpers import call, f, module, observe, shapes_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest_exportcheck.ObserverWarning")


def first(x: Any, y: Any = None, *rest: Any, **more: Any) -> Any:
    return x


def xy(x: Any, y: Any = None, z: Any = None) -> Any:
    return x


# forms


def test_positional_tensors_give_a_tuple() -> None:
    observer = observe(
        xy, call(f(5, 6), f(1, 6)), call(f(7, 7), f(1, 7)), call(f(7, 8), f(1, 8)), store_n_calls=3
    )
    assert observer.infer_dynamic_shapes() == ({0: D, 1: D}, {1: D})


def test_keyword_calls_give_a_dict_in_signature_order_whatever_theirs_is() -> None:
    observer = observe(xy, call(y=f(1, 6), x=f(5, 6)), call(x=f(5, 7), y=f(1, 7)))
    assert list(observer.infer_dynamic_shapes().items()) == [("x", {1: D}), ("y", {1: D})]
    assert list(observer.infer_arguments()) == ["x", "y"]


@pytest.mark.parametrize("order", [1, -1])
def test_positional_and_keyword_calls_are_one_in_any_order(order: int) -> None:
    calls = [
        call(f(5, 6)),
        call(x=f(5, 7), y=f(1, 7)),
        call(f(5, 8), f(1, 8)),
        call(f(5, 9), y=f(1, 9)),
    ]
    observer = observe(xy, *calls[::order])
    assert observer.num_obs() == 4
    assert observer.infer_dynamic_shapes() == {"x": {1: D}, "y": {1: D}}
    for candidate in observer.info.inputs:
        assert candidate.n_aligned_tensors == 2
        there = [tensor for tensor in candidate.aligned_flat_list or () if tensor is not None]
        assert len(there) == len(candidate.flat_list) == len(candidate)


def test_only_a_keyword_alternating_with_positions() -> None:
    def forward(x: Any = None, y: Any = None) -> Any:
        return y

    observer = observe(forward, call(y=f(1, 6)), call(f(5, 7), f(1, 7)), call(y=f(1, 8)))
    assert observer.infer_dynamic_shapes() == {"x": {}, "y": {1: D}}


def test_an_argument_that_some_calls_lack() -> None:
    observer = observe(xy, call(x=f(5, 6)), call(x=f(6, 7), y=f(1, 7)), call(x=f(6, 7), y=f(1, 8)))
    assert observer.infer_dynamic_shapes() == {"x": {0: D, 1: D}, "y": {1: D}}


def test_no_call_needs_to_have_all() -> None:
    observer = observe(xy, call(f(2), [f(3)] * 5), call(f(3), [], f(4)))
    assert observer.infer_dynamic_shapes() == ({0: D}, [{}] * 5, {})
    observer = observe(xy, call(f(2), y=f(3)), call(f(3), z=f(4)))
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "y": {}, "z": {}}
    with pytest.warns(ObserverWarning, match="z is not among the inputs"):
        arguments = observer.infer_arguments()
    assert shapes_of(arguments) == {"x": (2,), "y": (3,), "z": (4,)}


def test_variadic_arguments_are_grouped_as_torch_export_groups_them() -> None:
    def forward(a: Any, *args: Any, **kwargs: Any) -> Any:
        return a + args[0] + args[1] + kwargs["x"] + kwargs["y"]

    def inputs(n: int) -> Any:
        return call(f(2, n), f(2, n), f(1, n), x=f(2, n), y=f(1, n))

    shapes = observe(forward, inputs(4), inputs(5)).infer_dynamic_shapes()
    assert shapes == {
        "a": {1: D},
        "args": ({1: D}, {1: D}),
        "kwargs": {"x": {1: D}, "y": {1: D}},
    }
    observer = observe(lambda x, **kwargs: x, call(x=f(2), y=f(2, 3)), call(x=f(2), y=f(2, 4)))
    assert observer.infer_dynamic_shapes() == {"x": {}, "kwargs": {"y": {1: D}}}
    additional = torch.export.AdditionalInputs()
    for n in (4, 5):
        args, kwargs = inputs(n)
        additional.add(args, kwargs)

    args, kwargs = inputs(4)
    theirs = additional.dynamic_shapes(module(forward), args, kwargs)
    assert list(theirs) == list(shapes)
    assert [len(theirs[name]) for name in ("args", "kwargs")] == [2, 2]


def test_only_variadic_positions() -> None:
    observer = observe(lambda *args: args[0], call(f(2, 3), f(3)), call(f(2, 4), f(3)))
    assert observer.infer_dynamic_shapes() == {"args": ({1: D}, {})}
    assert shapes_of(observer.infer_arguments()) == ((2, 3), (3,))


def test_a_positional_only_parameter_and_a_keyword() -> None:
    def forward(x: Any, /, y: Any) -> Any:
        return x + y

    observer = observe(forward, call(f(2, 3), y=f(2, 3)), call(f(2, 4), y=f(2, 4)))
    shapes = observer.infer_dynamic_shapes()
    assert shapes == {"x": {1: D}, "y": {1: D}}
    with pytest.raises(RuntimeError, match="positional-only"):
        observer.infer_arguments()
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    assert (shapes_of(args), shapes_of(kwargs)) == (((2, 3),), {"y": (2, 3)})

    class Net(torch.nn.Module):
        def forward(self, x: Any, /, y: Any) -> Any:
            return x + y

    torch.export.export(Net(), args, kwargs, dynamic_shapes=shapes)


# containers

Pair = namedtuple("Pair", "left right")


def nested(x: Any, y: Any) -> Any:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(y) if isinstance(leaf, torch.Tensor)]
    return x + sum(leaf.sum() for leaf in leaves)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda n: [f(1, n), [f(1, n)]], [{1: D}, [{1: D}]]),
        (lambda n: (f(1, n), f(2)), ({1: D}, {})),
        (lambda n: {"b": f(1, n), "a": f(2)}, {"b": {1: D}, "a": {}}),
        (lambda n: Pair(f(1, n), f(2)), Pair({1: D}, {})),
        (lambda n: OrderedDict(b=f(1, n), a=f(2)), OrderedDict(b={1: D}, a={})),
        (lambda n: defaultdict(list, b=f(1, n)), {"b": {1: D}}),
        (lambda n: {0: f(1, n), 1: [f(n)]}, {0: {1: D}, 1: [{0: D}]}),
        (lambda n: [f(1, n), None, f(2)], [{1: D}, None, {}]),
        (lambda n: [None, {"k": (None, f(1, n))}], [None, {"k": (None, {1: D})}]),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_containers_are_those_that_export_takes(make: Any, expected: Any, keyword: bool) -> None:
    class Net(torch.nn.Module):
        forward = staticmethod(nested)

    def given(n: int) -> Any:
        return call(x=f(n + 1, 6), y=make(n)) if keyword else call(f(n + 1, 6), make(n))

    observer = observe(nested, given(3), given(4))
    shapes = observer.infer_dynamic_shapes()
    found = shapes["y"] if keyword else shapes[1]
    assert found == expected
    assert type(found) is (type(expected) if type(make(2)) is not defaultdict else defaultdict)
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)
    program = torch.export.export(Net(), args, kwargs, dynamic_shapes=shapes)
    args, kwargs = given(7)
    torch.testing.assert_close(program.module()(*args, **kwargs), nested(*args, **kwargs))


def test_nested_list_in_a_list() -> None:
    observer = observe(nested, call(f(5, 6), [f(5, 6), [f(1, 6)]]), call(f(7, 7), [f(5, 7), [f(1, 7)]]))
    assert observer.infer_dynamic_shapes() == ({0: D, 1: D}, [{1: D}, [{1: D}]])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_none_leaf_does_not_move_the_shapes_of_later_arguments(place: int) -> None:
    def items(n: int) -> list[Any]:
        made: list[Any] = [f(n), f(2)]
        made.insert(place, None)
        return made

    observer = observe(xy, call(items(3), f(3, 4)), call(items(5), f(5, 6)))
    shapes = observer.infer_dynamic_shapes()
    wanted: list[Any] = [{0: D}, {}]
    wanted.insert(place, None)
    assert shapes == (wanted, {0: D, 1: D})


def test_what_is_none_in_one_call_is_inferred_from_another() -> None:
    observer = observe(xy, call([f(3), None], f(2)), call([None, f(4)], f(3)), call([f(5), f(5)], f(3)))
    assert observer.infer_dynamic_shapes() == ([{0: D}, {0: D}], {0: D})
    observer = observe(xy, call({"a": [f(3)], "b": None}), call({"a": None, "b": (f(4), f(4))}))
    assert observer.infer_dynamic_shapes() == ({"a": [{}], "b": ({}, {})},)


def test_none_in_a_position_stays_in_its_place() -> None:
    def forward(x: Any, y: Any, z: Any) -> Any:
        return x

    observer = observe(forward, call(f(5, 6), None, f(3)), call(f(5, 7), None, f(4)))
    assert observer.infer_dynamic_shapes() == ({1: D}, None, {0: D})
    assert shapes_of(observer.infer_arguments()) == ((5, 6), None, (3,))


class Box:
    """A class of the user's, registered as a pytree node with no context."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


@pytest.fixture
def _box() -> Any:
    register_class_flattening(
        Box,
        lambda box: ([box.left, box.right], None),
        lambda values, context: Box(*values),
        lambda box: ([(torch.utils._pytree.GetAttrKey(n), getattr(box, n)) for n in ("left", "right")], None),
    )
    yield
    unregister_class_flattening(Box)


@pytest.mark.usefixtures("_box")
@pytest.mark.parametrize("optional", [False, True])
def test_a_registered_class_gives_a_list(optional: bool) -> None:
    def forward(x: Any, box: Any = None) -> Any:
        return x if box is None else x + box.left + box.right

    calls = [call(f(2, 3), Box(f(2, 3), f(1, 3))), call(f(2, 4), Box(f(2, 4), f(1, 4)))]
    observer = observe(forward, *([call(f(2, 5))] if optional else []), *calls)
    shapes = observer.infer_dynamic_shapes()
    assert shapes == ({1: D}, [{1: D}, {1: D}])

    class Net(torch.nn.Module):
        def forward(self, x: Any, box: Any = None) -> Any:
            return x + box.left + box.right

    torch.export.export(Net(), observer.infer_arguments(), dynamic_shapes=shapes)


def test_caches_give_one_shape_per_leaf() -> None:
    def pair(n: int) -> Any:
        return f(2, 3, n, 4), f(2, 3, n, 4)

    observer = observe(
        lambda x, cache=None: x,
        call(x=f(2), cache=make_dynamic_cache([pair(3), pair(3)])),
        call(x=f(2), cache=make_dynamic_cache([pair(5), pair(5)])),
    )
    assert observer.infer_dynamic_shapes() == {"x": {}, "cache": [{2: D}] * 4}
    forced = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
    assert forced == {"x": {0: D}, "cache": [{0: D, 2: D}] * 4}
    observer = observe(
        lambda x, cache: x,
        *(
            call(
                f(2), make_encoder_decoder_cache(make_dynamic_cache([pair(n)]), make_dynamic_cache([pair(6)]))
            )
            for n in (3, 4)
        ),
    )
    assert observer.infer_dynamic_shapes() == ({}, [[{2: D}] * 2, [{}] * 2])


# constants


@pytest.mark.parametrize(
    ("name", "value"), [("add", False), ("option", "b"), ("scale", 2.0), ("count", 3), ("free", 2.0)]
)
def test_a_constant_that_is_not_the_default_is_kept(name: str, value: Any) -> None:
    class Net(torch.nn.Module):
        def forward(
            self, x: Any, y: Any, add: bool = True, option: str = "a", scale: float = 1.0, count: int = 1,
            free: Any = None,
        ) -> Any:  # fmt: skip
            out = x + y if add and option == "a" else x - y
            return out * scale * count * (1.0 if free is None else free)

    observer = observe(Net(), *(call(x=f(2, n), y=f(1, n), **{name: value}) for n in (3, 4)))
    shapes, arguments = observer.infer_dynamic_shapes(), observer.infer_arguments()
    assert shapes == {"x": {1: D}, "y": {1: D}, name: None}
    assert arguments[name] == value
    assert len(arguments) == 3
    program = torch.export.export(Net(), (), kwargs=arguments, dynamic_shapes=shapes)
    again = {"x": f(2, 7), "y": f(1, 7), name: value}
    torch.testing.assert_close(program.module()(**again), Net()(**again))


def test_a_constant_that_is_the_default_says_nothing() -> None:
    def forward(x: Any, add: bool = True, option: str = "a", none: Any = None) -> Any:
        return x

    observer = observe(forward, call(f(5), add=False, none=None), call(f(6), add=False, option="a"))
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "add": None}
    assert list(observer.infer_arguments()) == ["x", "add"]


def test_none_where_the_default_is_something_else_is_a_constant() -> None:
    observer = observe(lambda x, scale=1.0: x, call(x=f(2), scale=None), call(x=f(3), scale=None))
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "scale": None}
    assert observer.infer_arguments()["scale"] is None


def test_constants_in_every_place() -> None:
    def forward(n: int, x: Any, items: Any, **more: Any) -> Any:
        return x

    observer = observe(
        forward, call(2, f(3), [f(3), 4, "a"], extra=1.5), call(2, f(4), [f(4), 4, "a"], extra=1.5)
    )
    assert observer.infer_dynamic_shapes() == {
        "n": None, "x": {0: D}, "items": [{0: D}, None, None], "more": {"extra": None},
    }  # fmt: skip
    arguments = observer.infer_arguments()
    assert (arguments["n"], arguments["items"][1:], arguments["extra"]) == (2, [4, "a"], 1.5)
    positional = observe(lambda n, x: x, call(2, f(3)), call(2, f(4)))
    assert positional.infer_dynamic_shapes() == (None, {0: D})


@dataclasses.dataclass
class Settings:
    width: int = 3


@pytest.mark.parametrize(
    ("value", "kind"), [(np.array([1, 2]), "numpy.ndarray"), (Settings(), "Settings"), (object, "type")]
)
def test_what_export_cannot_take_is_kept_and_named(value: Any, kind: str) -> None:
    observer = observe(lambda x, cfg: x, call(x=f(3), cfg=value), call(x=f(4), cfg=value))
    with pytest.warns(ObserverWarning, match=rf"argument cfg is a .*{kind}"):
        shapes = observer.infer_dynamic_shapes()
    assert shapes == {"x": {0: D}, "cfg": None}
    assert "cfg" in observer.infer_arguments()


@pytest.mark.parametrize(
    "calls",
    [
        [call(x=f(2), y=2.0), call(x=f(2), y=3.0)],
        [call(x=f(2), y="a"), call(x=f(2), y="b")],
        [call(x=f(2), y=2.0), call(x=f(2))],
        [call(x=f(2), other=2), call(x=f(2), other=3)],
        [call(f(2), 4), call(f(2), 1)],
        [call(f(2), [f(2), 4]), call(f(2), [f(2), 1])],
    ],
)
def test_constants_that_differ(calls: Any) -> None:
    observer = observe(first, *calls)
    for infer in (observer.infer_dynamic_shapes, observer.infer_arguments):
        with pytest.raises(RuntimeError, match="Two calls were made with different constant values") as error:
            infer()
        assert "call 0" in str(error.value)
        assert "argument y" in str(error.value) or "argument other" in str(error.value)


def test_a_constant_that_differs_can_be_left_out() -> None:
    observer = observe(xy, call(x=f(2), y=4), call(x=f(3), y=1))
    observer.remove_inputs(["y"])
    assert observer.infer_dynamic_shapes() == {"x": {0: D}}
    assert list(observer.infer_arguments()) == ["x"]


# batch dimensions and labels


def test_batch_dimensions() -> None:
    observer = observe(xy, call(f(2, 3), f(2), f(2)), call(f(2, 4), f(2), f(2)))
    assert observer.infer_dynamic_shapes(True) == ({0: D, 1: D}, {0: D}, {0: D})
    assert observer.infer_dynamic_shapes({0, "z"}) == ({0: D, 1: D}, {}, {0: D})
    assert observer.infer_dynamic_shapes(set_batch_dimension_for={"x", "z"}) == ({0: D, 1: D}, {}, {0: D})


def test_given_labels() -> None:
    observer = observe(xy, call(f(5, 6), f(1, 6)), call(f(7, 7), f(1, 7)))
    expected = ({0: "batch", 1: "seq"}, {1: "y_dim_1"})
    assert observer.infer_dynamic_shapes(dim_names={0: {0: "batch", 1: "seq"}}) == expected
    assert observer.infer_dynamic_shapes(dim_names={"x": {0: "batch", 1: "seq"}}) == expected
    seq = torch.export.Dim("seq")
    assert observer.infer_dynamic_shapes(dim_names={"x": {1: seq}})[0] == {0: "x_dim_0", 1: seq}


def test_labels_of_leaves_are_their_own() -> None:
    observer = observe(xy, call(x=[f(2, 3), f(3)], y=f(4)), call(x=[f(3, 3), f(5)], y=f(4)))
    assert observer.infer_dynamic_shapes(dim_names={"y": {}}) == {
        "x": [{0: "x_0_dim_0"}, {0: "x_1_dim_0"}],
        "y": {},
    }


def test_labels_by_sizes() -> None:
    observer = observe(xy, call(f(5, 6), f(5, 9), f(6)), call(f(6, 8), f(6, 11), f(8)))
    x, y, z = observer.infer_dynamic_shapes(dim_names=True)
    assert x[0] == y[0] != x[1] != y[1]
    assert x[1] == z[0]
    assert all(isinstance(label, str) for shape in (x, y, z) for label in shape.values())


def test_labels_of_transformers() -> None:
    observer = observe(
        lambda input_ids, attention_mask: input_ids,
        call(input_ids=f(2, 6), attention_mask=f(2, 9)),
        call(input_ids=f(2, 7), attention_mask=f(2, 11)),
    )
    assert observer.infer_dynamic_shapes(set_batch_dimension_for=True, dim_names=True) == {
        "input_ids": {0: "batch_size", 1: "sequence_length"},
        "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
    }


def test_a_length_equal_to_the_batch_is_no_batch() -> None:
    observer = observe(lambda input_ids: input_ids, call(input_ids=f(2, 2)), call(input_ids=f(3, 3)))
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True, dim_names=True)
    assert shapes == {"input_ids": {0: "batch_size", 1: "sequence_length"}}


# errors and warnings


def test_nothing_was_captured() -> None:
    for infer in (InputObserver().infer_dynamic_shapes, InputObserver().infer_arguments):
        with pytest.raises(RuntimeError, match=r"No inputs were captured\."):
            infer()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([f(2)], [f(2), f(3)]),
        ((f(2),), [f(2)]),
        ({"a": f(2), "b": f(2)}, {"a": f(2), "c": f(2)}),
        ([f(2), [f(2)]], [f(2), [f(2), f(2)]]),
        ([f(2)], f(2)),
    ],
)
def test_a_container_that_changes(one: Any, other: Any) -> None:
    with pytest.raises(RuntimeError, match="Named argument 'y' has"):
        observe(xy, call(x=f(2), y=one), call(x=f(2), y=other)).infer_dynamic_shapes()
    with pytest.raises(RuntimeError, match="Positional argument 1 has"):
        observe(xy, call(f(2), one), call(f(2), other)).infer_dynamic_shapes()


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (f(2, 2), "rank"),
        (torch.zeros(2, dtype=torch.int64), "dtype"),
        (torch.zeros(2, device="meta"), "device"),
    ],
)
@pytest.mark.parametrize("place", ["y", "y.0"])
def test_what_no_graph_can_serve_is_named(other: torch.Tensor, what: str, place: str) -> None:
    def wrap(value: Any) -> Any:
        return [value] if place == "y.0" else value

    observer = observe(xy, call(f(2), wrap(f(2))), call(f(3), wrap(other)))
    for infer in (observer.infer_dynamic_shapes, observer.infer_arguments):
        with pytest.raises(RuntimeError, match=rf"argument {place} changes its {what}"):
            infer()


def test_one_call_or_sizes_that_never_differ_are_said_to_be_static() -> None:
    with pytest.warns(ObserverWarning, match="only one call was observed: every axis is static"):
        assert observe(xy, call(f(2, 3))).infer_dynamic_shapes() == ({},)
    with pytest.warns(ObserverWarning, match="no size differs between 2 calls") as caught:
        assert observe(xy, call(f(2, 3)), call(f(2, 3))).infer_dynamic_shapes() == ({},)
    assert caught[0].filename == __file__
    with pytest.warns(ObserverWarning, match="x axis 0 had size 1 in every call"):
        observe(xy, call(f(1, 3)), call(f(1, 4))).infer_dynamic_shapes()


def test_the_block_of_the_flattening_functions_may_be_outside() -> None:
    with register_flattening_functions(patch_transformers=True) as replace:
        cache = make_dynamic_cache([(f(1, 1, n, 4), f(1, 1, n, 4)) for n in (3, 3)])
        observer = observe(lambda cache: cache.layers[0].keys, call(cache=replace(cache)))
        assert observer.infer_dynamic_shapes(set_batch_dimension_for=True) == {"cache": [{0: D}] * 4}
