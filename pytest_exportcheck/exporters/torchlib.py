"""The table of ONNX translations, read once for each process and not for each export.

`torch.onnx.export` reads and parses the source of some 500 functions of onnxscript anew every time: half a
second, most of what the export of a small model takes (torch 2.13, onnxscript 0.7).

The one module that touches this table (private); where its parts are absent nothing is done.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator
from typing import Any

__all__ = ["internals_missing", "translations_once"]

#: The last table that was read, under what it was read from.
_TABLE: dict[Hashable, Any] = {}


def _parts() -> tuple[Any, Any, Any]:
    """(class of the table, registry of onnxscript, what torch itself brings); `ImportError` if they moved."""
    from onnxscript.function_libs.torch_lib import ops, registration  # noqa: F401  # `ops` fills the registry
    from torch.onnx._internal.exporter import _registration
    from torch.onnx._internal.exporter._torchlib import _torchlib_registry

    return _registration.ONNXRegistry, registration.default_registry, _torchlib_registry.get_torchlib_ops


def internals_missing() -> str | None:
    """What this module needs and does not find, ``None`` if it can do its work."""
    try:
        table, registry, own = _parts()
        if not isinstance(vars(table).get("from_torchlib"), classmethod):
            return "ONNXRegistry.from_torchlib"
        _source(registry, own)
        functions = table().functions
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if isinstance(functions, dict) else "ONNXRegistry.functions"


def _source(registry: Any, own: Any) -> Hashable:
    """What a table is made of. A function that somebody registers later makes another one."""
    theirs = tuple(
        (name, *map(id, functions.overloads), None, *map(id, functions.complex))
        for name, functions in registry.items()
    )
    return theirs, tuple(map(id, own()))


@contextlib.contextmanager
def translations_once() -> Iterator[None]:
    """Inside the block `torch.onnx.export` gets a copy of the table that was read first."""
    if internals_missing() is not None:
        yield
        return
    table, registry, own = _parts()
    original = vars(table)["from_torchlib"]

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        key = (cls, args, tuple(kwargs.items()), _source(registry, own))
        if key not in _TABLE:
            read = original.__func__(cls, *args, **kwargs)
            _TABLE.clear()
            _TABLE[key] = read
        copied = copy.copy(_TABLE[key])
        # An export adds its own translations to its table.
        copied.functions = {name: list(entries) for name, entries in copied.functions.items()}
        return copied

    table.from_torchlib = classmethod(from_torchlib)
    try:
        yield
    finally:
        table.from_torchlib = original
