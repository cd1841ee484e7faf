"""What was changed inside objects that stayed where they were.

Functions given other code or defaults, containers of classes given other entries.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["Insides", "plain_container"]

_NAMES = ("__code__", "__defaults__", "__kwdefaults__")
_PARTS = operator.attrgetter(*_NAMES)
_KEYWORDS = operator.attrgetter("__kwdefaults__")
_CONTAINERS = (list, dict, set)
_PLAIN = (bool, int, float, str, bytes, type(None))


def plain_container(value: Any) -> bool:
    """Whether it is a list, set or dict of constants, to which equality says everything."""
    if type(value) not in _CONTAINERS:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(issubclass(kind, _PLAIN) for kind in {*map(type, items)})


class Insides:
    """The insides of functions and containers, as they are when this is made.

    Parameters
    ----------
    functions, containers:
        (place, object).
    """

    def __init__(
        self,
        functions: Iterable[tuple[str, types.FunctionType]],
        containers: Iterable[tuple[str, Any]],
    ) -> None:
        found = [*functions]
        self._places = [place for place, _ in found]
        self._functions = [function for _, function in found]
        self._parts = [*map(_PARTS, self._functions)]
        self._keywords = [
            (k, dict(found)) for k, found in enumerate(map(_KEYWORDS, self._functions)) if found
        ]
        self._containers = [(place, value, value.copy()) for place, value in containers]

    def changes(self) -> Iterator[tuple[str, Any, Any, Callable[[], None]]]:
        """(place, what was there, what is there, what puts it back)."""
        now = [*map(_PARTS, self._functions)]
        every = itertools.chain.from_iterable
        if not all(map(operator.is_, every(now), every(self._parts))):
            for place, function, old, new in zip(
                self._places, self._functions, self._parts, now, strict=True
            ):
                for name, was, value in zip(_NAMES, old, new, strict=True):
                    if was is not value:
                        yield f"{place}.{name}", was, value, functools.partial(setattr, function, name, was)
        for k, keywords in self._keywords:
            held = self._parts[k][2]
            if not _same(held, keywords):
                yield f"{self._places[k]}.__kwdefaults__", keywords, held, _refill(held, keywords)
        for place, value, copy in self._containers:
            if not _same(value, copy):
                yield place, copy, value, _refill(value, copy)


def _same(one: Any, other: Any) -> bool:
    """By identity of what is in them, and by equality of constants: a value of the user's may not compare."""
    if len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return [*one] == [*other] and all(map(_is, one.values(), other.values()))
    if isinstance(one, set):
        return bool(one == other)
    return all(map(_is, one, other))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def _refill(held: Any, with_: Any) -> Callable[[], None]:
    def put_back() -> None:
        held.clear()
        held.extend(with_) if isinstance(held, list) else held.update(with_)

    return put_back
