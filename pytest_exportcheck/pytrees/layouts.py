"""What is registered as a pytree node, by whom, and in which layout: for messages and for people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Registration", "describe_layout"]

#: Layouts of a cache of two layers, by what its children are: k and v are tensors, numbered by layer.
_KNOWN = {
    "k0 v0 k1 v1": "keys and values, layer by layer",
    "[k0 k1] [v0 v1]": "a list of keys and a list of values",
    "k0 k1 v0 v1": "all keys, then all values",
}

#: With these the ONNX exporter of torch 2.13 fails on every model that is given or returns the cache.
_BREAKS_ONNX = frozenset({"a list of keys and a list of values"})


@dataclass(frozen=True)
class Registration:
    """How one class flattens.

    Attributes
    ----------
    owner:
        The module that registered it.
    layout:
        In words; ``""`` where it is not known.
    breaks_onnx:
        Whether ONNX exports are known to fail with this layout.
    """

    cls: type
    owner: str
    layout: str
    breaks_onnx: bool = False

    def __str__(self) -> str:
        layout = f": {self.layout}" if self.layout else ""
        broken = ", with which ONNX exports fail" if self.breaks_onnx else ""
        return f"{self.cls.__module__}.{self.cls.__qualname__} by {self.owner}{layout}{broken}"


def describe_layout(cls: type, flatten: Callable[[Any], tuple[Any, Any]]) -> Registration:
    """Who registered `cls` with `flatten`, and what a cache of two layers becomes (``DynamicCache`` only)."""
    owner = str(getattr(flatten, "__module__", None) or "unknown")
    layout = _layout(cls, flatten)
    return Registration(cls, owner, layout, layout in _BREAKS_ONNX)


def _layout(cls: type, flatten: Callable[[Any], tuple[Any, Any]]) -> str:
    module = sys.modules.get("transformers.cache_utils")
    if module is None or cls is not module.DynamicCache:
        return ""
    probe = module.DynamicCache()
    names = {}
    for layer in range(2):
        key, value = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
        probe.update(key, value, layer)
        held = probe.layers[layer]
        names.update({id(held.keys): f"k{layer}", id(held.values): f"v{layer}"})
    try:
        children, _ = flatten(probe)
    except Exception as error:  # foreign code on a cache it may not expect
        return f"unknown ({type(error).__name__} on a cache of two layers)"

    def text(item: Any) -> str:
        if isinstance(item, (list, tuple)):
            return f"[{' '.join(map(text, item))}]"
        return names.get(id(item), type(item).__name__)

    shown = " ".join(map(text, children))
    return _KNOWN.get(shown, f"another one ({shown})")
