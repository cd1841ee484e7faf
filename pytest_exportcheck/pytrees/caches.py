"""How a transformers cache becomes leaves and comes back.

A cache flattens to ``key_0, value_0, key_1, value_1, ...``: the tensors of its layers, layer by layer. What
is not a tensor goes into the context: nested tuples of classes and constants, because `torch.export` compares
contexts (a call whose context differs from the example's is refused), strict mode needs constants, and saving
a program needs JSON. So the context says what the cache *is* (classes, windows, flags) and not how far it
got: the counter of a sliding layer is made from the length of its keys again. `clone_tree` copies caches
without flattening them and keeps such counters.

Attribute names are those of transformers 5.24 (`transformers/cache_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import MappingKey

__all__ = [
    "CacheKey",
    "context_from_json",
    "context_to_json",
    "flatten_cache",
    "flatten_cache_with_keys",
    "flatten_encoder_decoder",
    "flatten_encoder_decoder_with_keys",
    "unflatten_cache",
    "unflatten_encoder_decoder",
]

#: State made from the tensors again. `_sliding_window_tensor` repeats `sliding_window`.
_DERIVED = ("cumulative_length", "device", "dtype", "_sliding_window_tensor")

_SHORT_NAMES = {"keys": "key", "values": "value"}

#: One tensor per window: made while tracing, it would become a constant that the ONNX exporter does not find.
_WINDOWS: dict[int, torch.Tensor] = {}

_CHILDREN = ("self_attention_cache", "cross_attention_cache")


@dataclass(frozen=True)
class CacheKey(MappingKey[str, Any]):
    """Key of one leaf of a cache: ``key_0`` for torch, ``layers.0.keys`` for people."""

    # The text of the key stays torch's (``['key_0']``): guards of an ExportedProgram are code made from it.
    path: str = ""


def _is_content(value: Any) -> bool:
    # A lazily initialised layer holds `torch.tensor([])` until its first update: no content yet.
    return isinstance(value, torch.Tensor) and not (value.dim() == 1 and value.shape[0] == 0)


def _freeze(value: Any) -> Any:
    if type(value) is dict:
        return ("dict", tuple((key, _freeze(item)) for key, item in value.items()))
    if type(value) in (list, tuple):
        return (type(value).__name__, tuple(_freeze(item) for item in value))
    return value


def _thaw(value: Any) -> Any:
    if type(value) is tuple:
        kind, items = value
        if kind == "dict":
            return {key: _thaw(item) for key, item in items}
        thawed = [_thaw(item) for item in items]
        return tuple(thawed) if kind == "tuple" else thawed
    return value


def _layer_tensors(layer: Any) -> list[tuple[str, Any, torch.Tensor]]:
    """(attribute, key inside the attribute or None, tensor), keys and values first."""
    found: list[tuple[str, Any, torch.Tensor]] = []
    for name in sorted(vars(layer), key=lambda name: name not in ("keys", "values")):
        value = vars(layer)[name]
        if name == "_sliding_window_tensor":
            continue
        if _is_content(value):
            found.append((name, None, value))
        elif isinstance(value, dict):
            found.extend((name, key, item) for key, item in value.items() if _is_content(item))
    return found


def _layer_context(layer: Any, found: list[tuple[str, Any, torch.Tensor]]) -> tuple[Any, ...]:
    taken = {(name, key) for name, key, _ in found}
    state: list[tuple[str, Any]] = []
    for name, value in vars(layer).items():
        if (name, None) in taken or (name in _DERIVED and not isinstance(value, torch.Tensor)):
            continue
        if isinstance(value, torch.Tensor):
            # What is left of tensors is the placeholder of a layer without content, or derived.
            if name in ("keys", "values"):
                state.append((name, None))
            continue
        if isinstance(value, dict):
            value = {key: None if (name, key) in taken else item for key, item in value.items()}
        if name == "is_initialized" and not taken:
            value = False
        state.append((name, _freeze(value)))
    derived = tuple(name for name in _DERIVED if name in vars(layer) and (name, None) not in taken)
    return (type(layer), tuple((name, key) for name, key, _ in found), tuple(state), derived)


def _letter(cls: type) -> str:
    return "W" if "Sliding" in cls.__name__ else cls.__name__[0]


def _collect(cache: Any) -> tuple[list[tuple[str, str, torch.Tensor]], tuple[Any, ...]]:
    leaves: list[tuple[str, str, torch.Tensor]] = []
    contexts = []
    layers = list(getattr(cache, "layers", ()))
    # Layers of one class need no letter: key_0. In a mix, the class is part of the name: key_D_0, key_W_1.
    mixed = len({type(layer) for layer in layers}) > 1
    for index, layer in enumerate(layers):
        found = _layer_tensors(layer)
        contexts.append(_layer_context(layer, found))
        letter = f"_{_letter(type(layer))}" if mixed else ""
        for name, key, tensor in found:
            short = _SHORT_NAMES.get(name, name) + ("" if key is None else f"_{key}")
            path = f"layers.{index}.{name}" + ("" if key is None else f".{key}")
            leaves.append((f"{short}{letter}_{index}", path, tensor))
    state = tuple(
        # How missing layers would be made matters only where there are none yet.
        (name, None if name == "layer_class_to_replicate" and layers else _freeze(value))
        for name, value in vars(cache).items()
        if name != "layers"
    )
    return leaves, (type(cache), tuple(contexts), state)


def flatten_cache(cache: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Leaves of a cache with ``layers`` and the context that rebuilds it."""
    leaves, context = _collect(cache)
    return [tensor for _, _, tensor in leaves], context


def flatten_cache_with_keys(cache: Any) -> tuple[list[tuple[CacheKey, torch.Tensor]], tuple[Any, ...]]:
    """As `flatten_cache`, each leaf with its key."""
    leaves, context = _collect(cache)
    return [(CacheKey(name, path), tensor) for name, path, tensor in leaves], context


def unflatten_cache(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
    """The cache that `context` describes, holding `values` as they are (no copy)."""
    # Constructors create tensors (traced as constants) and want arguments that the layers do not keep. Plain
    # statements only: strict mode of torch.export traces this function.
    remaining = list(values)
    position = 0
    cls, layers, cache_state = context
    cache = cls.__new__(cls)
    for name, value in cache_state:
        setattr(cache, name, _thaw(value))
    built = []
    for layer_cls, tensors, state, derived in layers:
        layer = layer_cls.__new__(layer_cls)
        for name, value in state:
            setattr(layer, name, _thaw(value))
        first = None
        for name, key in tensors:
            value = remaining[position]
            position += 1
            first = value if first is None else first
            if key is None:
                setattr(layer, name, value)
            else:
                getattr(layer, name)[key] = value
        for name in derived:
            setattr(layer, name, _derive(name, layer, first))
        built.append(layer)
    cache.layers = built
    return cache


def _derive(name: str, layer: Any, tensor: Any) -> Any:
    if name == "_sliding_window_tensor":
        return window_tensor(layer.sliding_window)
    if name == "cumulative_length":
        return 0 if tensor is None else tensor.shape[-2]
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.device if name == "device" else tensor.dtype


def window_tensor(window: int) -> torch.Tensor:
    """The 0-d int64 tensor that a sliding layer keeps beside its window."""
    if window not in _WINDOWS:
        _WINDOWS[window] = torch.tensor(window, dtype=torch.long)
    return _WINDOWS[window]


def flatten_encoder_decoder(cache: Any) -> tuple[list[Any], Any]:
    """Two children, the self-attention cache and the cross-attention cache."""
    # `is_updated` decides which branch of the cross attention is traced: part of the structure.
    state = tuple((name, _freeze(value)) for name, value in vars(cache).items() if name not in _CHILDREN)
    return [cache.self_attention_cache, cache.cross_attention_cache], (type(cache), state)


def flatten_encoder_decoder_with_keys(cache: Any) -> tuple[list[tuple[MappingKey[str, Any], Any]], Any]:
    """As `flatten_encoder_decoder`, each child with its attribute name."""
    children, context = flatten_encoder_decoder(cache)
    return [(MappingKey(name), child) for name, child in zip(_CHILDREN, children, strict=True)], context


def unflatten_encoder_decoder(values: Iterable[Any], context: Any) -> Any:
    """The encoder-decoder cache that `context` describes, without calling its constructor."""
    cls, state = context
    cache = cls.__new__(cls)
    for name, value in state:
        setattr(cache, name, _thaw(value))
    cache.self_attention_cache, cache.cross_attention_cache = values
    return cache


def context_to_json(context: Any) -> str:
    """Text of a context, for `torch.export.save` and for exporters that write the tree down."""

    def encode(value: Any) -> Any:
        if isinstance(value, type):
            return {"class": f"{value.__module__}:{value.__qualname__}"}
        if isinstance(value, tuple):
            return [encode(item) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"cannot write down a cache that holds a {type(value).__name__}")

    return json.dumps(encode(context))


def context_from_json(text: str) -> Any:
    """The inverse of `context_to_json`."""

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            module, _, name = value["class"].partition(":")
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return tuple(decode(item) for item in value) if isinstance(value, list) else value

    return decode(json.loads(text))
