"""Properties that hold for any signature, cache, golden and tolerance, on generated ones.

The examples are derived from the tests' names (`derandomize`): a run is as repeatable as any other test's.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pytest_exportcheck.checks.compare import Tolerances, compare_leaf, table
from pytest_exportcheck.checks.golden import GoldenGraph, parse_golden, render_golden
from pytest_exportcheck.dims import DimExpr, parse_dim
from pytest_exportcheck.keypaths import key_text, split_path, text_key
from pytest_exportcheck.observe import (
    ConstantLeaf,
    GraphShapes,
    ObserverWarning,
    TensorLeaf,
    infer_shapes,
    resize_arguments,
)
from pytest_exportcheck.pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from pytest_exportcheck.pytrees.caches import context_from_json, context_to_json
from pytest_exportcheck.pytrees.paths import same_constant

from .helpers import record, rows
from .test_caches import assert_same, state


def _settings(examples: int) -> settings:
    return settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(autouse=True, scope="module")
def flattening() -> Iterator[None]:
    with register_flattening_functions():
        yield


# signatures and calls of them

Pair = namedtuple("Pair", "left right")

#: Keys of dicts -> how a path shows them.
KEYS = {"k": "k", "m": "m", "dotted.key": "dotted\\.key", "0": "\\0", "back\\": "back\\\\"}
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16]


@dataclass(frozen=True)
class Array:
    """A tensor; a dim is a size, or the name of a symbol whose size differs between any two calls."""

    dtype: torch.dtype
    dims: tuple[int | str, ...]
    fades: bool


@dataclass(frozen=True)
class Constant:
    value: Any


@dataclass(frozen=True)
class Box:
    """A container; `fades`: ``None`` in the calls that lack part of the argument."""

    kind: str
    children: tuple[tuple[str, Any], ...]
    fades: bool


@dataclass(frozen=True)
class Parameter:
    """A parameter; `lacking`: calls in which whatever fades is ``None``, or left out (`omitted`)."""

    name: str
    kind: Any
    node: Array | Constant | Box
    default: Any
    lacking: frozenset[int]
    omitted: bool


@dataclass(frozen=True)
class Case:
    parameters: tuple[Parameter, ...]
    sizes: dict[str, list[int]]  # of a symbol, by call
    count: int

    @property
    def signature(self) -> inspect.Signature:
        return inspect.Signature(
            [inspect.Parameter(p.name, p.kind, default=p.default) for p in self.parameters]
        )

    def arguments(self, call: int, keys_in_order: bool) -> dict[str, Any]:
        """By name; an omitted argument is not in it. The keys of dicts come in another order in each call."""
        made = {}
        for parameter in self.parameters:
            lacks = call in parameter.lacking
            if lacks and parameter.omitted and parameter.default is not inspect.Parameter.empty:
                continue
            made[parameter.name] = self._value(parameter.node, call, lacks, keys_in_order)
        return made

    def _value(self, node: Any, call: int, lacks: bool, keys_in_order: bool) -> Any:
        if isinstance(node, Constant):
            return node.value
        if lacks and node.fades:
            return None
        if isinstance(node, Array):
            shape = [dim if isinstance(dim, int) else self.sizes[dim][call] for dim in node.dims]
            return torch.arange(math.prod(shape)).reshape(shape).to(node.dtype)
        items = [(key, self._value(child, call, lacks, keys_in_order)) for key, child in node.children]
        if node.kind == "dict":
            return dict(items if keys_in_order or call % 2 else items[::-1])
        values = [value for _, value in items]
        return Pair(*values) if node.kind == "Pair" else (tuple(values) if node.kind == "tuple" else values)

    def expected(self) -> dict[str, Any]:
        """Path -> ``(dtype, sizes with None for a dynamic axis)``, or a `Constant`."""
        found: dict[str, Any] = {}

        def visit(node: Any, path: str) -> None:
            if isinstance(node, Box):
                for key, child in node.children:
                    visit(child, f"{path}.{KEYS[key] if node.kind == 'dict' else key}")
            elif isinstance(node, Array):
                found[path] = (node.dtype, tuple(d if isinstance(d, int) else None for d in node.dims))
            else:
                found[path] = node

        for parameter in self.parameters:
            visit(parameter.node, parameter.name)
            node = found.get(parameter.name)
            # An argument that is always what it is by default says nothing about the graph.
            if isinstance(node, Constant) and (
                node.value is None or same_constant(node.value, parameter.default)
            ):
                del found[parameter.name]
        return found


CONSTANTS = st.builds(
    Constant, st.sampled_from([None, True, False, 0, 3, -1, 0.5, float("nan"), float("inf"), "text", ""])
)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dims = draw(st.lists(st.one_of(st.integers(0, 4), st.sampled_from("abc")), max_size=3))
    return Array(draw(st.sampled_from(DTYPES)), tuple(dims), draw(st.booleans()))


def _has_array(node: Any) -> bool:
    return isinstance(node, Array) or (isinstance(node, Box) and any(_has_array(c) for _, c in node.children))


@st.composite
def nodes(draw: st.DrawFn, depth: int) -> Any:
    which = draw(
        st.sampled_from(["array", "array", "constant", "box", "box"] if depth else ["array", "constant"])
    )
    if which == "array":
        return draw(arrays())
    if which == "constant":
        return draw(CONSTANTS)
    kind = draw(st.sampled_from(["list", "tuple", "dict", "Pair"]))
    if kind == "Pair":
        keys = ["left", "right"]
    elif kind == "dict":
        keys = draw(st.lists(st.sampled_from(list(KEYS)), max_size=3, unique=True))
    else:
        keys = [str(k) for k in range(draw(st.integers(0, 3)))]
    children = tuple((key, draw(nodes(depth - 1))) for key in keys)
    # A container of constants that is there in one call only is another graph, not a missing argument.
    return Box(kind, children, any(_has_array(child) for _, child in children) and draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(2, 4))
    kinds = inspect.Parameter
    parameters = []
    for position in range(draw(st.integers(1, 4))):
        node = draw(nodes(3))
        kind = draw(st.sampled_from([kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY]))
        default: Any = kinds.empty
        if kind is not kinds.POSITIONAL_ONLY and draw(st.booleans()):
            default = None
        # The first call has everything, and whatever varies is there in two calls.
        lacking = frozenset(draw(st.lists(st.integers(1, count - 1), max_size=count - 2, unique=True)))
        omitted = draw(st.booleans())
        if isinstance(node, Constant):
            if draw(st.booleans()) and kind is not kinds.POSITIONAL_ONLY:
                default = node.value
            else:
                omitted = False
        elif not node.fades:
            omitted = False
        parameters.append(Parameter(f"p{position}", kind, node, default, lacking, omitted))
    parameters.sort(key=lambda p: (p.kind, p.kind is not kinds.KEYWORD_ONLY and p.default is not kinds.empty))
    sizes = {
        name: draw(st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True)) for name in "abc"
    }
    return Case(tuple(parameters), sizes, count)


def _passed(
    data: st.DataObject, case: Case, arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, some by position and some by name, in any order."""
    args = []
    rest = dict(arguments)
    for parameter in case.parameters:
        by_position = parameter.kind is not parameter.kind.KEYWORD_ONLY and parameter.name in rest
        if not by_position or (
            parameter.kind is not parameter.kind.POSITIONAL_ONLY and not data.draw(st.booleans())
        ):
            break
        args.append(rest.pop(parameter.name))
    names = data.draw(st.permutations(list(rest)))
    return tuple(args), {name: rest[name] for name in names}


def _infer(
    data: st.DataObject, case: Case, order: Sequence[int], keys_in_order: bool = False
) -> tuple[GraphShapes, Any]:
    def function(*args: Any, **kwargs: Any) -> None:
        return None

    function.__signature__ = case.signature  # type: ignore[attr-defined]
    observer = record(function, *(_passed(data, case, case.arguments(call, keys_in_order)) for call in order))
    signature = observer.info.signature
    assert signature is not None
    assert observer.info.lost == 0
    shapes = infer_shapes(observer.info.calls, signature_order=signature.names, defaults=signature.defaults)
    return shapes, observer


def _found(shapes: GraphShapes) -> dict[str, Any]:
    return {
        path: Constant(leaf.value)
        if isinstance(leaf, ConstantLeaf)
        else (
            getattr(torch, leaf.dtype),
            tuple(None if isinstance(dim, DimExpr) else dim for dim in leaf.dims),
        )
        for path, leaf in shapes.leaves.items()
    }


def _axes_by_leaf(shapes: Any) -> list[dict[int, Any]]:
    """``{axis: dim}`` of every leaf that has a dynamic axis."""
    hint = type(torch.export.Dim.DYNAMIC)
    if isinstance(shapes, dict) and any(isinstance(dim, hint) for dim in shapes.values()):
        return [shapes]
    inner = shapes.values() if isinstance(shapes, dict) else shapes or ()
    return [leaf for shape in inner for leaf in _axes_by_leaf(shape)]


@_settings(100)
@given(cases(), st.data())
def test_what_is_inferred_is_what_was_put_in(case: Case, data: st.DataObject) -> None:
    shapes, observer = _infer(data, case, range(case.count))
    found, expected = _found(shapes), case.expected()
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        if isinstance(leaf, Constant):
            assert isinstance(found[path], Constant)
            assert same_constant(found[path].value, leaf.value), path
        else:
            assert found[path] == leaf, path
    for call in observer.info.calls:
        for path, leaf in call.leaves().items():
            if isinstance(leaf, torch.Tensor):
                assert shapes.dims(path, shapes.sizes[call.index]) == tuple(leaf.shape)
    if any(not isinstance(leaf, Constant) for leaf in expected.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ObserverWarning)  # axes of size 1
            entries = _axes_by_leaf(observer.infer_dynamic_shapes())
        dynamic = [leaf for leaf in expected.values() if not isinstance(leaf, Constant) and None in leaf[1]]
        assert len(entries) == len(dynamic)
        assert sum(map(len, entries)) == sum(leaf[1].count(None) for leaf in dynamic)


@_settings(60)
@given(cases(), st.data())
def test_neither_the_order_of_calls_nor_the_way_of_passing_matters(case: Case, data: st.DataObject) -> None:
    # Symbols are named after the first leaf that has them: the order of the keys of a dict is part of that.
    first, _ = _infer(data, case, range(case.count), keys_in_order=True)
    second, _ = _infer(data, case, data.draw(st.permutations(range(case.count))), keys_in_order=True)
    assert rows(second) == rows(first)
    assert second.containers == first.containers


# resizing


def _storages(value: Any) -> list[int]:
    leaves = _pytree.tree_leaves(value)
    return [t.untyped_storage().data_ptr() for t in leaves if isinstance(t, torch.Tensor) and t.numel()]


@_settings(80)
@given(cases(), st.data())
def test_resizing_gives_exactly_the_sizes_that_were_asked_for(case: Case, data: st.DataObject) -> None:
    shapes, observer = _infer(data, case, range(case.count))
    call = observer.info.calls[0]
    sizes = {name: data.draw(st.integers(0, 12), label=name) for name in shapes.symbols}
    # `a - 1` has no size for a = 0.
    assume(all(min(shapes.dims(leaf.path, sizes), default=0) >= 0 for leaf in shapes.tensors()))
    before = {p: clone_tree(leaf) for p, leaf in call.leaves().items()}
    resized = resize_arguments(call.arguments, shapes, sizes, observer.info.calls)
    assert all(same_constant(leaf, before[p]) for p, leaf in call.leaves().items())
    old, new = call.leaves(), {p: v for n, a in resized.items() for p, v in flatten_with_paths(a, n)}
    assert list(new) == list(old)
    assert _pytree.tree_structure(resized) == _pytree.tree_structure(call.arguments)
    for path, leaf in new.items():
        if not isinstance(leaf, torch.Tensor):
            assert same_constant(leaf, old[path])
            continue
        assert leaf.dtype == old[path].dtype
        wanted = shapes.leaves[path]
        assert isinstance(wanted, TensorLeaf)
        assert tuple(leaf.shape) == shapes.dims(path, sizes)
        if old[path].numel():
            assert set(leaf.flatten().tolist()) <= set(old[path].flatten().tolist()), "values stay valid"
        if leaf.shape == old[path].shape:
            assert torch.equal(leaf, old[path])
    memory = _storages(resized)
    assert len(set(memory)) == len(memory)
    assert not set(memory) & set(_storages([c.arguments for c in observer.info.calls]))


# caches


@st.composite
def layer_caches(draw: st.DrawFn, kinds: Sequence[str] = ("dynamic", "sliding", "mixed", "static")) -> Any:
    kind = draw(st.sampled_from(list(kinds)))
    count = draw(st.integers(0, 4))
    batch, heads, size = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    # Several updates: the counter of a sliding layer gets ahead of the length of its keys.
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    if kind == "static":
        config = LlamaConfig(num_hidden_layers=count)
        cache: Any = StaticCache(config=config, max_cache_len=sum(lengths) + draw(st.integers(1, 3)))
    else:
        cache = DynamicCache()
        for _ in range(count):
            sliding = kind == "sliding" or (kind == "mixed" and draw(st.booleans()))
            window = draw(st.integers(2, 6))
            cache.layers.append(
                DynamicSlidingWindowLayer(sliding_window=window) if sliding else DynamicLayer()
            )
    for length in lengths:
        for layer in cache.layers:
            layer.update(*(torch.rand(batch, heads, length, size).to(dtype) for _ in range(2)))
    return cache


CACHES = st.one_of(layer_caches(), st.builds(EncoderDecoderCache, layer_caches(), layer_caches()))


def _parts(cache: Any) -> list[Any]:
    return (
        [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    )


def _described(cache: Any) -> list[Any]:
    return [
        (
            type(part),
            [
                (
                    type(layer),
                    getattr(layer, "sliding_window", None),
                    getattr(layer, "max_cache_len", None),
                    layer.is_initialized,
                )
                for layer in part.layers
            ],
        )
        for part in _parts(cache)
    ]


@_settings(100)
@given(CACHES)
def test_a_cache_comes_back_as_it_was(cache: Any) -> None:
    leaves, spec = _pytree.tree_flatten(cache)
    again = _pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(cache)
    assert _described(again) == _described(cache)
    again_leaves, again_spec = _pytree.tree_flatten(again)
    assert again_spec == spec
    assert [id(leaf) for leaf in again_leaves] == [id(leaf) for leaf in leaves]
    for part, twin in zip(_parts(cache), _parts(again), strict=True):
        for layer, copied in zip(part.layers, twin.layers, strict=True):
            assert vars(copied).keys() == vars(layer).keys()
            assert getattr(copied, "dtype", None) == getattr(layer, "dtype", None)
    assert context_from_json(context_to_json(spec.context)) == spec.context
    assert len({path for path, _ in flatten_with_paths(cache)}) == len(leaves)


@_settings(60)
@given(CACHES)
def test_a_clone_of_a_cache_keeps_its_counters_and_shares_no_memory(cache: Any) -> None:
    clone = clone_tree({"cache": cache})["cache"]
    assert_same(state(clone), state(cache))
    memory = _storages(clone)
    assert len(set(memory)) == len(memory)
    assert not set(memory) & set(_storages(cache))
    before = state(clone_tree(cache))
    for part in _parts(clone):
        for layer in part.layers:
            if layer.is_initialized and layer.keys.numel() and isinstance(layer, DynamicLayer):
                layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
    assert_same(state(cache), before)


# goldens

NAME_PARTS = st.one_of(
    st.sampled_from(["layers", "0", "1", "keys", "values", "key", "value", "yes", "null", "1e3"]),
    st.sampled_from(["layer 0", "layers 0-1", "\\layers 0", "\\", "a\\", "a\\.b", "\\\\", "00"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=".\\"), max_size=6),
)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)

DIMS = st.one_of(
    st.integers(0, 10**6),
    st.builds(
        DimExpr,
        st.lists(st.tuples(NAMES, st.sampled_from([1, -1])), min_size=1, max_size=3).map(tuple),
        st.integers(-9, 9),
    ),
)

VALUES = st.one_of(
    st.builds(
        lambda dtype, dims: f"{dtype}[{', '.join(map(str, dims))}]",
        st.sampled_from(["float32", "int64", "bool", "bfloat16"]),
        st.lists(DIMS, max_size=4),
    ),
    st.just("none"),
    st.builds(
        lambda value: f"{type(value).__name__} = {value!r}",
        st.one_of(
            st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=["Cs"]))
        ),
    ),
)


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for part, value in tree.items():
        if isinstance(value, str):
            yield prefix + part, value
        else:
            yield from _paths(value, f"{prefix}{part}.")


TREES = st.dictionaries(
    NAMES,
    st.recursive(
        VALUES, lambda inner: st.dictionaries(NAME_PARTS, inner, min_size=1, max_size=3), max_leaves=8
    ),
    min_size=1,
    max_size=3,
)


@_settings(100)
@given(DIMS)
def test_a_dimension_reads_back(dim: int | DimExpr) -> None:
    assert parse_dim(str(dim)) == dim


@_settings(100)
@given(
    st.dictionaries(
        NAMES,
        st.builds(
            lambda tree, containers: GoldenGraph(dict(_paths(tree)), containers),
            TREES,
            st.dictionaries(NAMES, st.sampled_from(["tuple", "dict", "DynamicCache", "namedtuple a.b:C.D"])),
        ),
        min_size=1,
        max_size=2,
    ),
    st.booleans(),
)
def test_a_golden_reads_back(graphs: dict[str | None, GoldenGraph], several: bool) -> None:
    if not several:
        graphs = {None: next(iter(graphs.values()))}
    assert parse_golden(render_golden(graphs, "shapes.yaml", "spec.yaml")) == graphs


ANY_KEYS = st.one_of(
    st.text(".\\0-1e:layers ", max_size=6),
    st.sampled_from(["layers", "layers 0", "layer 1", "layers 0-1", "\\layers 0", "1", "True", "1.5"]),
    st.integers(-2, 12),
    st.sampled_from([True, None, 1.5, (1, "a"), b"b"]),
)
ANY_TREES = st.dictionaries(
    NAMES,
    st.recursive(
        st.just("int64[2]"),
        lambda inner: (
            st.dictionaries(ANY_KEYS, inner, min_size=1, max_size=4)
            | st.lists(inner, min_size=1, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=12,
    ),
    min_size=1,
    max_size=2,
)


@_settings(300)
@given(ANY_TREES)
def test_two_leaves_never_share_a_path_nor_a_line_of_a_golden(tree: dict[str, Any]) -> None:
    pairs = [pair for name, value in tree.items() for pair in flatten_with_paths(value, name)]
    inputs = {path: f"int64[{position}]" for position, (path, _) in enumerate(pairs)}
    assert len(inputs) == len(pairs) == len(_pytree.tree_leaves(tree))
    assert parse_golden(render_golden({None: GoldenGraph(inputs)}, "a.yaml", "b.yaml"))[None].inputs == inputs
    assert all(".".join(split_path(path)) == path for path in inputs)


@_settings(300)
@given(ANY_KEYS)
def test_a_key_reads_back(key: Any) -> None:
    part = key_text(key)
    assert split_path(f"x.{part}.y") == ["x", part, "y"]
    assert text_key(part) == key
    assert type(text_key(part)) is type(key)


@_settings(60)
@given(st.lists(st.tuples(DIMS, DIMS), min_size=1, max_size=6), st.booleans())
def test_the_layers_of_a_cache_read_back_in_order(layers: list[tuple[Any, Any]], nested: bool) -> None:
    root = "cache.self_attention_cache" if nested else "cache"
    inputs = {
        f"{root}.layers.{index}.{name}": f"float32[{dim}]"
        for index, dims in enumerate(layers)
        for name, dim in zip(("keys", "values"), dims, strict=True)
    }
    parsed = parse_golden(render_golden({None: GoldenGraph(inputs)}, "shapes.yaml", "spec.yaml"))[None]
    assert list(parsed.inputs.items()) == list(inputs.items())


# numbers


@st.composite
def outputs(draw: st.DrawFn) -> tuple[torch.Tensor, Tolerances]:
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scale = 10.0 ** draw(st.integers(-3, 4))
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    bounds = st.one_of(st.none(), st.sampled_from([0.0, 1e-6, 1e-3, 1e-1]))
    return tensor, Tolerances(draw(bounds), draw(bounds))


@_settings(100)
@given(outputs(), st.data())
def test_an_error_is_caught_exactly_where_it_is_above_the_tolerance(
    output: tuple[torch.Tensor, Tolerances], data: st.DataObject
) -> None:
    expected, tolerances = output
    tolerance = tolerances.of("y", expected)
    wide = expected.double()
    bound = tolerance.atol + tolerance.rtol * wide.abs()
    share = data.draw(st.sampled_from([0.5, 0.9, 0.999, 1.001, 1.1, 2.0, 100.0]))
    position = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    sign = data.draw(st.sampled_from([1.0, -1.0]))
    got = expected.clone()
    got[position] = wide[position] + sign * share * bound[position]
    # What arrived, after rounding to the dtype.
    error = (got.double() - wide).abs()
    assume(bool(torch.isfinite(got).all()))
    assume(abs(float(error[position]) - float(bound[position])) > 1e-9 * float(bound[position]))
    above = bool((error > bound).any())
    result = compare_leaf("y", expected, got, tolerances)
    assert result.ok is not above
    assert result.max_abs == float(error.max())
    if above:
        assert result.at == position
        assert result.outside == 1 / expected.numel()
        assert result.would_need is not None
        assert compare_leaf("y", expected, got, Tolerances(result.would_need, tolerance.rtol)).ok
        # What the table says is copied into a spec.
        shown = float(table([result])[1].split("atol ")[1].split()[0])
        assert compare_leaf("y", expected, got, Tolerances(shown, tolerance.rtol)).ok
        where = torch.ones(expected.shape, dtype=torch.bool)
        where[position] = False
        assert compare_leaf("y", expected, got, tolerances, where).ok


@_settings(80)
@given(outputs(), outputs())
def test_what_it_would_need_is_enough_and_not_much_less(
    output: tuple[torch.Tensor, Tolerances], other: tuple[torch.Tensor, Tolerances]
) -> None:
    expected, tolerances = output
    got = expected + other[0].flatten()[0].to(expected.dtype)
    assume(bool(torch.isfinite(got).all()))
    result = compare_leaf("y", expected, got, tolerances)
    if result.ok:
        assert result.would_need is None
        return
    assert result.would_need is not None
    assert compare_leaf("y", expected, got, Tolerances(result.would_need, result.rtol)).ok
    less = result.would_need * (1 - 1e-6)
    assert not compare_leaf("y", expected, got, Tolerances(less, result.rtol)).ok
