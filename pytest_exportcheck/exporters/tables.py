"""The table of ONNX functions that `torch.onnx.export` makes at each call, made once per process instead.

`ONNXRegistry.from_torchlib` parses the source of some 500 functions at every export. What it makes depends on
the functions that are registered, on the operators that torch has, and on the opset: it is kept while these
are the same.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["only_known_functions", "shared_tables"]

_KNOWN = ("torch", "onnxscript", "transformers")

#: Modules that take functions, read by `_registered`.
_REGISTRIES = (
    "onnxscript.function_libs.torch_lib.registration",
    "torch.onnx._internal.exporter._torchlib._torchlib_registry",
)

_lock = threading.RLock()
_depth = 0
_tables: dict[int, _Table] = {}


@dataclass(frozen=True)
class _Table:
    """The table of one opset, and what it was made from.

    Attributes
    ----------
    registered:
        Names and functions in their order; kept, so that the identities stay theirs.
    absent:
        The names for which torch had no operator.
    functions:
        What `ONNXRegistry.functions` held.
    """

    registered: list[Any]
    absent: list[str]
    functions: dict[Any, list[Any]]

    def is_current(self) -> bool:
        """Whether it would be made the same way again."""
        registered = _registered()
        return (
            len(registered) == len(self.registered)
            and all(
                now is then or (isinstance(now, str) and now == then)
                for now, then in zip(registered, self.registered, strict=True)
            )
            and _absent(self.absent) == self.absent
        )


def _registered() -> list[Any]:
    from onnxscript.function_libs.torch_lib import ops, registration
    from torch.onnx._internal.exporter._torchlib import _torchlib_registry

    del ops  # its import registers
    found: list[Any] = list(_torchlib_registry.get_torchlib_ops())
    for name, overloaded in registration.default_registry.items():
        found += [name, *overloaded.overloads, None, *overloaded.complex]
    return found


def only_known_functions() -> bool:
    """Whether all functions that a conversion may call are of torch, onnxscript or transformers.

    A library or a conftest file may register ONNX functions and decompositions of its own.
    """
    import torch._decomp

    # Who registers a function imports one of the two registries for it.
    names = _registered() if any(name in sys.modules for name in _REGISTRIES) else []
    found = [each for each in names if each is not None and not isinstance(each, str)]
    functions = [getattr(each, "onnx_function", each) for each in found]
    for table in torch._decomp.global_decomposition_table.values():
        functions += table.values()
    return all(
        str(getattr(function, "__module__", "") or "").partition(".")[0] in _KNOWN for function in functions
    )


def _absent(names: list[str]) -> list[str]:
    from torch.onnx._internal.exporter import _registration

    logger = _registration.logger
    before, logger.disabled = logger.disabled, True
    try:
        return [name for name in names if _registration._get_overload(name) is None]
    finally:
        logger.disabled = before


def _shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """`from_torchlib`, which `make` is, with its work done once for each opset."""
    default = inspect.signature(make).parameters["opset_version"].default

    def from_torchlib(cls: type, opset_version: int = default) -> Any:
        table = _tables.get(opset_version)
        if table is None or not table.is_current():
            made = make(opset_version)
            registered = _registered()
            names = [name for name in registered if isinstance(name, str)]
            table = _tables[opset_version] = _Table(registered, _absent(names), _copied(made.functions))
        registry: Any = cls()
        registry._opset_version = opset_version
        # Lists of its own: an export registers the functions that its caller gave it.
        registry.functions = _copied(table.functions)
        return registry

    return from_torchlib


def _copied(functions: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: list(found) for key, found in functions.items()}


def _is_known(registry: Any) -> bool:
    """Whether the class is laid out as this module takes it to be; any other one is left alone."""
    method = vars(registry).get("from_torchlib")
    return (
        isinstance(method, classmethod)
        and method.__func__.__module__ == registry.__module__
        and list(inspect.signature(registry.from_torchlib).parameters) == ["opset_version"]
        and set(vars(registry())) == {"_opset_version", "functions"}
    )


@contextlib.contextmanager
def _without_torchvision_lines() -> Iterator[None]:
    """Without the eight lines of every table that some operators of torchvision are left out of it.

    pytest would show them below each failure. An operator that a model needs fails by its own name.
    """
    from torch.onnx._internal.exporter import _registration

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("torchvision is not installed. Skipping")

    _registration.logger.addFilter(other)
    try:
        yield
    finally:
        _registration.logger.removeFilter(other)


@contextlib.contextmanager
def shared_tables(share: bool = True) -> Iterator[None]:
    """ONNX exports inside the block share the table of ONNX functions with all earlier ones of the process.

    Re-entrant. The ONNX models are the same, byte for byte. Does nothing where torch lays the table out
    otherwise.

    Parameters
    ----------
    share:
        ``False``: each has a table of its own.
    """
    global _depth
    if not share:
        with _without_torchvision_lines():
            yield
        return
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry
    with _lock:
        original = vars(registry).get("from_torchlib")
        install = _depth == 0 and _is_known(registry)
        _depth += 1
        if install:
            registry.from_torchlib = classmethod(_shared(registry.from_torchlib))  # type: ignore[assignment, method-assign]
    try:
        with _without_torchvision_lines():
            yield
    finally:
        with _lock:
            _depth -= 1
            if install:
                registry.from_torchlib = original  # type: ignore[method-assign, assignment]
