"""What a trace leaves in a model and its code: fake tensors and symbolic sizes in tables that a call fills.

A later trace, or eager, would take them for its own. They are taken out, and nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .held import Place, contents_of, is_lru_cache, is_plain_object, places_of
from .state import OWN_ATTRIBUTES

__all__ = ["TraceRemains"]

#: What only a trace has.
_TRACED = (FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.Proxy)

#: How deep containers and objects are followed.
_DEPTH = 5


class TraceRemains:
    """Made before a model is traced.

    Parameters
    ----------
    module:
        The whole model. Parameters and buffers are not looked at.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # Alive and by identity: a table may be reached by several names.
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._spaces = [(label, place, dict(place.names())) for label, place in _spaces(module)]
        self._caches: list[tuple[Any, int]] = []
        for _, _, before in self._spaces:
            for value in before.values():
                if is_lru_cache(value):
                    self._caches.append((value, value.cache_info().misses))
                else:
                    self._remember(value, _DEPTH)

    def _remember(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._containers:
            return
        items = _items(value)
        if isinstance(items, Mapping):
            self._containers[id(value)] = (value, dict(items))
            items = list(items.values())
        elif isinstance(value, (MutableSequence, MutableSet)):
            self._containers[id(value)] = (value, items)
        for item in items:
            self._remember(item, depth - 1)

    def take_out(self) -> list[str]:
        """Put back what was there before the trace.

        Returns
        -------
        list
            Names of what held remains: ``global `TABLE` of net.py``.
        """
        found = [
            label.format(name)
            for label, place, _ in self._spaces
            for name, value in list(place.names().items())
            if _is_traced(value, _DEPTH)
        ]
        for container, before in self._containers.values():
            _clean(container, before)
        for _, place, before in self._spaces:
            for name, value in list(place.names().items()):
                if not _is_traced(value, _DEPTH):
                    continue
                if name in before:
                    place.bind(name, before[name])
                else:
                    place.drop(name)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                # What it holds cannot be seen.
                cache.cache_clear()
        return found


def _spaces(module: torch.nn.Module) -> Iterator[tuple[str, Place]]:
    for path, part in module.named_modules():
        held = vars(part)
        label = f"attribute `{path}.{{}}`" if path else "attribute `{}`"

        def names(held: dict[str, Any] = held) -> Mapping[str, Any]:
            return {name: value for name, value in held.items() if name not in OWN_ATTRIBUTES}

        yield label, Place(label, names, held.__setitem__, held.__delitem__)
    for place in places_of(module):
        yield place.label, Place(place.label, place.held, place.bind, place.drop)


def _items(value: Any) -> Mapping[Any, Any] | list[Any]:
    """What is in a container, or in an object of the user's; nothing for all else."""
    if isinstance(value, Mapping):
        # A mapping of transformers imports what it is asked for.
        return [] if type(value).__module__.partition(".")[0] == "transformers" else value
    if isinstance(value, (list, tuple, set, frozenset, MutableSequence)) and not isinstance(value, bytearray):
        return list(value)
    return (contents_of(value) or {}) if is_plain_object(value) else []


def _is_traced(value: Any, depth: int) -> bool:
    """Whether it is, or holds, something that only a trace has."""
    if isinstance(value, _TRACED):
        return True
    if isinstance(value, torch.Tensor):
        return bool(torch._is_functional_tensor(value))
    if not depth:
        return False
    items = _items(value)
    held = list(items.values()) if isinstance(items, Mapping) else items
    return any(_is_traced(item, depth - 1) for item in held)


def _clean(container: Any, before: Any) -> None:
    if isinstance(container, (MutableSequence, MutableSet)):
        if any(_is_traced(item, _DEPTH) for item in list(container)):
            container.clear()
            for item in before:
                container.append(item) if isinstance(container, MutableSequence) else container.add(item)
        return
    for name, value in list((_items(container) or {}).items()):  # type: ignore[union-attr]
        if not _is_traced(value, _DEPTH) and not _is_traced(name, 1):
            continue
        if isinstance(container, MutableMapping):
            if name in before:
                container[name] = before[name]
            else:
                del container[name]
        elif name in before:
            object.__setattr__(container, name, before[name])
        else:
            object.__delattr__(container, name)
