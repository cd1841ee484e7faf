"""Imports that are made late: public names when they are asked for, large packages when they are used."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

__all__ = ["importer", "large_imports"]


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import inside without looking for garbage: a million objects that stay are looked at again and again.

    Done already, it costs nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def importer(package: str, public: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of `package`; `public`: name -> module that has it, relative to the package."""

    def found(name: str) -> object:
        try:
            module = public[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(import_module(module if module.startswith(package) else f"{package}.{module}"), name)

    return found
