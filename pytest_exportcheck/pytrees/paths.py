"""Leaves with their paths: ``logits``, ``cache.layers.0.keys``, ``images.1``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path

from ..keypaths import key_text
from .caches import CacheKey

__all__ = ["flatten_with_paths", "is_constant", "render_path", "same_constant"]


def render_path(keys: Sequence[Any], root: str = "") -> str:
    """Text of a key path of torch's pytree, e.g. ``cache.layers.0.keys``."""
    parts: list[str] = [root] if root else []
    for key in keys:
        if isinstance(key, CacheKey):
            parts.append(key.path)
        elif isinstance(key, MappingKey):
            parts.append(key_text(key.key))
        elif isinstance(key, SequenceKey):
            parts.append(str(key.idx))
        elif isinstance(key, GetAttrKey):
            parts.append(key.name)
        else:
            parts.append(str(key).strip(".[]'"))
    return ".".join(parts)


def flatten_with_paths(value: Any, root: str = "") -> list[tuple[str, Any]]:
    """(path, leaf) for every leaf of `value`, in flatten order; ``None`` is a leaf.

    A bare leaf has the path `root` (or ``output`` if there is none).
    """
    pairs, _ = tree_flatten_with_path(value)
    return [(render_path(keys, root) or "output", leaf) for keys, leaf in pairs]


def is_constant(leaf: Any) -> bool:
    """True for leaves that are no tensors but are part of what was called: numbers, strings, booleans."""
    return isinstance(leaf, (bool, int, float, complex, str, bytes)) or leaf is None


def same_constant(first: Any, second: Any) -> bool:
    """Whether two constants mean the same: of one type, and equal or equal attribute by attribute.

    ``==`` alone is not enough: NaN differs from itself, ``True`` equals 1, arrays compare by element, and
    objects without ``__eq__`` compare by identity, which a recorded copy never has.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
        )
    if isinstance(first, (list, tuple, dict)):
        return _same_items(first, second)
    if isinstance(first, (float, complex)):
        # 1 / -0.0 is not 1 / 0.0, and NaN differs from itself: the texts tell both.
        return repr(first) == repr(second)
    if hasattr(first, "__array__"):
        return getattr(first, "dtype", None) == getattr(second, "dtype", None) and repr(
            first.tolist()
        ) == repr(second.tolist())
    if getattr(type(first), "__eq__", None) is object.__eq__ and hasattr(first, "__dict__"):
        return _same_items(vars(first), vars(second))
    if is_dataclass(first):
        # Its own `==` compares tuples of fields, which raises for tensors.
        return all(same_constant(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
    return bool(first == second)


def _same_items(first: Any, second: Any) -> bool:
    if len(first) != len(second):
        return False
    if isinstance(first, dict):
        return all(key in second and same_constant(value, second[key]) for key, value in first.items())
    return all(same_constant(a, b) for a, b in zip(first, second, strict=True))
