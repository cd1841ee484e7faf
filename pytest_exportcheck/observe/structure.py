"""The containers of an argument must be the same in every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ObserveError
from ..keypaths import root_of
from ..pytrees.caches import is_cache

__all__ = ["InferenceError", "check_structure"]


class InferenceError(ObserveError, RuntimeError):
    """One graph cannot serve the calls; also a `RuntimeError`, as the observer's callers expect."""

    def __str__(self) -> str:
        return "\n".join([self.message, *self.details])


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _one_level(value: Any) -> list[tuple[Any, Any]]:
    pairs, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    return list(pairs)


def check_structure(where: Callable[[str], str], path: str, values: Mapping[int, Any]) -> None:
    """Check that a container has the same children in every call that fills it.

    Parameters
    ----------
    where:
        Argument name -> how to call it in a message.
    path:
        Of the value, for messages.
    values:
        By call index; ``None`` where the call has none.

    Raises
    ------
    InferenceError
        Containers differ in class or children.
    """
    there = {index: value for index, value in values.items() if value is not None and not is_cache(value)}
    nodes = {
        index: value
        for index, value in there.items()
        if type(value) in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value)
    }
    if not nodes:
        return
    children: dict[int, dict[Any, Any]] = {}
    for index, value in nodes.items():
        pairs = _one_level(value)
        if pairs:
            children[index] = dict(pairs)
    # An empty container is one that the call does not fill.
    kinds: dict[Any, int] = {}
    for index, value in there.items():
        if index in children:
            kinds.setdefault((type(value), frozenset(children[index])), index)
        elif index not in nodes:
            kinds.setdefault(type(value), index)
    if len(kinds) > 1:
        seen = "; ".join(f"{_describe(values[index])} in call {index}" for index in kinds.values())
        at = "" if "." not in path else f" at {path}"
        raise InferenceError(f"{where(root_of(path))} has a different structure{at} between calls: {seen}")
    first = next(iter(children.values()), {})
    for keys in first:
        column = {index: found[keys] for index, found in children.items()}
        check_structure(where, f"{path}.{_pytree.keystr(keys)}", column)
