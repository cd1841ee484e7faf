"""Does a call show anything new? A few microseconds per call, for the calls beyond the limit.

A `Pattern` knows arguments, their sizes, which of the sizes that vary were always equal or the sum of two
others, and constants. What it covers adds nothing to an inference. Of a cache, layers that were alike so far
are compared with one another, which costs a tenth of looking at each. Plain loops: a generator costs more
than all of the comparisons it makes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees.cloning import PLAIN, Unkept

__all__ = ["Pattern"]

#: Values of one constant that are told apart; more of them are no news.
_MOST_CONSTANTS = 8

#: More sizes that vary than this have no sums.
_MOST_SIZES = 12

_CONSTANTS = (*PLAIN, slice)


class _Size:
    """Axes that vary and had the same size in every call.

    Attributes
    ----------
    now:
        Their size in the call that is looked at; ``None`` until one of them was seen.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: int | None = None


class _Anything:
    """Covers every value: what varies in kind is reported once and need not be looked at again."""

    def sizes(self, value: Any, found: _Sizes) -> None:
        """Add the size of every axis in `value`."""

    def covers(self, value: Any) -> bool:
        return True

    def absorb(self, value: Any) -> _Known:
        return self


class _Constants(_Anything):
    def __init__(self, value: Any) -> None:
        self.values = [value]

    def covers(self, value: Any) -> bool:
        kind = type(value)
        for known in self.values:  # noqa: SIM110
            if known is value or (type(known) is kind and known == value):
                return True
        return False

    def absorb(self, value: Any) -> _Known:
        if not isinstance(value, _CONSTANTS) and value is not None:
            # ``None`` in one call and a tensor in another: an argument that may be missing.
            return known_value(value) if self.values == [None] else _Anything()
        if not self.covers(value):
            self.values.append(value)
        return self if len(self.values) <= _MOST_CONSTANTS else _Anything()


class _Tensor(_Anything):
    def __init__(self, value: torch.Tensor) -> None:
        self.kind = type(value)
        self.dtype = value.dtype
        # Of each axis: the one it has, or what it shares with other axes.
        self.known: list[int | _Size] = list(value.shape)
        # The same if none varies: one comparison.
        self.fixed: tuple[int, ...] | None = tuple(value.shape)

    def covers(self, value: Any) -> bool:
        if value is None:
            return True
        if type(value) is not self.kind or value.dtype is not self.dtype:
            return False
        shape = value.shape
        if self.fixed is not None:
            return bool(shape == self.fixed)
        if len(shape) != len(self.known):
            return False
        for size, known in zip(shape, self.known):  # noqa: B905  # equal lengths
            if type(known) is _Size:
                if known.now is None:
                    known.now = size
                elif known.now != size:
                    return False
            elif known != size:
                return False
        return True

    def absorb(self, value: Any) -> _Known:
        if value is None:
            return self
        if type(value) is not self.kind or value.dtype is not self.dtype or value.dim() != len(self.known):
            return _Anything()
        self.known = [
            known if known == size else _Size() for size, known in zip(value.shape, self.known, strict=True)
        ]
        if self.fixed != tuple(value.shape):
            self.fixed = None
        return self

    def sizes(self, value: Any, found: _Sizes) -> None:
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                found[self, axis] = size


class _Items(_Anything):
    """A list, tuple, dict or model output."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.children = {key: known_value(item) for key, item in _children(value)}

    def covers(self, value: Any) -> bool:
        if value is None:
            return True
        if type(value) is not self.kind or len(value) not in (0, len(self.children)):
            return False
        for key, item in _children(value):
            known = self.children.get(key)
            if known is None or not known.covers(item):
                return False
        return True

    def absorb(self, value: Any) -> _Known:
        if value is None or (type(value) is self.kind and len(value) == 0):
            return self
        if type(value) is not self.kind:
            return _Anything()
        if not self.children:
            return _Items(value)
        if len(value) != len(self.children):
            return _Anything()
        for key, item in _children(value):
            known = self.children.get(key)
            self.children[key] = known_value(item) if known is None else known.absorb(item)
        return self

    def sizes(self, value: Any, found: _Sizes) -> None:
        for key, item in _children(value if type(value) is self.kind else ()):
            if key in self.children:
                self.children[key].sizes(item, found)


#: Of a tensor inside an object: attribute, key inside it if that is a container.
_Place = tuple[str, Any]

_number_of_elements = torch._C.TensorBase.numel


def _held(owner: Any, place: _Place) -> Any:
    name, key = place
    found = getattr(owner, name, None)
    if key is None or found is None:
        return found
    try:
        return found[key]
    except (KeyError, IndexError):
        return None


def _places(owner: Any) -> list[_Place]:
    """Where an object holds what may grow, or may be filled: ``None`` and empty containers too."""
    places: list[_Place] = []
    for name, value in getattr(owner, "__dict__", {}).items():
        if name == "layers":
            continue
        if value is None or isinstance(value, torch.Tensor):
            places.append((name, None))
        elif isinstance(value, (dict, list, tuple)):
            found = [key for key, item in _children(value) if item is None or isinstance(item, torch.Tensor)]
            places += [(name, key) for key in found] if value else [(name, None)]
    return places


class _Alike:
    """Tensors at one place of several layers that had one shape in every call: looked at together.

    Parameters
    ----------
    known:
        What is known of the first one.
    """

    def __init__(self, place: _Place, layers: list[int], known: _Tensor, count: int) -> None:
        name, key = place
        self.place, self.layers, self.known = place, layers, known
        self._pick = operator.itemgetter(*layers) if 1 < len(layers) < count else None
        self._attribute = operator.attrgetter(name)
        self._item = None if key is None else operator.itemgetter(key)

    def covers(self, layers: Sequence[Any]) -> bool:
        if len(self.layers) == 1:
            return self.known.covers(_held(layers[self.layers[0]], self.place))
        try:
            found = list(map(self._attribute, layers if self._pick is None else self._pick(layers)))
            if self._item is not None:
                found = list(map(self._item, found))
            # Half the price of the shapes: of layers that were alike, none has more on one axis and less on
            # another one.
            sizes = list(map(_number_of_elements, found))
        except (AttributeError, TypeError, LookupError):
            # Not all of them are there: what is missing is covered, as in a prompt.
            found = [_held(layers[index], self.place) for index in self.layers]
            return all(self.known.covers(value) for value in found)
        return sizes.count(sizes[0]) == len(sizes) and self.known.covers(found[0])


class _Cache(_Anything):
    """All of its layers; those that are alike are compared with the first of them only.

    Attributes
    ----------
    known:
        By layer (``None``: the cache itself) and place.
    """

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.count = -1
        #: Whether a call had one without layers.
        self.empty = False
        self.known: dict[tuple[int | None, _Place], _Known] = {}
        self._plan: tuple[list[_Alike], list[tuple[int | None, _Place, _Known]]] | None = None
        self.absorb(value)

    def _owners(self, value: Any) -> list[tuple[int | None, Any]]:
        return [(None, value), *enumerate(value.layers)]

    def covers(self, value: Any) -> bool:
        if value is None:
            return True
        if type(value) is not self.kind:
            return False
        layers = value.layers
        if not layers:
            return self.empty
        if len(layers) != self.count:
            return False
        if self._plan is None:
            self._plan = self._made_plan()
        alike, others = self._plan
        for group in alike:
            if not group.covers(layers):
                return False
        for index, place, known in others:
            if not known.covers(_held(value if index is None else layers[index], place)):
                return False
        return True

    def _made_plan(self) -> tuple[list[_Alike], list[tuple[int | None, _Place, _Known]]]:
        groups: dict[Any, list[int]] = {}
        others: list[tuple[int | None, _Place, _Known]] = []
        for (index, place), known in self.known.items():
            if index is not None and isinstance(known, _Tensor):
                groups.setdefault((place, known.kind, known.dtype, tuple(known.known)), []).append(index)
            else:
                others.append((index, place, known))
        alike = []
        for (place, *_), indices in groups.items():
            first = self.known[indices[0], place]
            assert isinstance(first, _Tensor)
            alike.append(_Alike(place, indices, first, self.count))
        return alike, others

    def absorb(self, value: Any) -> _Known:
        if value is None:
            return self
        if type(value) is not self.kind:
            return _Anything()
        if not value.layers:
            self.empty = True
            return self
        if len(value.layers) != self.count:
            self.count = len(value.layers)
            self.known = {}
        owners = dict(self._owners(value))
        for index, owner in owners.items():
            for place in _places(owner):
                # Before its first use a layer has ``None`` there, in every prompt.
                self.known.setdefault((index, place), _Constants(None))
        self.known = {
            (index, place): known.absorb(_held(owners[index], place))
            for (index, place), known in self.known.items()
        }
        self._plan = None
        return self

    def sizes(self, value: Any, found: _Sizes) -> None:
        if getattr(value, "layers", None) and len(value.layers) == self.count:
            owners = dict(self._owners(value))
            for (index, place), known in self.known.items():
                known.sizes(_held(owners[index], place), found)


class _Caches(_Anything):
    """An encoder-decoder cache: two caches."""

    names = ("self_attention_cache", "cross_attention_cache")

    def __init__(self, value: Any) -> None:
        self.children: list[_Known] = [known_value(getattr(value, name)) for name in self.names]

    def covers(self, value: Any) -> bool:
        if value is None:
            return True
        if not hasattr(value, self.names[0]):
            return False
        return self.children[0].covers(value.self_attention_cache) and self.children[1].covers(
            value.cross_attention_cache
        )

    def absorb(self, value: Any) -> _Known:
        if value is None:
            return self
        if not hasattr(value, self.names[0]):
            return _Anything()
        self.children = [
            child.absorb(getattr(value, name)) for name, child in zip(self.names, self.children, strict=True)
        ]
        return self

    def sizes(self, value: Any, found: _Sizes) -> None:
        for name, child in zip(self.names, self.children, strict=True):
            child.sizes(getattr(value, name, None), found)


class _Node(_Anything):
    """An object of a class that is registered as a pytree node.

    Attributes
    ----------
    mixed:
        Whether calls had several contexts: once is enough to know it.
    """

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        leaves, self.spec = _pytree.tree_flatten(value)
        self.leaves: list[_Known] = [known_value(leaf) for leaf in leaves]
        self.mixed = False

    def covers(self, value: Any) -> bool:
        if value is None:
            return True
        if type(value) is not self.kind:
            return False
        leaves, spec = _pytree.tree_flatten(value)
        if len(leaves) != len(self.leaves) or not (self.mixed or spec == self.spec):
            return False
        return all(known.covers(leaf) for known, leaf in zip(self.leaves, leaves, strict=True))

    def absorb(self, value: Any) -> _Known:
        if value is None:
            return self
        leaves, spec = _pytree.tree_flatten(value)
        if type(value) is not self.kind or len(leaves) != len(self.leaves):
            return _Anything()
        self.leaves = [known.absorb(leaf) for known, leaf in zip(self.leaves, leaves, strict=True)]
        self.mixed = self.mixed or spec != self.spec
        return self

    def sizes(self, value: Any, found: _Sizes) -> None:
        if type(value) is self.kind:
            for known, leaf in zip(self.leaves, _pytree.tree_leaves(value), strict=False):
                known.sizes(leaf, found)


class _Object(_Anything):
    def __init__(self, value: Any) -> None:
        self.kind = value.kind if isinstance(value, Unkept) else type(value)

    def covers(self, value: Any) -> bool:
        return type(value) is self.kind or value is None or value == Unkept(self.kind)

    def absorb(self, value: Any) -> _Known:
        return self if self.covers(value) else _Anything()


_Known = _Anything
_Sizes = dict[tuple[_Tensor, int], int]


def _children(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else enumerate(value)


def known_value(value: Any) -> _Known:
    """What a pattern knows of one value."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    if isinstance(value, _CONSTANTS):
        return _Constants(value)
    if isinstance(value, (dict, list, tuple)):
        return _Items(value)
    if hasattr(value, "self_attention_cache"):
        return _Caches(value)
    if isinstance(getattr(value, "layers", None), (list, tuple)) and type(value).__name__.endswith("Cache"):
        return _Cache(value)
    return _Node(value) if type(value) in _pytree.SUPPORTED_NODES else _Object(value)


class Pattern:
    """What calls have shown so far.

    Parameters
    ----------
    names:
        Names of the positions; a call with more of them is news.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._known: dict[str, _Known] = {}
        self._history: list[_Sizes] = []
        self._axes: dict[tuple[_Tensor, int], None] = {}
        self._sizes: list[_Size] = []
        self._sums: list[tuple[_Size, _Size, _Size]] = []

    def covers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call shows nothing new."""
        known = self._known
        if len(args) > len(self._names):
            return False
        for each in self._sizes:
            each.now = None
        for name, value in zip(self._names, args):  # noqa: B905  # fewer arguments than names is usual
            found = known.get(name)
            if found is None or not found.covers(value):
                return False
        for name, value in kwargs.items():
            found = known.get(name)
            if found is None or not found.covers(value):
                return False
        for total, one, other in self._sums:
            if None not in (total.now, one.now, other.now) and total.now != one.now + other.now:  # type: ignore[operator]
                return False
        return True

    def absorb(self, arguments: Mapping[str, Any]) -> None:
        """Learn from a call, given by name."""
        for name, value in arguments.items():
            found = self._known.get(name)
            self._known[name] = known_value(value) if found is None else found.absorb(value)

    def absorb_call(self, arguments: Mapping[str, Any]) -> None:
        """Learn from a whole call: its sizes belong together."""
        self.absorb(arguments)
        sizes: _Sizes = {}
        for name, value in arguments.items():
            self._known[name].sizes(value, sizes)
        self._history.append(sizes)
        self._axes.update(dict.fromkeys(sizes))
        self._relate()

    def _relate(self) -> None:
        """Find out which of the axes that vary had equal sizes in all calls, and which are sums."""
        equal: dict[tuple[int | None, ...], _Size] = {}
        for tensor, axis in self._axes:
            if axis < len(tensor.known) and type(tensor.known[axis]) is _Size:
                row = tuple(sizes.get((tensor, axis)) for sizes in self._history)
                tensor.known[axis] = equal.setdefault(row, _Size())
        self._sizes = list(equal.values())
        # Sums are looked for among a few sizes: of many, three fit by chance, and looking takes its time.
        self._sums = (
            []
            if len(equal) > _MOST_SIZES
            else [
                (equal[total], equal[one], equal[other])
                for one, other in itertools.combinations(equal, 2)
                for total in equal
                if _is_sum(total, one, other)
            ]
        )


def _is_sum(total: Sequence[int | None], one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    rows = [row for row in zip(total, one, other, strict=True) if None not in row]
    # A single call shows nothing.
    return len(rows) > 1 and all(a == b + c for a, b, c in rows)  # type: ignore[operator]
