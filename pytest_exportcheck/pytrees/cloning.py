"""Copies that share no memory with the original, leaf by leaf."""

from __future__ import annotations

import copy
import enum
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .caches import clone_leaf_by_leaf, is_cache
from .strides import copied

__all__ = [
    "PLAIN",
    "Unkept",
    "blank",
    "clone_cache",
    "clone_leaf",
    "clone_tensor",
    "clone_tree",
    "copy_object",
    "is_transformed",
    "is_wrapper",
    "slots_of",
    "transforms",
]

#: Makes the copy of a tensor.
CopyTensor = Callable[[torch.Tensor], torch.Tensor]

#: Makes the copy of an object that is neither a tensor, nor a pytree node, nor one of `PLAIN`.
CopyObject = Callable[[Any], Any]

#: What no copy is needed of.
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    type,
    range,
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    types.FunctionType,
    types.BuiltinFunctionType,
)


@dataclass(frozen=True)
class Unkept:
    """In the place of an object of which nothing was kept but its class."""

    kind: type


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
    """A copy of the same dtype, device and strides, detached."""
    # Not deepcopy: it keeps aliases between leaves, and f(x, x) would be recorded as one tensor.
    return copied(tensor)


def blank(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of `shape`, of the dtype and device of `like`.

    Of a quantized tensor: its scale and zero point where one pair serves all elements, else 1 and 0.
    """
    if not like.is_quantized:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    scale, zero = 1.0, 0
    if like.qscheme() == torch.per_tensor_affine:
        scale, zero = like.q_scale(), like.q_zero_point()
    with warnings.catch_warnings():
        # torch 2.13 deprecates making one: that is the user's business, whose call this may be in.
        warnings.simplefilter("ignore")
        made = torch._empty_affine_quantized(
            shape, scale=scale, zero_point=zero, dtype=like.dtype, device=like.device
        )
    return made.fill_(0.0)


def clone_leaf(leaf: Any, tensor: CopyTensor = clone_tensor, opaque: CopyObject | None = None) -> Any:
    """A copy of one leaf."""
    opaque = opaque or copy_object
    if is_wrapper(leaf):
        # A quantized tensor: its own `clone` may give the plain numbers.
        names, context = leaf.__tensor_flatten__()
        parts = {name: clone_leaf(getattr(leaf, name), tensor) for name in names}
        return type(leaf).__tensor_unflatten__(parts, context, leaf.size(), leaf.stride())
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    if isinstance(leaf, PLAIN):
        return leaf
    return opaque(leaf)


def _tensors_with_history(value: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    if isinstance(value, PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value
    held = list(value.values()) if isinstance(value, dict) else []
    held += list(value) if isinstance(value, (list, tuple, set, frozenset)) else []
    held += list(getattr(value, "__dict__", {}).values())
    held += [getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)]
    for item in held:
        yield from _tensors_with_history(item, seen)


def slots_of(cls: type) -> list[str]:
    """Names of the attributes that objects of `cls` have beside ``__dict__``."""
    found: list[str] = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def copy_object(value: Any) -> Any:
    """A deep copy of an object that is no pytree node.

    torch copies no tensor with a history of operations, which the outputs of a model outside of ``no_grad``
    are: those inside are detached.
    """
    return copy.deepcopy(value, {id(t): clone_tensor(t) for t in _tensors_with_history(value, {})})


def clone_cache(cache: Any, tensor: CopyTensor = clone_tensor) -> Any:
    """A copy of a cache, its counters included; needs no registration."""
    return clone_leaf_by_leaf(cache, lambda leaf: clone_leaf(leaf, tensor))


def clone_tree(value: Any, tensor: CopyTensor = clone_tensor, opaque: CopyObject | None = None) -> Any:
    """A copy of nested containers, caches and outputs, in which every tensor is a copy of its own.

    Containers that are not pytree nodes are deep-copied. Caches need `register_flattening_functions` to be
    active.

    Parameters
    ----------
    tensor:
        Makes the copies, called in the same order for equal structures.
    opaque:
        What becomes of containers that are not pytree nodes.
    """

    def clone(item: Any) -> Any:
        # Flattening a cache drops counters that `torch.export` must not compare; a copy keeps them.
        if type(item) in _pytree.SUPPORTED_NODES and is_cache(item):
            return clone_cache(item, tensor)
        return clone_leaf(item, tensor, opaque)

    return _pytree.tree_map(clone, value, is_leaf=is_cache)
