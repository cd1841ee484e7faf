"""Caches made from tensors, tensors taken out of caches, copies, and other trees for tests and scripts.

Nothing here needs `register_flattening_functions`. transformers is imported on first use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from torch.utils._pytree import MappingKey

from ..plurals import counted
from . import caches
from .cloning import clone_cache, clone_leaf
from .paths import is_constant

__all__ = [
    "CacheKeyValue",
    "flatten_base_model_output",
    "flatten_dynamic_cache",
    "flatten_encoder_decoder_cache",
    "flatten_object",
    "flatten_static_cache",
    "flatten_unflatten_for_dynamic_shapes",
    "flatten_with_keys_base_model_output",
    "flatten_with_keys_dynamic_cache",
    "flatten_with_keys_encoder_decoder_cache",
    "flatten_with_keys_static_cache",
    "make_dynamic_cache",
    "make_dynamic_shapes_kv_cache",
    "make_encoder_decoder_cache",
    "make_static_cache",
    "replacement_before_exporting",
    "torch_deepcopy",
    "unflatten_base_model_output",
    "unflatten_dynamic_cache",
    "unflatten_encoder_decoder_cache",
    "unflatten_static_cache",
]

Pair = tuple[torch.Tensor, torch.Tensor]


def _pairs(tensors: Sequence[Any]) -> list[Pair]:
    """(key, value) per layer, from pairs or from a flat list ``k0, v0, k1, v1``."""
    if tensors and isinstance(tensors[0], torch.Tensor):
        if len(tensors) % 2:
            raise ValueError(
                f"a flat list holds a key and a value per layer: "
                f"{counted(len(tensors), 'tensor')} cannot be paired"
            )
        return [(tensors[i], tensors[i + 1]) for i in range(0, len(tensors), 2)]
    return [(key, value) for key, value in tensors]


def _layer_class(given: Any) -> type:
    from transformers import cache_utils

    cls = getattr(cache_utils, given) if isinstance(given, str) else given
    if not isinstance(cls, type):
        raise TypeError(f"no class of cache layers: {given!r}")
    return cls


def make_dynamic_cache(
    key_value_pairs: Sequence[Any],
    cls_layers: Any = None,
    cls_kwargs: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
) -> Any:
    """A ``DynamicCache`` that holds the given tensors, not copied.

    Parameters
    ----------
    key_value_pairs:
        ``[(key, value), ...]``, one pair per layer, or the flat list ``key0, value0, key1, value1``; tensors
        of shape (batch, heads, length, head size).
    cls_layers:
        Class of the layers (or its name), or one per layer; default ``DynamicLayer``.
    cls_kwargs:
        Arguments of the layers' constructors, one mapping for all or one per layer. The window of a sliding
        layer is, if not given, the length of its keys.

    Raises
    ------
    ImportError
        The library behind a quantized layer is not installed.
    TypeError
        A layer of that class holds no keys and values (linear attention).
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    pairs = _pairs(key_value_pairs)
    each = isinstance(cls_layers, (list, tuple))
    classes = list(cls_layers) if each else [cls_layers or DynamicLayer] * len(pairs)
    options: list[Mapping[str, Any]]
    if isinstance(cls_kwargs, Mapping) or cls_kwargs is None:
        options = [cls_kwargs or {}] * len(pairs)
    else:
        options = list(cls_kwargs)
    if len(classes) != len(pairs) or len(options) != len(pairs):
        raise ValueError(f"{len(pairs)} layers, {len(classes)} classes and {len(options)} sets of arguments")
    cache = DynamicCache()
    for (keys, values), cls, given in zip(pairs, map(_layer_class, classes), options, strict=True):
        wanted = dict(given)
        if "Sliding" in cls.__name__:
            wanted.setdefault("sliding_window", keys.shape[2])
        cache.layers.append(_filled_layer(cls, wanted, keys, values))
    if each and pairs:
        cache.layer_class_to_replicate = None
    return cache


def _filled_layer(cls: type, options: Mapping[str, Any], keys: torch.Tensor, values: torch.Tensor) -> Any:
    try:
        layer: Any = cls(**options)
    except ImportError as error:
        raise ImportError(f"no {cls.__name__} here: {error}") from error
    if cls.__name__ in _ASSIGNABLE:
        # Not `update`: it would drop what does not fit into the window.
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = keys.shape[2]
    elif hasattr(layer, "update"):
        # What else such a layer keeps (a payload, a buffer, a prefill) only its own update knows.
        layer.update(keys, values)
    else:
        raise TypeError(f"a {cls.__name__} holds no keys and values")
    return layer


#: Classes of layers whose keys and values are all they hold.
_ASSIGNABLE = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")


def make_static_cache(key_value_pairs: Sequence[Any], max_cache_len: int | None = None) -> Any:
    """A ``StaticCache`` whose first positions hold copies of the given tensors.

    Parameters
    ----------
    max_cache_len:
        Positions of each layer; default: as many as the longest keys have.

    Raises
    ------
    ValueError
        `max_cache_len` is less than the length of some keys.
    """
    from transformers import LlamaConfig
    from transformers.cache_utils import StaticCache

    pairs = _pairs(key_value_pairs)
    longest = max((keys.shape[2] for keys, _ in pairs), default=1)
    length = longest if max_cache_len is None else max_cache_len
    if length < longest:
        raise ValueError(f"max_cache_len={length} is less than the {longest} positions of the keys")
    # The constructor asks a config for the kinds of the layers and for nothing else.
    cache = StaticCache(config=LlamaConfig(num_hidden_layers=len(pairs)), max_cache_len=length)
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys, values, index)
    return cache


def make_encoder_decoder_cache(self_attention_cache: Any, cross_attention_cache: Any) -> Any:
    """An ``EncoderDecoderCache`` of two caches."""
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(self_attention_cache, cross_attention_cache)


def make_dynamic_shapes_kv_cache(cache: Any, shape: Mapping[int, Any]) -> list[dict[int, Any]]:
    """One copy of `shape` for every key and value of `cache`: its entry in ``dynamic_shapes``."""
    return [dict(shape) for _ in range(len(CacheKeyValue(cache)))]


class CacheKeyValue:
    """Keys and values of a cache, whatever its class.

    Parameters
    ----------
    cache:
        A cache with layers, a flat list ``k0, v0, k1, v1``, pairs of tensors, or ``None``.

    Attributes
    ----------
    key_cache, value_cache:
        One tensor per layer that has keys, ``None`` for ``None``.
    cls_layers:
        Classes of these layers, ``None`` if they are not known.
    """

    def __init__(self, cache: Any = None) -> None:
        self.key_cache: list[torch.Tensor] | None = None
        self.value_cache: list[torch.Tensor] | None = None
        self.cls_layers: list[type] | None = None
        self._windows: list[int | None] = []
        if cache is None:
            return
        if isinstance(cache, CacheKeyValue):
            self.key_cache, self.value_cache = cache.key_cache, cache.value_cache
            self.cls_layers, self._windows = cache.cls_layers, cache._windows
        elif hasattr(cache, "self_attention_cache"):
            raise TypeError(
                "an encoder-decoder cache is two caches: give self_attention_cache or cross_attention_cache"
            )
        elif hasattr(cache, "layers"):
            # Layers of linear attention have states, no keys; one without content has none yet.
            layers = [
                layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)
            ]
            self.key_cache = [layer.keys for layer in layers]
            self.value_cache = [layer.values for layer in layers]
            self.cls_layers = [type(layer) for layer in layers]
            self._windows = [getattr(layer, "sliding_window", None) for layer in layers]
        elif hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
            self.key_cache, self.value_cache = list(cache.key_cache), list(cache.value_cache)
        elif isinstance(cache, (list, tuple)):
            pairs = _pairs(cache)
            self.key_cache = [key for key, _ in pairs]
            self.value_cache = [value for _, value in pairs]
        else:
            raise TypeError(f"no cache: {type(cache).__name__}")

    @property
    def n_layers(self) -> int:
        """Number of layers with keys."""
        return len(self.key_cache or ())

    def __len__(self) -> int:
        return 2 * self.n_layers

    def aslist(self) -> list[torch.Tensor]:
        """The tensors as ``k0, v0, k1, v1``."""
        pairs = zip(self.key_cache or (), self.value_cache or (), strict=True)
        return [tensor for pair in pairs for tensor in pair]

    def make_dynamic_cache(self) -> Any:
        """A ``DynamicCache`` with these tensors, and these classes of layers and windows where dynamic."""
        from transformers.cache_utils import DynamicLayer

        dynamic = [issubclass(cls, DynamicLayer) for cls in self.cls_layers or ()]
        if not dynamic or not all(dynamic):
            return make_dynamic_cache(self.aslist())
        options = [{} if window is None else {"sliding_window": window} for window in self._windows]
        return make_dynamic_cache(self.aslist(), cls_layers=self.cls_layers, cls_kwargs=options)


# the functions behind the registration, one set per class


class LeafNames(list[str]):
    """Names of the leaves of a cache; equal to a plain list of them.

    Attributes
    ----------
    detail:
        What rebuilds the cache exactly; no part of the comparison.
    """

    detail: Any = None


def _flatten_named(cache: Any) -> tuple[list[tuple[Any, torch.Tensor]], LeafNames]:
    pairs, detail = caches.flatten_cache_with_keys(cache)
    names = LeafNames(str(key.key) for key, _ in pairs)
    names.detail = detail
    return list(pairs), names


def _split_names(values: Iterable[Any], names: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """Pairs of key and value by layer, and the letter of each layer's class (``""`` if there is none)."""
    found: dict[str, dict[str, Any]] = {}
    letters: dict[str, str] = {}
    for name, value in zip(names, values, strict=True):
        kind, *letter, index = name.split("_")
        found.setdefault(index, {})[kind] = value
        letters[index] = letter[0] if letter else ""
    return [(layer["key"], layer["value"]) for layer in found.values()], list(letters.values())


def flatten_dynamic_cache(cache: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Tensors ``key_0, value_0, ...`` and their names; ``key_D_0, key_W_1`` for layers of several classes."""
    pairs, names = _flatten_named(cache)
    return [tensor for _, tensor in pairs], names


def flatten_with_keys_dynamic_cache(cache: Any) -> tuple[list[tuple[Any, torch.Tensor]], list[str]]:
    """As `flatten_dynamic_cache`, each tensor with its key."""
    return _flatten_named(cache)


def unflatten_dynamic_cache(values: Iterable[Any], context: Sequence[str]) -> Any:
    """The inverse: exact for a context of `flatten_dynamic_cache`.

    With plain names, layers named ``W`` are sliding ones whose window is the length of their keys.
    """
    detail = getattr(context, "detail", None)
    if detail is not None:
        return caches.unflatten_cache(values, detail)
    pairs, letters = _split_names(values, context)
    return make_dynamic_cache(
        pairs, ["DynamicSlidingWindowLayer" if letter == "W" else "DynamicLayer" for letter in letters]
    )


def flatten_static_cache(cache: Any) -> tuple[list[torch.Tensor], list[str]]:
    """As `flatten_dynamic_cache`; a static layer has a third tensor, its counter ``cumulative_length_0``."""
    return flatten_dynamic_cache(cache)


def flatten_with_keys_static_cache(cache: Any) -> tuple[list[tuple[Any, torch.Tensor]], list[str]]:
    """As `flatten_static_cache`, each tensor with its key."""
    return _flatten_named(cache)


def unflatten_static_cache(values: Iterable[Any], context: Sequence[str]) -> Any:
    """The inverse: exact for a context of `flatten_static_cache`; plain names give a full cache."""
    detail = getattr(context, "detail", None)
    if detail is not None:
        return caches.unflatten_cache(values, detail)
    kept = [(n, v) for n, v in zip(context, values, strict=True) if n.startswith(("key_", "value_"))]
    return make_static_cache(_split_names([v for _, v in kept], [n for n, _ in kept])[0])


def flatten_encoder_decoder_cache(cache: Any) -> tuple[list[Any], list[str]]:
    """The self-attention cache and the cross-attention cache, and their names."""
    children, detail = caches.flatten_encoder_decoder(cache)
    names = LeafNames(["self_attention_cache", "cross_attention_cache"])
    names.detail = detail
    return children, names


def flatten_with_keys_encoder_decoder_cache(cache: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """As `flatten_encoder_decoder_cache`, each cache with its key."""
    children, names = flatten_encoder_decoder_cache(cache)
    return [(MappingKey(name), child) for name, child in zip(names, children, strict=True)], names


def unflatten_encoder_decoder_cache(values: Iterable[Any], context: Sequence[str]) -> Any:
    """The inverse of `flatten_encoder_decoder_cache`."""
    detail = getattr(context, "detail", None)
    if detail is not None:
        return caches.unflatten_encoder_decoder(values, detail)
    return make_encoder_decoder_cache(*values)


def flatten_base_model_output(output: Any) -> tuple[list[Any], list[str]]:
    """Values and names of the fields of a model output that are not ``None``."""
    names = LeafNames(output.keys())
    names.detail = type(output)
    return list(output.values()), names


def flatten_with_keys_base_model_output(output: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """As `flatten_base_model_output`, each value with its key."""
    values, names = flatten_base_model_output(output)
    return [(MappingKey(name), value) for name, value in zip(names, values, strict=True)], names


def unflatten_base_model_output(values: Iterable[Any], context: Sequence[str]) -> Any:
    """The inverse of `flatten_base_model_output`; a ``BaseModelOutput`` for plain names."""
    from transformers.modeling_outputs import BaseModelOutput

    cls = getattr(context, "detail", None) or BaseModelOutput
    return cls(**dict(zip(context, values, strict=True)))


# trees


def replacement_before_exporting(value: Any) -> Any:
    """`value`, its dicts, lists and tuples built anew; leaves, caches and outputs stay what they are."""
    kind = type(value)
    if kind is dict:
        return {key: replacement_before_exporting(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(replacement_before_exporting(item) for item in value)
    return value


def torch_deepcopy(value: Any) -> Any:
    """A copy that shares no memory with `value`; tensors are cloned one by one.

    Raises
    ------
    NotImplementedError
        For a class it does not know.
    """
    kind = type(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type, slice)):
        return value
    if isinstance(value, torch.Tensor):
        return clone_leaf(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.copy()
    if kind in (list, tuple, set):
        return kind(torch_deepcopy(item) for item in value)
    if _pytree.is_namedtuple_instance(value):
        return kind(*(torch_deepcopy(item) for item in value))
    if kind.__module__.startswith("transformers") and caches.is_cache(value):
        return clone_cache(value)
    if isinstance(value, CacheKeyValue):
        return CacheKeyValue(torch_deepcopy(value.aslist()) if value.key_cache is not None else None)
    if dataclasses.is_dataclass(value):
        return kind(
            **{f.name: torch_deepcopy(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        )
    if isinstance(value, dict):
        if kind is dict:
            return {key: torch_deepcopy(item) for key, item in value.items()}
        twin: Any = value.copy()
        for key, item in value.items():
            twin[key] = torch_deepcopy(item)
        return twin
    if kind in _pytree.SUPPORTED_NODES:
        leaves, spec = _pytree.tree_flatten(value)
        return _pytree.tree_unflatten([torch_deepcopy(leaf) for leaf in leaves], spec)
    raise NotImplementedError(f"cannot copy a {kind.__module__}.{kind.__qualname__}")


def _children(value: Any) -> list[Any] | None:
    """Children of a container of any kind, ``None`` for a leaf."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "self_attention_cache"):
        return [value.self_attention_cache, value.cross_attention_cache]
    if caches.is_cache(value):
        return list(caches.flatten_cache(value)[0])
    if isinstance(value, CacheKeyValue):
        return list(value.aslist())
    if type(value) in _pytree.SUPPORTED_NODES:
        return list(_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def flatten_object(value: Any, drop_keys: bool = False) -> list[Any]:
    """Leaves of nested containers, caches and outputs in one list; needs no registration.

    Parameters
    ----------
    drop_keys:
        ``False``: the keys of a plain dict come before their values.
    """
    if type(value) is dict and not drop_keys:
        return [x for key, item in value.items() for x in [key, *flatten_object(item, drop_keys)]]
    children = _children(value)
    if children is None:
        return [value]
    return [leaf for child in children for leaf in flatten_object(child, drop_keys)]


def flatten_unflatten_for_dynamic_shapes(value: Any, use_dict: bool = True) -> Any:
    """`value` in the containers of its ``dynamic_shapes``: a custom class becomes a list of its children.

    Parameters
    ----------
    use_dict:
        Keep dicts; ``False``: a dict becomes the list of its values.
    """
    if is_constant(value) or isinstance(value, torch.Tensor):
        return value
    children = _children(value)
    if children is None:
        return value
    inner = [flatten_unflatten_for_dynamic_shapes(child, use_dict) for child in children]
    if type(value) is dict and use_dict:
        return dict(zip(value, inner, strict=True))
    if _pytree.is_namedtuple_instance(value):
        return type(value)(*inner)
    return tuple(inner) if type(value) is tuple else inner
