"""Every cache class of the installed transformers: flattened, copied, named, resized, exported, put back."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.observe import GraphShapes, dynamic_shapes_for, resize_arguments
from pytest_exportcheck.observe.resize import NotResizable
from pytest_exportcheck.pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from pytest_exportcheck.pytrees.caches import context_from_json, context_to_json, flatten_cache_with_keys
from pytest_exportcheck.pytrees.cloning import is_wrapper
from pytest_exportcheck.pytrees.make import make_dynamic_cache, torch_deepcopy
from pytest_exportcheck.pytrees.registration import registration_owner
from pytest_exportcheck.pytrees.string_type import string_type

from .every_cache import INTERNAL, MISSING_BACKENDS, SAMPLES, discover, find, kv
from .helpers import infer

NAMES = sorted(SAMPLES)


def content(value: Any) -> Any:
    """Everything a cache holds, as (what, value) pairs of plain containers."""
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [type(value), *(content(item) for item in value)]
    if type(value).__name__.endswith(("Cache", "Layer")) and hasattr(value, "__dict__"):
        return {"class": type(value), **{key: content(item) for key, item in vars(value).items()}}
    return value


def assert_same(first: Any, second: Any) -> None:
    compare(content(first), content(second), "cache")


def compare(first: Any, second: Any, where: str) -> None:
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.device) == (second.dtype, second.device), where
        if type(first) is not torch.Tensor:  # quanto's
            first, second = first.dequantize(), second.dequantize()
        wide = torch.float64 if first.is_floating_point() else first.dtype  # no comparison of fp8
        assert torch.equal(first.to(wide), second.to(wide)), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            compare(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            compare(a, b, f"{where}.{index}")
    else:
        assert first == second, where


def tensors(value: Any) -> list[torch.Tensor]:
    if is_wrapper(value):
        return [t for name in value.__tensor_flatten__()[0] for t in tensors(getattr(value, name))]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, list) else []


def memory(value: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors(content(value)) if t.numel()}


def new(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, 2, length, 4)


def is_missing(name: str) -> bool:
    """Whether the backend of a class is not installed."""
    module = MISSING_BACKENDS.get(name)
    return module is not None and importlib.util.find_spec(module.partition(".")[0]) is None


def made(name: str, batch: int = 2, length: int = 3) -> Any:
    """A sample, or a skip of the whole test where its backend is not installed."""
    if is_missing(name):
        pytest.skip(f"{MISSING_BACKENDS[name]} is not installed")
    if name not in discover():
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(length)
    return SAMPLES[name].make(batch, length)


def test_every_cache_class_has_a_sample() -> None:
    known = {*SAMPLES, *INTERNAL}
    unknown = [
        f"{module}.{name}"
        for name, module in discover().items()
        if name not in known and not inspect.isabstract(find(name))
    ]
    assert not unknown, (
        f"cache classes of transformers that no test covers: {', '.join(unknown)}; add a sample of each to "
        "SAMPLES in tests/engine/every_cache.py, or the reason why no call sees it to INTERNAL"
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_comes_back_as_it_was_and_nothing_stays_registered(name: str) -> None:
    cache = made(name)
    with register_flattening_functions():
        assert registration_owner(type(cache)) == "pytest_exportcheck"
        pairs = flatten_with_paths(cache, "cache")
        leaves, spec = _pytree.tree_flatten(cache)
        again = _pytree.tree_unflatten(list(leaves), spec)
        leaves_again, spec_again = _pytree.tree_flatten(again)
        if not hasattr(cache, "is_updated"):
            keys = [key.key for key, _ in flatten_cache_with_keys(cache)[0]]
            assert len(set(keys)) == len(leaves)
    assert registration_owner(type(cache)) is None
    assert len({path for path, _ in pairs}) == len(pairs) > 0
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert spec_again == spec
    assert all(a is b for a, b in zip(leaves, leaves_again, strict=True))
    # `layer_class_to_replicate` says how missing layers are made; there are none.
    for name_of_part in ("", "self_attention_cache", "cross_attention_cache"):
        part = getattr(cache, name_of_part, None) if name_of_part else cache
        if hasattr(part, "layer_class_to_replicate"):
            part.layer_class_to_replicate = None
    assert_same(cache, again)
    if name not in MISSING_BACKENDS:
        assert context_from_json(context_to_json(spec.context)) == spec.context
    x = new(2, 1)
    assert_same(SAMPLES[name].step(torch_deepcopy(cache), x), SAMPLES[name].step(again, x))


@pytest.mark.parametrize("name", NAMES)
def test_a_clone_keeps_everything_shares_nothing_and_goes_on(name: str) -> None:
    cache = made(name)
    before = content(torch_deepcopy(cache))
    compare(before, content(cache), "cache")
    with register_flattening_functions():
        clone = clone_tree([cache])[0]
    compare(content(clone), before, "cache")
    assert not memory(clone) & memory(cache)
    x = new(2, 2)
    result = SAMPLES[name].step(clone, x)
    compare(content(cache), before, "cache")
    assert_same(result, SAMPLES[name].step(cache, x))
    assert_same(clone, cache)


@pytest.mark.parametrize("name", NAMES)
def test_its_description_shows_the_class_and_every_tensor(name: str) -> None:
    cache = made(name)
    text = string_type(cache, with_shape=True)
    assert text.startswith(f"{type(cache).__name__}(")
    if not hasattr(cache, "is_updated") and type(cache).__name__ == "DynamicCache" and name != "DynamicCache":
        assert name in text or name in ("DynamicLayer", "StaticLayer")
    with register_flattening_functions():
        for path, leaf in flatten_with_paths(cache):
            if leaf.numel() > 1:
                assert "s" + "x".join(map(str, leaf.shape)) in text, path


def _call(name: str, batch: int, length: int) -> dict[str, Any]:
    return {"cache": made(name, batch, length), "x": new(batch, 2)}


def _inferred(name: str) -> tuple[GraphShapes, list[Any]]:
    # Where a counter is part of the context, calls of another length are of another structure.
    lengths = (3, 5) if SAMPLES[name].exports == "sizes" else (3, 3)
    calls = [((), _call(name, batch, length)) for batch, length in zip((2, 3), lengths, strict=True)]
    return infer(lambda cache, x: None, *calls)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_resized_to_exactly_the_sizes_asked_for(name: str) -> None:
    made(name)
    shapes, calls = _inferred(name)
    sizes = {symbol: 4 + position for position, symbol in enumerate(shapes.symbols)}
    with register_flattening_functions():
        if name == "QuantoQuantizedLayer":
            with pytest.raises(NotResizable, match=r"layers\.0\._quantized_keys is a .*: the packed numbers"):
                resize_arguments(calls[0].arguments, shapes, sizes, calls)
            return
        resized = resize_arguments(calls[0].arguments, shapes, sizes, calls)["cache"]
        assert type(resized) is type(calls[0].arguments["cache"])
        for path, leaf in flatten_with_paths(resized, "cache"):
            assert tuple(leaf.shape) == shapes.dims(path, sizes), path
        assert any(4 in leaf.shape for leaf in _pytree.tree_leaves(resized)), "the batch at least is dynamic"


class Step(torch.nn.Module):
    """One step of a sample: the cache is an input, written into, and an output."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, cache: Any, x: torch.Tensor) -> Any:
        return {"result": self.step(cache, x), "cache": cache}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_input_and_a_written_output_of_an_export(name: str) -> None:
    made(name)
    model = Step(SAMPLES[name].step)
    shapes, calls = _inferred(name)
    with register_flattening_functions(), torch.no_grad():
        entries = {key: dynamic_shapes_for(value, shapes, key) for key, value in calls[0].arguments.items()}
        kwargs = clone_tree(calls[0].arguments)
        if SAMPLES[name].exports == "no":
            with pytest.raises(Exception, match=r"."):
                torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=entries)
            return
        program = torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=entries).module()
        for call in calls:
            expected = flatten_with_paths(model(**clone_tree(call.arguments)))
            inputs = clone_tree(call.arguments)
            got = flatten_with_paths(program(**inputs))
            assert [path for path, _ in got] == [path for path, _ in expected]
            for (path, a), (_, b) in zip(expected, got, strict=True):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), path
        if SAMPLES[name].exports == "one":
            # No silent wrong: the counter of the other call is not the one of the example.
            with pytest.raises(Exception, match=r"(?s)spec|[Gg]uard|expect"):
                program(**_call(name, 2, 5))


@pytest.mark.parametrize("name", sorted(MISSING_BACKENDS))
def test_a_backend_that_is_not_installed_is_named_with_the_class(name: str) -> None:
    if not is_missing(name):
        pytest.skip(f"{MISSING_BACKENDS[name]} is installed")
    with pytest.raises(ImportError, match=f"no {name} here: .*install"):
        make_dynamic_cache([kv(2, 3)], cls_layers=name)


@pytest.mark.parametrize(
    "name", ["Fp8QuantizedLayer", "StaticLayer", "UnlimitedOcrDynamicReferenceSlidingWindowLayer"]
)
def test_a_made_layer_holds_the_tensors_as_its_own_update_leaves_them(name: str) -> None:
    keys, values = kv(2, 3)
    options = (
        {"max_cache_len": 12} if "Static" in name else {"sliding_window": 16} if "Sliding" in name else {}
    )
    made_cache = make_dynamic_cache([(keys, values)], cls_layers=find(name), cls_kwargs=options)
    twin = find(name)(**options)
    twin.update(keys, values)
    assert_same(made_cache.layers[0], twin)
    x = new(2, 1)
    assert_same(made_cache.update(x, x + 1, 0), twin.update(x, x + 1))


def test_a_layer_without_keys_cannot_be_made_of_keys() -> None:
    with pytest.raises(TypeError, match="LinearAttentionLayer holds no keys"):
        make_dynamic_cache([kv(2, 3)], cls_layers="LinearAttentionLayer")
