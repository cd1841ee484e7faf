"""Copies that share no memory with the original, leaf by leaf."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["clone_cache", "clone_leaf", "clone_tree"]


def clone_leaf(leaf: Any) -> Any:
    """A copy of one leaf; a tensor keeps its dtype and device, and becomes contiguous."""
    if isinstance(leaf, torch.Tensor):
        # Not deepcopy: it keeps aliases between leaves (f(x, x) would be recorded as one tensor), and an
        # expanded tensor would stay a view of few elements that an in-place operation refuses.
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, type)):
        return leaf
    return copy.deepcopy(leaf)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "layers") or hasattr(value, "self_attention_cache")


def _clone(value: Any) -> Any:
    # Flattening a cache drops counters that `torch.export` must not compare; a copy keeps them.
    if type(value) in _pytree.SUPPORTED_NODES and _is_cache(value):
        return clone_cache(value)
    return clone_leaf(value)


def clone_cache(cache: Any) -> Any:
    """A copy of a cache, its counters included; needs no registration."""
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            twin.layers = [_clone_layer(layer) for layer in value]
        elif _is_cache(value):
            setattr(twin, name, clone_cache(value))
        elif isinstance(value, (dict, list)):
            setattr(twin, name, copy.copy(value))
    return twin


def _clone_layer(layer: Any) -> Any:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, clone_leaf(value))
        elif isinstance(value, dict):
            setattr(twin, name, {key: clone_leaf(item) for key, item in value.items()})
    return twin


def clone_tree(value: Any) -> Any:
    """A copy of nested containers, caches and outputs, in which every tensor is a clone of its own.

    Containers that are not pytree nodes are deep-copied. Caches need `register_flattening_functions` to be
    active.
    """
    return _pytree.tree_map(_clone, value, is_leaf=_is_cache)
