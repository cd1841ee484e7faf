"""Inputs whose values are equal in every call, all or along an axis, and other values that are safe there.

A mask of ones, lengths that are all the same, token types of zeros, positions that are the same in each row.
A program that reads but a part of such an input (``lengths[:1].expand(n)``) is right in each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree

from ..observe.observation import GraphObservation
from ..pytrees import flatten_with_paths
from ..pytrees.strides import in_layout_of

__all__ = [
    *("Change", "Uniform", "changed_arguments", "changes", "find_uniform"),
    *("in_memory_of_its_own", "is_expanded"),
]

Value = bool | int | float

#: Dtypes of which single values can be read and set.
_DTYPES = frozenset(
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ]
)

#: How many values of a row a text has.
_SHOWN = 4

#: What a number becomes that is no flag: well within the range of what was seen.
_SMALLER, _FROM_ZERO = 0.75, 0.25


@dataclass(frozen=True)
class Uniform:
    """An input with one value throughout each observed call, or along an axis.

    Attributes
    ----------
    values:
        Position of a call -> the value there. Of an input that has several, empty.
    axes:
        Of such an input: along which nothing varies in any call.
    positions:
        The calls that can be changed.
    """

    path: str
    values: Mapping[int, Value]
    axes: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def text(self) -> str:
        """``1``, or ``7, 9`` where calls differ, or ``equal along axis 0``."""
        if self.values:
            return ", ".join(dict.fromkeys(map(str, self.values.values())))
        return f"equal along {_listed(self.axes)}"

    @property
    def otherwise(self) -> str:
        """What no observed call has: ``not all values of mask are equal``, and that it has not."""
        if self.values:
            return f"not all values of {self.path} are equal (in every observed call they are: {self.text})"
        return f"{self.path} varies along {_listed(self.axes)} (in no observed call it does)"


def _listed(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(str, axes))}"


@dataclass(frozen=True)
class Change:
    """Another value.

    Attributes
    ----------
    index:
        Where it is: of the first of `count` elements along the last axis.
    value:
        For each of these elements one, or one for all.
    hidden:
        Whether the place may count as padding then: a flag in one row.
    additive:
        Whether it is a float that was 0.
    """

    index: tuple[int, ...]
    value: Value | tuple[int, ...]
    hidden: bool = False
    count: int = 1
    additive: bool = False

    @property
    def place(self) -> tuple[int | slice, ...]:
        """What a tensor is indexed with."""
        if self.count == 1:
            return self.index
        return (*self.index[:-1], slice(self.index[-1], self.index[-1] + self.count))

    def as_mask(self) -> Change | None:
        """The same place hidden, where a 0 may be what a mask adds to scores."""
        return Change(self.index, -math.inf, hidden=len(self.index) <= 2) if self.additive else None

    def text(self, path: str) -> str:
        """``mask[0, 6] = 0``, ``mask[0, 6:9] = 0``, ``positions[0, 0:9] = 0, 0, 1, 2, ...``."""
        parts = [str(i) if isinstance(i, int) else f"{i.start}:{i.stop}" for i in self.place]
        value = str(self.value)
        if isinstance(self.value, tuple):
            value = ", ".join([*map(str, self.value[:_SHOWN]), *["..."] * (len(self.value) > _SHOWN)])
        return f"{path}[{', '.join(parts)}] = {value}" if parts else f"{path} = {value}"


def find_uniform(graph: GraphObservation) -> list[Uniform]:
    """Every such input: those of one value first, whole numbers and flags before others."""
    known = graph.answers.get(_KEY)
    if known is None:
        known = graph.answers[_KEY] = _find(graph)
    return list(known)


_KEY = "uniform inputs"


@dataclass
class _Seen:
    """What the calls up to now show of one input.

    Attributes
    ----------
    values:
        Position -> the value throughout; ``None``: some call has several.
    axes:
        Along which nothing varied; ``None`` before the first call.
    shown:
        Axes that were longer than 1.
    various:
        Positions of the calls with several values.
    """

    values: dict[int, Value] | None = field(default_factory=dict)
    axes: set[int] | None = None
    shown: set[int] = field(default_factory=set)
    various: list[int] = field(default_factory=list)
    several: bool = False
    real: bool = False

    def add(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether it may still be such an input."""
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            return False
        self.real = tensor.is_floating_point()
        value = _one_value(tensor)
        if value is None:
            self.values = None
            self.various.append(position)
        elif self.values is not None:
            self.values[position] = value
        self.several |= tensor.numel() > 1
        axes = set(range(tensor.dim())) if self.axes is None else self.axes
        self.shown |= {axis for axis in axes if tensor.shape[axis] > 1}
        self.axes = {axis for axis in axes if value is not None or _is_equal_along(tensor, axis)}
        return self.values is not None or bool(self.axes)

    def uniform(self, path: str) -> Uniform | None:
        if self.values:
            # A single value that differs from call to call has shown what depends on it.
            told = not self.several and len({*self.values.values()}) > 1
            return None if told else Uniform(path, self.values, (), tuple(self.values))
        axes = tuple(sorted((self.axes or set()) & self.shown))
        return Uniform(path, {}, axes, tuple(self.various)) if axes and self.various else None


def _find(graph: GraphObservation) -> list[Uniform]:
    found = {leaf.path: _Seen() for leaf in graph.shapes.tensors()}
    for position, call in enumerate(graph.calls):
        if not found:
            break
        leaves = _by_path(graph.shapes.complete(call))
        for path in list(found):
            leaf = leaves.get(path)
            if isinstance(leaf, torch.Tensor) and leaf.numel() and not found[path].add(position, leaf):
                del found[path]
    kept = [(each, found[path].real) for path in found if (each := found[path].uniform(path)) is not None]
    return [each for each, _ in sorted(kept, key=lambda pair: (not pair[0].values, pair[1]))]


def _by_path(arguments: Mapping[str, object]) -> dict[str, object]:
    return {path: leaf for name, value in arguments.items() for path, leaf in flatten_with_paths(value, name)}


def _one_value(tensor: torch.Tensor) -> Value | None:
    """The value of all its elements; ``None`` if they differ, or it is no finite number."""
    first = tensor[(0,) * tensor.dim()]
    # Most tensors are told by two elements.
    if not bool(first == tensor[(-1,) * tensor.dim()]) or not bool((tensor == first).all()):
        return None
    value: Value = first.item()
    return value if math.isfinite(value) else None


def _is_equal_along(tensor: torch.Tensor, axis: int) -> bool:
    if tensor.shape[axis] < 2:
        return True
    first, last = tensor.select(axis, 0), tensor.select(axis, -1)
    corner = (0,) * first.dim()
    if not bool(first[corner] == last[corner]):
        return False
    return bool((tensor == tensor.narrow(axis, 0, 1)).all())


def changes(uniform: Uniform, position: int, tensor: torch.Tensor, sizes: Sequence[int]) -> list[Change]:
    """Other values for `tensor`, which is the input in a call, the first choice first.

    Of one value throughout:

    * A flag (0 or 1, and a float 1) is turned: no row of a mask is ever empty then, of which eager may say
      anything. The only position of a row is turned where it is a whole 0, an index, and nowhere else.
    * Another whole number is smaller by one: within what an index, a length may be.
    * A float is moved within the range between 0 and it, a 0 to 0.25.

    Where nothing varies along an axis, an element gets the value of another one of its row; a row that counts
    does so from the next number on, or begins with the same number twice, as left padding does.

    The first choice is the last position of the first row, padding on the right. That shows nothing where
    later positions alone could see it, as in a causal model, or where another input hides it. So the second
    choice is in the last row, a position after which others follow. The third one, of flags, is a part of the
    first row: one sample of many may not count.

    Parameters
    ----------
    sizes:
        Of all axes in the call: a single number that is one of them may be bound to be.
    """
    places = _places(tuple(tensor.shape))
    if not uniform.values:
        return list(dict.fromkeys(change for place in places for change in _of_others(tensor, place)))
    value = uniform.values[position]
    if value in (0, 1) and not (tensor.is_floating_point() and value == 0):
        return _of_flag(tensor, value, places)
    if tensor.is_floating_point():
        other = value * _SMALLER if value else _FROM_ZERO
        return [Change(place, other, additive=not value) for place in places]
    if value < 0 or (tensor.numel() == 1 and value in sizes):
        return []
    return [Change(place, int(value) - 1) for place in places]


def _places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Where a value may be changed: at the end of the first row; inside the last one."""
    last = tuple(size - 1 for size in shape)
    if len(shape) < 2:
        return list(dict.fromkeys([last, tuple(min(at, 1) for at in last)]))
    inside = (last[0], *(size // 2 for size in shape[1:-1]), min(last[-1], 1))
    return list(dict.fromkeys([(0, *last[1:]), inside]))


def _of_flag(tensor: torch.Tensor, value: Value, places: Sequence[tuple[int, ...]]) -> list[Change]:
    shape, real, place = tuple(tensor.shape), tensor.is_floating_point(), places[0]
    if not shape or shape[-1] < 2:
        # A float of one position is a factor rather than a mask, a whole 0 an index.
        if real:
            return [Change(place, value * _SMALLER) for place in places]
        index = (value == 0 and tensor.dtype is not torch.bool) or not shape
        known = index and _is_safe(tensor, value)
        return [Change(place, type(value)(1 - value)) for place in places if known]
    if not real and not _is_safe(tensor, value):
        return []
    other, part = type(value)(1 - value), shape[-1] // 3
    # A whole number that was 0 is a type or an index, and hides nothing.
    hidden = len(shape) <= 2 and (value == 1 or tensor.dtype is torch.bool)
    found = [Change(each, other, hidden) for each in places]
    if part > 1:
        found.append(Change((*place[:-1], shape[-1] - part), other, hidden, part))
    return found


def _is_safe(tensor: torch.Tensor, value: Value) -> bool:
    """Whether 1 instead of 0 may be given: a GPU checks an index by an assertion that ends the process."""
    return not (tensor.is_cuda and tensor.dtype is not torch.bool and value == 0)


def _of_others(tensor: torch.Tensor, place: tuple[int, ...]) -> list[Change]:
    """A value of the same row, or else of another one: whatever it means, it is one that was given."""
    lane = tensor[place[:-1]]
    whole = lane.dtype is not torch.bool and not lane.is_floating_point()
    # Two of them, 0 and 1, are flags.
    if whole and len(lane) > 2 and bool((lane.diff() == 1).all()):
        return _of_positions(lane, place[:-1])
    if bool(((tensor == 0) | (tensor == 1)).all()):
        # Of flags both stay in a row that has both.
        last = lane[-1]
        if int((lane == last).sum()) < 2:
            others = (lane != last).nonzero().flatten()
            if len(others) < 2:
                return []
            place = (*place[:-1], int(others[-1]))
        return [Change(place, type(last.item())(1 - tensor[place].item()))]
    here = tensor[place]
    others = lane[lane != here]
    if not len(others):
        others = tensor[tensor != here]
    if not len(others):
        return []
    return [Change(place, others[-1].item())]


def _of_positions(lane: torch.Tensor, row: tuple[int, ...]) -> list[Change]:
    """A row that counts, after one more position; or after one that is padding."""
    low, count = int(lane[0]), len(lane)
    made = [tuple(range(low + 1, low + 1 + count))] if not lane.is_cuda else []
    made.append((low, *range(low, low + count - 1)))
    return [Change((*row, 0), values, count=count) for values in made]


def changed_arguments(arguments: Mapping[str, object], path: str, change: Change) -> dict[str, object]:
    """`arguments` with the change in the tensor at `path`."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.detach().clone(memory_format=torch.contiguous_format)
        value = change.value
        other[change.place] = other.new_tensor(value) if isinstance(value, tuple) else value
        # What is expanded has one element for many: no layout for values that differ.
        return other if 0 in tensor.stride() else in_layout_of(other, tensor)

    return _with_tensor(arguments, path, changed)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def in_memory_of_its_own(arguments: Mapping[str, object], path: str) -> dict[str, object]:
    """`arguments` with the same values in the tensor at `path`, each in a place of its own."""
    return _with_tensor(
        arguments, path, lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format)
    )


def _with_tensor(
    arguments: Mapping[str, object], path: str, make: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, object]:
    made = {}
    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        for at, (found, leaf) in enumerate(flatten_with_paths(value, name)):
            if found == path and isinstance(leaf, torch.Tensor):
                leaves[at] = make(leaf)
        made[name] = _pytree.tree_unflatten(leaves, spec)
    return made
