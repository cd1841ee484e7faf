"""How a transformers cache becomes leaves and comes back.

A cache flattens to ``key_0, value_0, key_1, value_1, ...``: the tensors of its layers, layer by layer, then
those it keeps beside them. What is not a tensor goes into the context: nested tuples of classes and
constants, because `torch.export` compares contexts (a call whose context differs from the example's is
refused), strict mode needs constants, and saving a program needs JSON. So the context says what the cache
*is* (classes, windows, flags) and, where a tensor tells, not how far it got: the counter of a sliding layer
is made from the length of its keys again. A counter that no tensor tells is part of the context, and one
program cannot serve two values of it. `clone_cache` copies every counter.

A context is one term, a tuple whose first item says how the value is made:

    leaf                      the next tensor              is C              the constant C
    dict, ordered, list, tuple ITEMS                       object CLS STATE  an object without its constructor
    length PATH AXIS          size of a tensor of the same object, 0 where there is none
    narrow NAME START SIZE    part of a buffer of the same object, along the length
    empty DTYPE DEVICE        `torch.tensor([])`           window DEVICE     the window as a tensor
    device, dtype             of the first tensor of the object

Attribute names are those of transformers 5.24 (`transformers/cache_utils.py` and models).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import MappingKey

from ..keypaths import key_text

__all__ = [
    "CacheKey",
    "clone_leaf_by_leaf",
    "context_from_json",
    "context_to_json",
    "flatten_cache",
    "flatten_cache_with_keys",
    "flatten_encoder_decoder",
    "flatten_encoder_decoder_with_keys",
    "is_cache",
    "unflatten_cache",
    "unflatten_encoder_decoder",
]

_SHORT_NAMES = {"keys": "key", "values": "value"}

#: Made while tracing, these would become constants that the ONNX exporter does not find.
_CONSTANTS: dict[Any, torch.Tensor] = {}

_CHILDREN = ("self_attention_cache", "cross_attention_cache")

#: Attribute that is part of a buffer -> the buffer, where the object has it (static layers of unlimited_ocr).
_BUFFERS = {
    "keys": "all_keys",
    "prefill_keys": "all_keys",
    "values": "all_values",
    "prefill_values": "all_values",
}

Path = tuple[Any, ...]


@dataclass(frozen=True)
class CacheKey(MappingKey[str, Any]):
    """Key of one leaf of a cache: ``key_0`` for torch, ``layers.0.keys`` for people."""

    # The text of the key stays torch's (``['key_0']``): guards of an ExportedProgram are code made from it.
    path: str = ""


def is_cache(value: Any) -> bool:
    """Whether `value` is a cache: a container of layers, of two caches, or a cache of a model's own class."""
    cls = type(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type, dict, list, tuple)):
        return False
    if is_dataclass(value) or not isinstance(getattr(value, "layers", []), (list, tuple, dict)):
        return False  # a configuration, or a class that was registered for itself
    return hasattr(value, "layers") or hasattr(value, _CHILDREN[0]) or is_cache_class(cls)


def is_cache_class(cls: type) -> bool:
    """Whether a class outside of transformers' ``Cache`` is a cache by the convention of its models."""
    return cls.__name__.endswith("Cache") and cls.__module__.startswith("transformers.models.")


def _is_part(value: Any) -> bool:
    # By name or by the flag that every layer has: a constant is shared by the copies, a layer must not be.
    if not hasattr(value, "__dict__") or isinstance(value, (torch.nn.Module, type)):
        return False
    return type(value).__name__.endswith(("Cache", "Layer")) or hasattr(value, "is_initialized")


def _is_empty(tensor: torch.Tensor) -> bool:
    # A lazily initialised layer holds `torch.tensor([])` until its first update: no content yet.
    return tensor.dim() == 1 and tensor.shape[0] == 0


# from a cache to leaves and a term


def _encode(value: Any, path: Path, leaves: list[tuple[Path, torch.Tensor]], exact: bool) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        if _is_empty(value):
            if not isinstance(value, torch._subclasses.FakeTensor):
                _constant("empty", value.dtype, value.device)
            return ("empty", value.dtype, value.device)
        leaves.append((path, value))
        return ("leaf",)
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        items = [(key, _encode(item, (*path, key), leaves, exact)) for key, item in value.items()]
        return ("dict" if kind is dict else "ordered", tuple(items))
    if kind is list or kind is tuple:
        terms = [_encode(item, (*path, index), leaves, exact) for index, item in enumerate(value)]
        return ("list" if kind is list else "tuple", tuple(terms))
    if _is_part(value):
        return _encode_object(value, path, leaves, exact)
    return ("is", _checked(value, path))


def _checked(value: Any, path: Path) -> Any:
    if isinstance(value, torch.SymInt):
        known = value.node.maybe_as_int()
        if known is not None:
            return known
    elif not isinstance(value, (dict, list, tuple, set)) or isinstance(value, torch.Size):
        return value
    raise TypeError(
        f"{_text(path)} of a cache is a {type(value).__name__}: neither a tensor nor a constant, "
        "it cannot be part of the inputs or outputs of a program"
    )


def _encode_object(
    value: Any, path: Path, leaves: list[tuple[Path, torch.Tensor]], exact: bool, skip: Path = ()
) -> tuple[Any, ...]:
    held = vars(value)
    begin = len(leaves)
    state = []
    # The layers, and of a layer keys and values, come first. The others in an order that does not depend on
    # what was set when: equal caches have equal contexts.
    ordered = [name for name in ("layers", "keys", "values") if name in held]
    for name in ordered + sorted([name for name in held if name not in ("layers", "keys", "values")]):
        if name in skip or name in ("device", "dtype"):
            continue
        item = held[name]
        term = _derived(name, item, held, exact)
        if term is None:
            if name == "layer_class_to_replicate" and held.get("layers") and not exact:
                # How missing layers would be made matters only where there are none yet.
                item = None
            term = _encode(item, (*path, name), leaves, exact)
        state.append((name, term))
    for name in ("device", "dtype"):
        if name in held:
            same = len(leaves) > begin and getattr(leaves[begin][1], name) == held[name]
            state.append((name, (name,) if same else ("is", held[name])))
    return ("object", type(value), tuple(state))


def _derived(name: str, item: Any, held: dict[str, Any], exact: bool) -> tuple[Any, ...] | None:
    """The term of an attribute that others of the object tell, ``None`` for any other one."""
    if name == "_sliding_window_tensor" and isinstance(item, torch.Tensor):
        if not isinstance(item, torch._subclasses.FakeTensor):
            _constant("window", held["sliding_window"], item.device)
        return ("window", item.device)
    buffer = held.get(_BUFFERS.get(name, ""))
    if isinstance(buffer, torch.Tensor) and isinstance(item, torch.Tensor):
        size = item.shape[-2]
        return ("narrow", _BUFFERS[name], 0 if "prefill" in name else buffer.shape[-2] - size, size)
    if exact:
        return None
    if name == "entry_count" and "compressed_kv" in held:  # deepseek_v4
        return ("dict", tuple([(key, ("length", ("compressed_kv", key), 1)) for key in item]))
    if not isinstance(item, (int, torch.SymInt)) or isinstance(item, bool):
        return None
    if "max_cache_len" in held:  # static layers count in tensors
        return ("length", ("keys",), 0) if name == "batch_size" else None
    if name == "cumulative_length":
        if "_quantized_keys" not in held:
            return ("length", ("keys",), -2)
        payload = held["_quantized_keys"]
        # fp8 keeps one number per element; the packed bits of the other backends have no length.
        counted = isinstance(payload, tuple) and payload[0].dtype.is_floating_point
        return ("length", ("_quantized_keys", 0), -2) if counted else None
    return ("length", ("prefill_keys",), -2) if name == "prefill_cumulative_length" else None


def _text(path: Path) -> str:
    return ".".join([key_text(part) for part in path])


def _letter(cls: type) -> str:
    return "W" if "Sliding" in cls.__name__ else cls.__name__[0]


def _keys_of(cache: Any, paths: list[Path]) -> list[CacheKey]:
    layers = getattr(cache, "layers", ())
    # Layers of one class need no letter: key_0. In a mix, the class is part of the name: key_D_0, key_W_1.
    kinds = [type(layer) for layer in layers] if isinstance(layers, list) else []
    mixed = len(set(kinds)) > 1
    keys = []
    for path in paths:
        if path[0] == "layers" and len(path) > 2:
            index, name, *inner = path[1:]
            letter = [_letter(kinds[index])] if mixed else []
            words = [_SHORT_NAMES.get(name, name), *inner, *letter, index]
        else:
            words = list(path)
        keys.append(CacheKey("_".join([str(word) for word in words]), _text(path)))
    return keys


def flatten_cache(cache: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Leaves of a cache and the context that rebuilds it."""
    leaves: list[tuple[Path, torch.Tensor]] = []
    context = _encode_object(cache, (), leaves, False)
    return [tensor for _, tensor in leaves], context


def flatten_cache_with_keys(cache: Any) -> tuple[list[tuple[CacheKey, torch.Tensor]], tuple[Any, ...]]:
    """As `flatten_cache`, each leaf with its key."""
    leaves: list[tuple[Path, torch.Tensor]] = []
    context = _encode_object(cache, (), leaves, False)
    keys = _keys_of(cache, [path for path, _ in leaves])
    return [(key, tensor) for key, (_, tensor) in zip(keys, leaves, strict=True)], context


# and back


def _constant(kind: str, value: Any, device: torch.device) -> torch.Tensor:
    """``torch.tensor([])`` of a dtype, or the 0-d tensor that a sliding layer keeps beside its window."""
    key = (kind, value, device)
    if key not in _CONSTANTS:
        with _disable_current_modes():
            _CONSTANTS[key] = (
                torch.empty(0, dtype=value, device=device)
                if kind == "empty"
                else torch.tensor(value, dtype=torch.long, device=device)
            )
    return _CONSTANTS[key]


def _build(term: tuple[Any, ...], rest: list[Any]) -> Any:
    # Plain statements only: strict mode of torch.export traces this function.
    kind = term[0]
    if kind == "leaf":
        return rest.pop()
    if kind == "object":
        return _build_object(term, rest)
    if kind == "dict":
        return {key: _build(item, rest) for key, item in term[1]}
    if kind == "ordered":
        return OrderedDict([(key, _build(item, rest)) for key, item in term[1]])
    if kind == "list":
        return [_build(item, rest) for item in term[1]]
    if kind == "tuple":
        return tuple([_build(item, rest) for item in term[1]])
    if kind == "empty":
        return _constant("empty", term[1], term[2])
    return term[1]


def _build_object(term: tuple[Any, ...], rest: list[Any]) -> Any:
    # Constructors create tensors (traced as constants) and want arguments that the layers do not keep.
    made = term[1].__new__(term[1])
    first = rest[-1] if rest else None
    for name, item in term[2]:
        if item[0] not in _LATE and not (item[0] == "dict" and _is_late(item)):
            setattr(made, name, _build(item, rest))
    for name, item in term[2]:
        if item[0] in _LATE:
            setattr(made, name, _late(item, made, first))
        elif item[0] == "dict" and _is_late(item):
            setattr(made, name, {key: _late(inner, made, first) for key, inner in item[1]})
    return made


#: Terms that need the other attributes.
_LATE = ("length", "narrow", "window", "device", "dtype")


def _is_late(item: tuple[Any, ...]) -> bool:
    return len(item[1]) > 0 and item[1][0][1][0] in _LATE


def _late(item: tuple[Any, ...], made: Any, first: Any) -> Any:
    kind = item[0]
    if kind == "window":
        return _constant("window", made.sliding_window, item[1])
    if kind == "narrow":
        return getattr(made, item[1]).narrow(-2, item[2], item[3])
    if kind == "length":
        source = getattr(made, item[1][0])
        if len(item[1]) > 1 and source is not None:
            source = source[item[1][1]]
        # Nothing there, or nothing in it yet.
        known = isinstance(source, torch.Tensor) and source.dim() > 1
        return source.shape[item[2]] if known else 0
    if not isinstance(first, torch.Tensor):
        return None
    return first.device if kind == "device" else first.dtype


def unflatten_cache(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
    """The cache that `context` describes, holding `values` as they are (no copy)."""
    rest = list(values)
    rest.reverse()
    return _build_object(context, rest)


def clone_leaf_by_leaf(cache: Any, clone: Any) -> Any:
    """A copy of a cache of any class, counters included, its tensors copied by `clone`."""
    leaves: list[tuple[Path, torch.Tensor]] = []
    term = _encode_object(cache, (), leaves, True)
    return unflatten_cache([clone(tensor) for _, tensor in leaves], term)


def flatten_encoder_decoder(cache: Any) -> tuple[list[Any], Any]:
    """Two children, the self-attention cache and the cross-attention cache."""
    # `is_updated` decides which branch of the cross attention is traced: part of the structure.
    context = _encode_object(cache, (), [], False, skip=_CHILDREN)
    return [cache.self_attention_cache, cache.cross_attention_cache], context


def flatten_encoder_decoder_with_keys(cache: Any) -> tuple[list[tuple[MappingKey[str, Any], Any]], Any]:
    """As `flatten_encoder_decoder`, each child with its attribute name."""
    children, context = flatten_encoder_decoder(cache)
    return [(MappingKey(name), child) for name, child in zip(_CHILDREN, children, strict=True)], context


def unflatten_encoder_decoder(values: Iterable[Any], context: Any) -> Any:
    """The encoder-decoder cache that `context` describes, without calling its constructor."""
    cache = _build_object(context, [])
    cache.self_attention_cache, cache.cross_attention_cache = values
    return cache


# contexts as text


def context_to_json(context: Any) -> str:
    """Text of a context, for `torch.export.save` and for exporters that write the tree down."""

    def encode(value: Any) -> Any:
        if isinstance(value, type):
            return {"class": f"{value.__module__}:{value.__qualname__}"}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, tuple):
            return [encode(item) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if hasattr(value, "to_dict") and hasattr(type(value), "from_dict"):
            version = getattr(value, "transformers_version", None)  # `from_dict` writes its own
            return {"config": encode(type(value)), "values": value.to_dict(), "version": version}
        raise TypeError(f"cannot write down a cache that holds a {type(value).__name__}")

    return json.dumps(encode(context))


def context_from_json(text: str) -> Any:
    """The inverse of `context_to_json`."""

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(decode(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "size" in value:
            return torch.Size(value["size"])
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        if "device" in value:
            return torch.device(value["device"])
        if "config" in value:
            config = decode(value["config"]).from_dict(value["values"])
            config.transformers_version = value["version"]
            return config
        module, _, name = value["class"].partition(":")
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return decode(json.loads(text))
