"""Inputs whose values are all equal in every observed call, and other values that are safe there.

A mask of ones, lengths that are all the same, token types of zeros. A program that reads only a part of
such an input (``lengths[:1].expand(n)``) has the right numbers in every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree

from ..observe.observation import GraphObservation
from ..pytrees import flatten_with_paths
from ..pytrees.strides import in_layout_of

__all__ = ["Change", "Uniform", "changed_arguments", "changes", "find_uniform"]

Value = bool | int | float

#: Dtypes of which single values can be read and set.
_DTYPES = frozenset(
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ]
)

#: What a number becomes that is no flag: well within the range of what was seen.
_SMALLER, _FROM_ZERO = 0.75, 0.25


@dataclass(frozen=True)
class Uniform:
    """An input with one value throughout each observed call.

    Attributes
    ----------
    values:
        Position of a call -> the value there.
    """

    path: str
    values: Mapping[int, Value]

    @property
    def text(self) -> str:
        """``1``, or ``7, 9`` where calls differ."""
        return ", ".join(dict.fromkeys(map(str, self.values.values())))


@dataclass(frozen=True)
class Change:
    """One other value.

    Attributes
    ----------
    index:
        Where it is.
    hidden:
        Whether the place may count as padding then: a flag of one position of one row.
    """

    index: tuple[int, ...]
    value: Value
    hidden: bool = False

    def text(self, path: str) -> str:
        """``mask[0, 6] = 0``."""
        return f"{path}{list(self.index) if self.index else ''} = {self.value}"


def find_uniform(graph: GraphObservation) -> list[Uniform]:
    """Every such input: whole numbers and flags first, each kind in the order of the signature."""
    known = graph.answers.get(_KEY)
    if known is None:
        known = graph.answers[_KEY] = _find(graph)
    return list(known)


_KEY = "uniform inputs"


def _find(graph: GraphObservation) -> list[Uniform]:
    found: dict[str, dict[int, Value]] = {leaf.path: {} for leaf in graph.shapes.tensors()}
    several: set[str] = set()
    floats = set()
    for position, call in enumerate(graph.calls):
        if not found:
            break
        leaves = _by_path(graph.shapes.complete(call))
        for path in list(found):
            leaf = leaves.get(path)
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            value = _one_value(leaf)
            if value is None:
                del found[path]
                continue
            found[path][position] = value
            if leaf.numel() > 1:
                several.add(path)
            if leaf.is_floating_point():
                floats.add(path)
    # A single value that differs from call to call has shown what depends on it.
    kept = [
        Uniform(path, values)
        for path, values in found.items()
        if values and (path in several or len({*values.values()}) == 1)
    ]
    return sorted(kept, key=lambda each: each.path in floats)


def _by_path(arguments: Mapping[str, object]) -> dict[str, object]:
    return {path: leaf for name, value in arguments.items() for path, leaf in flatten_with_paths(value, name)}


def _one_value(tensor: torch.Tensor) -> Value | None:
    """The value of all its elements; ``None`` if they differ, or it is no finite number."""
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
        return None
    first = tensor[(0,) * tensor.dim()]
    # Most tensors are told by two elements.
    if not bool(first == tensor[(-1,) * tensor.dim()]) or not bool((tensor == first).all()):
        return None
    value: Value = first.item()
    return value if math.isfinite(value) else None


def changes(tensor: torch.Tensor, value: Value, sizes: Sequence[int]) -> list[Change]:
    """Other values for `tensor`, all of whose elements are `value`, the first choice first.

    * A flag (0 or 1, and a float 1) is turned at the last position of the first row: padding on the right.
      That shows nothing where later positions alone could see it, as in a causal model, so the second choice
      is a position after which others follow. No row of a mask is ever empty then, of which eager may say
      anything: the only position of a row is turned where it is a whole 0, an index, and nowhere else.
    * Another whole number is smaller by one: within what an index, a length may be.
    * A float is moved within the range between 0 and it, a 0 to 0.25.

    Parameters
    ----------
    sizes:
        Of all axes in the call: a single number that is one of them may be bound to be.
    """
    shape = tuple(tensor.shape)
    last = tuple(size - 1 for size in shape)
    place = (0, *last[1:]) if len(shape) > 1 else last
    if value in (0, 1) and not (tensor.is_floating_point() and value == 0):
        return _of_flag(tensor, value, place)
    if tensor.is_floating_point():
        return [Change(place, value * _SMALLER if value else _FROM_ZERO)]
    if value < 0 or (tensor.numel() == 1 and value in sizes):
        return []
    return [Change(place, int(value) - 1)]


def _of_flag(tensor: torch.Tensor, value: Value, place: tuple[int, ...]) -> list[Change]:
    shape, real = tuple(tensor.shape), tensor.is_floating_point()
    if not shape or shape[-1] < 2:
        # A float of one position is a factor rather than a mask, a whole 0 an index.
        if real:
            return [Change(place, value * _SMALLER)]
        index = value == 0 and tensor.dtype is not torch.bool
        return [Change(place, type(value)(1 - value))] * ((index or not shape) and _is_safe(tensor, value))
    if not real and not _is_safe(tensor, value):
        return []
    other = type(value)(1 - value)
    found = [Change(place, other, hidden=len(shape) <= 2)]
    if shape[-1] > 2:
        found.append(Change((*place[:-1], 1), other, hidden=len(shape) <= 2))
    return found


def _is_safe(tensor: torch.Tensor, value: Value) -> bool:
    """Whether 1 instead of 0 may be given: a GPU checks an index by an assertion that ends the process."""
    return not (tensor.is_cuda and tensor.dtype is not torch.bool and value == 0)


def changed_arguments(arguments: Mapping[str, object], path: str, change: Change) -> dict[str, object]:
    """`arguments` with the change in the tensor at `path`."""
    made = {}
    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        for at, (found, leaf) in enumerate(flatten_with_paths(value, name)):
            if found == path and isinstance(leaf, torch.Tensor):
                other = leaf.detach().clone(memory_format=torch.contiguous_format)
                other[change.index] = change.value
                # What is expanded has one element for many: no layout for values that differ.
                leaves[at] = other if 0 in leaf.stride() else in_layout_of(other, leaf)
        made[name] = _pytree.tree_unflatten(leaves, spec)
    return made
