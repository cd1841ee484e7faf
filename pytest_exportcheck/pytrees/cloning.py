"""Copies that share no memory with the original, leaf by leaf."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["clone_cache", "clone_leaf", "clone_tensor", "clone_tree"]

#: Makes the copy of a tensor.
CopyTensor = Callable[[torch.Tensor], torch.Tensor]


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the same dtype and device, detached."""
    # Not deepcopy: it keeps aliases between leaves (f(x, x) would be recorded as one tensor), and an
    # expanded tensor would stay a view of few elements that an in-place operation refuses.
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def clone_leaf(leaf: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of one leaf."""
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, type)):
        return leaf
    return copy.deepcopy(leaf)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "layers") or hasattr(value, "self_attention_cache")


def clone_cache(cache: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of a cache, its counters included; needs no registration."""
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            twin.layers = [_clone_layer(layer, tensor) for layer in value]
        elif _is_cache(value):
            setattr(twin, name, clone_cache(value, tensor))
        elif isinstance(value, (dict, list)):
            setattr(twin, name, copy.copy(value))
    return twin


def _clone_layer(layer: Any, tensor: CopyTensor) -> Any:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, tensor(value))
        elif isinstance(value, dict):
            setattr(twin, name, {key: clone_leaf(item, tensor) for key, item in value.items()})
    return twin


def clone_tree(value: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of nested containers, caches and outputs, in which every tensor is a copy of its own.

    Containers that are not pytree nodes are deep-copied. Caches need `register_flattening_functions` to be
    active.

    Parameters
    ----------
    tensor:
        Makes the copies, called in the same order for equal structures.
    """

    def clone(item: Any) -> Any:
        # Flattening a cache drops counters that `torch.export` must not compare; a copy keeps them.
        if type(item) in _pytree.SUPPORTED_NODES and _is_cache(item):
            return clone_cache(item, tensor)
        return clone_leaf(item, tensor)

    return _pytree.tree_map(clone, value, is_leaf=_is_cache)
