"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["importer"]


def importer(package: str, public: Mapping[str, str]) -> Callable[[str], object]:
    """The ``__getattr__`` of `package`; `public`: name -> module that has it, relative to the package."""

    def found(name: str) -> object:
        try:
            module = public[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(import_module(module if module.startswith(package) else f"{package}.{module}"), name)

    return found
