"""Copies that share no memory with the original, leaf by leaf."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .caches import clone_leaf_by_leaf, is_cache

__all__ = ["clone_cache", "clone_leaf", "clone_tree", "is_wrapper"]


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a tensor made of others: a quantized one."""
    return bool(is_traceable_wrapper_subclass(value))


def clone_leaf(leaf: Any) -> Any:
    """A copy of one leaf; a tensor keeps its dtype and device, and becomes contiguous."""
    if is_wrapper(leaf):
        # A quantized tensor: its own `clone` may give the plain numbers.
        names, context = leaf.__tensor_flatten__()
        parts = {name: clone_leaf(getattr(leaf, name)) for name in names}
        return type(leaf).__tensor_unflatten__(parts, context, leaf.size(), leaf.stride())
    if isinstance(leaf, torch.Tensor):
        # Not deepcopy: it keeps aliases between leaves (f(x, x) would be recorded as one tensor), and an
        # expanded tensor would stay a view of few elements that an in-place operation refuses.
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, type)):
        return leaf
    return copy.deepcopy(leaf)


def _clone(value: Any) -> Any:
    # Flattening a cache drops counters that `torch.export` must not compare; a copy keeps them.
    if type(value) in _pytree.SUPPORTED_NODES and is_cache(value):
        return clone_cache(value)
    return clone_leaf(value)


def clone_cache(cache: Any) -> Any:
    """A copy of a cache, its counters included; needs no registration."""
    return clone_leaf_by_leaf(cache, clone_leaf)


def clone_tree(value: Any) -> Any:
    """A copy of nested containers, caches and outputs, in which every tensor is a clone of its own.

    Containers that are not pytree nodes are deep-copied. Caches need `register_flattening_functions` to be
    active.
    """
    return _pytree.tree_map(_clone, value, is_leaf=is_cache)
