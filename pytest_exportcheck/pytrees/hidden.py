"""Tensors inside of objects that no pytree knows: no program can be given them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from .cloning import PLAIN, Unkept, slots_of

__all__ = ["hidden_tensors", "how_to_show"]

#: What is deeper inside of an object is left to the exporter.
_DEEPEST = 6


def hidden_tensors(leaf: Any, path: str) -> list[str]:
    """Paths of the tensors in a leaf that is no tensor: ``batch.mask``; weights and buffers of a module."""
    if isinstance(leaf, torch.Tensor):
        return []
    return list(_tensors(leaf, path, {}, _DEEPEST))


def _tensors(value: Any, path: str, seen: dict[int, Any], depth: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield path
        return
    if isinstance(value, (*PLAIN, Unkept)) or id(value) in seen or not depth:
        return
    seen[id(value)] = value
    if isinstance(value, torch.nn.Module):
        yield from (f"{path}.{name}" for name, _ in (*value.named_parameters(), *value.named_buffers()))
        return
    held: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        held.update(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        held.update(enumerate(value))
    else:
        held.update((name, getattr(value, name)) for name in slots_of(type(value)) if hasattr(value, name))
        held.update(getattr(value, "__dict__", {}))
    for name, item in held.items():
        yield from _tensors(item, f"{path}.{name}", seen, depth - 1)


def how_to_show(leaf: Any) -> str:
    """What to do, so that a program can be given the tensors in `leaf`."""
    name = type(leaf).__name__
    if isinstance(leaf, torch.nn.Module):
        return "make it a submodule of the model, so that what it holds are weights of the program"
    others = "or pass the tensors themselves"
    if isinstance(leaf, Mapping):
        return f"pass a plain dict, dict(...), {others}"
    if is_dataclass(leaf):
        return f"call torch.export.register_dataclass({name}) beside the class, {others}"
    return f"register the class with torch.utils._pytree.register_pytree_node({name}, ...), {others}"
