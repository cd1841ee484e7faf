"""Copies that share no memory with the original, leaf by leaf."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .caches import clone_leaf_by_leaf, is_cache

__all__ = [
    "clone_cache",
    "clone_leaf",
    "clone_tensor",
    "clone_tree",
    "is_transformed",
    "is_wrapper",
    "transforms",
]

#: Makes the copy of a tensor.
CopyTensor = Callable[[torch.Tensor], torch.Tensor]


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a tensor made of others: a quantized one."""
    return bool(is_traceable_wrapper_subclass(value))


def transforms() -> tuple[str, ...]:
    """Names of the transforms of `torch.func` that are under way, outermost first."""
    return tuple([str(level.key()) for level in torch._C._functorch.get_interpreter_stack() or ()])


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` are not its own: batched by `torch.func.vmap`, or functionalized.

    What `torch.func.grad` and its like wrap holds its values, and stays a tensor afterwards.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if not functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the same dtype and device, detached."""
    # Not deepcopy: it keeps aliases between leaves (f(x, x) would be recorded as one tensor), and an
    # expanded tensor would stay a view of few elements that an in-place operation refuses.
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def clone_leaf(leaf: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of one leaf."""
    if is_wrapper(leaf):
        # A quantized tensor: its own `clone` may give the plain numbers.
        names, context = leaf.__tensor_flatten__()
        parts = {name: clone_leaf(getattr(leaf, name), tensor) for name in names}
        return type(leaf).__tensor_unflatten__(parts, context, leaf.size(), leaf.stride())
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, type)):
        return leaf
    return copy.deepcopy(leaf)


def clone_cache(cache: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of a cache, its counters included; needs no registration."""
    return clone_leaf_by_leaf(cache, lambda leaf: clone_leaf(leaf, tensor))


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
        if type(item) in _pytree.SUPPORTED_NODES and is_cache(item):
            return clone_cache(item, tensor)
        return clone_leaf(item, tensor)

    return _pytree.tree_map(clone, value, is_leaf=is_cache)
