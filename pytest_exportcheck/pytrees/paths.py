"""Leaves with their paths: ``logits``, ``cache.layers.0.keys``, ``images.1``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path

from ..keypaths import key_text
from .caches import CacheKey
from .cloning import Unkept

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


#: What was compared, by identity; held, so that no other object is given the same one.
_Pairs = dict[tuple[int, int], tuple[Any, Any]]


def same_constant(first: Any, second: Any) -> bool:
    """Whether two constants mean the same: of one type, and equal or equal part by part.

    ``==`` alone is not enough: NaN differs from itself, ``True`` equals 1, arrays compare by element,
    containers of tensors have no truth value, and objects without ``__eq__`` compare by identity, which a
    recorded copy never has. Sources of random numbers are the same wherever they have got to. Of an object of
    which only the class was kept (`Unkept`), the class is compared.
    """
    return _same(first, second, {})


def _same(first: Any, second: Any, compared: _Pairs) -> bool:
    if first is second:
        return True
    if isinstance(first, Unkept) or isinstance(second, Unkept):
        return _kind(first) is _kind(second)
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return bool(
            first.shape == second.shape
            and first.dtype == second.dtype
            and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
        )
    if isinstance(first, (float, complex)):
        # 1 / -0.0 is not 1 / 0.0, and NaN differs from itself: the texts tell both.
        return repr(first) == repr(second)
    if is_constant(first):
        return bool(first == second)
    if isinstance(first, torch.Generator):
        return bool(first.device == second.device)
    if isinstance(first, random.Random) or type(first).__module__.startswith("numpy.random"):
        return True
    if (id(first), id(second)) in compared:
        return True  # an object that holds itself: decided by the rest
    compared[id(first), id(second)] = (first, second)
    if isinstance(first, (list, tuple, dict)):
        return _same_items(first, second, compared)
    if hasattr(first, "__array__"):
        return getattr(first, "dtype", None) == getattr(second, "dtype", None) and _same(
            first.tolist(), second.tolist(), compared
        )
    if isinstance(first, FunctionType):
        return _same(_function_parts(first), _function_parts(second), compared)
    if getattr(type(first), "__eq__", None) is not object.__eq__ and not is_dataclass(first):
        with contextlib.suppress(Exception):  # of what it holds, some has no truth value
            if first == second:
                return True
    return _same(_parts(first), _parts(second), compared)


def _kind(value: Any) -> type:
    return value.kind if isinstance(value, Unkept) else type(value)


def _function_parts(function: FunctionType) -> Any:
    # Not by identity: a lambda inside the caller's code is a new one in every call.
    closure = [cell.cell_contents for cell in function.__closure__ or () if not _is_unset(cell)]
    return [[function.__code__], function.__defaults__, function.__kwdefaults__, closure]


def _is_unset(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _parts(value: Any) -> Any:
    """What an object is made of, as `copy` and `pickle` see it; itself if they do not."""
    if isinstance(value, CodeType):
        return id(value)
    try:
        made = value.__reduce_ex__(4)
    except Exception:
        made = getattr(value, "__dict__", None)
        return id(value) if made is None else made
    if isinstance(made, str):
        return [made, getattr(value, "__module__", None)]
    # Iterators over items of a list and of a dict come last.
    return [list(made[:3]), *(list(items) for items in made[3:5] if items is not None)]


def _same_items(first: Any, second: Any, compared: _Pairs) -> bool:
    if len(first) != len(second):
        return False
    if isinstance(first, dict):
        return all(key in second and _same(value, second[key], compared) for key, value in first.items())
    return all(_same(a, b, compared) for a, b in zip(first, second, strict=True))
