"""The containers of an argument must be the same in every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ObserveError
from ..keypaths import root_of
from ..pytrees.caches import is_cache
from ..pytrees.paths import render_path

__all__ = ["InferenceError", "check_structure", "differing_contexts"]


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


def _keys(value: Any) -> str:
    keys = (_pytree.keystr(path).strip(".[]") for path, _ in _one_level(value))
    return f"{type(value).__module__}.{type(value).__qualname__} of {', '.join(keys)}"


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
        texts = [_describe(values[index]) for index in kinds.values()]
        if len(set(texts)) < len(texts):
            # Of one class and length: it is the names inside that differ.
            texts = [f"{text} ({_keys(values[i])})" for text, i in zip(texts, kinds.values(), strict=True)]
        seen = "; ".join(f"{text} in call {i}" for text, i in zip(texts, kinds.values(), strict=True))
        at = "" if "." not in path else f" at {path}"
        raise InferenceError(f"{where(root_of(path))} has a different structure{at} between calls: {seen}")
    first = next(iter(children.values()), {})
    for keys in first:
        column = {index: found[keys] for index, found in children.items()}
        check_structure(where, f"{path}.{_pytree.keystr(keys)}", column)


def differing_contexts(path: str, values: Mapping[int, Any]) -> list[str]:
    """What of a value no leaf tells and differs between calls, as sentences.

    torch.export takes only calls whose contexts equal those of its example, so that a counter there makes it
    refuse all others; an ONNX model has no contexts. Caches are left out: how they flatten is ours.

    Parameters
    ----------
    values:
        By call index.
    """
    nodes = {i: v for i, v in values.items() if type(v) in _pytree.SUPPORTED_NODES and not is_cache(v)}
    columns: dict[Any, dict[int, Any]] = {}
    kinds: dict[Any, dict[int, Any]] = {}
    for index, value in nodes.items():
        pairs, context = _one_level(value), _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[1]
        for keys, child in pairs:
            columns.setdefault(keys, {})[index] = child
        if type(value) not in _pytree.BUILTIN_TYPES:
            kinds.setdefault((type(value), tuple(keys for keys, _ in pairs)), {})[index] = context
    found = []
    for (kind, _), contexts in kinds.items():
        first = next(iter(contexts))
        other = next((i for i, c in contexts.items() if not _equal(c, contexts[first])), None)
        if other is not None:
            found.append(
                f"argument {path} is a {kind.__name__} whose pytree context differs between calls "
                f"({contexts[first]!r:.60} in call {first}, {contexts[other]!r:.60} in call {other}): "
                "torch.export takes only calls with the context of its example; keep out of the context what "
                "changes from call to call (a leaf may tell it), or give each context a graph of its own"
            )
    for keys, column in columns.items():
        found += differing_contexts(render_path(keys, path), column)
    return found


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception:  # a context that holds a tensor: torch.export cannot compare it either
        return False
