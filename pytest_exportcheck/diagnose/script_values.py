"""Recorded arguments as Python source: tensors become names, the rest literals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..pytrees import flatten_with_paths

__all__ = ["CACHE_HELPERS", "CannotWriteError", "Values", "dynamic_axes"]

#: What the source of a cache calls; attributes of transformers 5.20 to 5.24.
CACHE_HELPERS = '''
def cache_of(*layers):
    """A DynamicCache from (class, sliding window or None, keys, values), without keys: an empty layer."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    for kind, window, keys, values in layers:
        layer = kind(window) if window is not None else kind()
        if keys is not None:
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            if window is not None:
                layer.cumulative_length = keys.shape[-2]
        cache.layers.append(layer)
    return cache
'''


class CannotWriteError(Exception):
    """Something of the failure cannot be put into a script; the text says what."""


class Values:
    """Collects what the source of some arguments needs.

    Attributes
    ----------
    tensors:
        Name in the source -> tensor.
    imports:
        Lines.
    caches:
        Whether `CACHE_HELPERS` are called.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.imports: dict[str, None] = {}
        self.caches = False

    def imports_but(self, module: str) -> list[str]:
        """The lines without those for what `module`, which is embedded in the script, defines itself."""
        return [line for line in self.imports if not module or not line.startswith(f"from {module} import ")]

    def source(self, value: Any, path: str) -> str:
        """An expression for `value`.

        Raises
        ------
        CannotWriteError
            It is of a class that has no literal.
        """
        if isinstance(value, torch.Tensor):
            name = self._name(path)
            self.tensors[name] = value
            return name
        if isinstance(value, float):
            return repr(value) if value == value and abs(value) != float("inf") else f"float('{value}')"
        if value is None or type(value) in (bool, int, str, bytes):
            return repr(value)
        if isinstance(value, torch.dtype | torch.device):
            return repr(value) if isinstance(value, torch.dtype) else f"torch.{value!r}"
        if _is_namedtuple(value):
            fields = zip(value._fields, value, strict=True)
            return f"{self._class(value)}({self._keywords(fields, path)})"
        if isinstance(value, list | tuple):
            items = [self.source(item, f"{path}.{k}") for k, item in enumerate(value)]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self.source(v, f'{path}.{k}')}" for k, v in value.items()) + "}"
        if (cache := self._cache(value, path)) is not None:
            return cache
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields_ = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
            return f"{self._class(value)}({self._keywords(fields_, path)})"
        raise CannotWriteError(f"the argument {path} holds a {type(value).__name__}, which has no literal")

    def _name(self, path: str) -> str:
        """Unique, and the same for the same path of another call."""
        name = re.sub(r"\W+", "_", path).strip("_")
        if not name or name[0].isdigit() or name in ("self", "torch", "flat"):
            name = f"x_{name}"
        if name in self.tensors:
            raise CannotWriteError(f"two tensors would be called {name}")
        return name

    def _keywords(self, fields: Any, path: str) -> str:
        return ", ".join(f"{k}={self.source(v, f'{path}.{k}')}" for k, v in fields)

    def _class(self, value: Any) -> str:
        kind = value if isinstance(value, type) else type(value)
        if "<" in kind.__qualname__ or "." in kind.__qualname__:
            raise CannotWriteError(f"the class {kind.__qualname__} cannot be imported")
        self.imports[f"from {kind.__module__} import {kind.__name__}"] = None
        return kind.__name__

    def _cache(self, value: Any, path: str) -> str | None:
        from transformers import cache_utils as c

        if type(value) is c.EncoderDecoderCache:
            parts = [value.self_attention_cache, value.cross_attention_cache]
            self_, cross = (
                self.source(part, f"{path}.{name}")
                for part, name in zip(parts, ("own", "cross"), strict=True)
            )
            return f"{self._class(value)}({self_}, {cross})"
        if type(value) is not c.DynamicCache:
            return None
        self.caches = True
        layers = []
        for number, layer in enumerate(value.layers):
            if type(layer) not in (c.DynamicLayer, c.DynamicSlidingWindowLayer):
                raise CannotWriteError(f"{path} has a layer of class {type(layer).__name__}")
            pair = (layer.keys, layer.values) if layer.is_initialized else (None, None)
            texts = [
                self.source(v, f"{path}_{number}_{n}") for v, n in zip(pair, ("key", "value"), strict=True)
            ]
            window = getattr(layer, "sliding_window", None)
            layers.append(f"({self._class(layer)}, {window!r}, {', '.join(texts)})")
        return f"cache_of({', '.join(layers)})"


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def dynamic_axes(
    arguments: Mapping[str, Any], names: Mapping[str, torch.Tensor], shapes: Any
) -> dict[str, list[int]]:
    """Name in the source -> dynamic axes; tensors are told by identity."""
    axes = {}
    for root, value in arguments.items():
        for path, leaf in flatten_with_paths(value, root):
            found = shapes.leaves.get(path)
            if isinstance(leaf, torch.Tensor) and found is not None and getattr(found, "dynamic", None):
                axes[id(leaf)] = sorted(found.dynamic)
    return {name: axes[id(tensor)] for name, tensor in names.items() if id(tensor) in axes}
