"""Whose code something is: of an installed distribution, of this package, or of somebody else."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
import typing
from typing import Any

import torch

__all__ = ["is_genuine", "is_installed", "is_installed_function", "is_known", "is_own"]

_PURELIB, _PLATLIB, _STDLIB, _PLATSTDLIB = (
    os.path.realpath(sysconfig.get_paths()[name]) + os.sep
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
)
#: The distribution of a file in there has a version, the file a checksum in its RECORD.
_TORCH = os.path.realpath(os.path.dirname(torch.__file__)) + os.sep
_INSTALLED = (_PURELIB, _PLATLIB, _STDLIB, _PLATSTDLIB, _TORCH)
#: Our own code is in every key with its content.
_OWN = os.path.realpath(os.path.dirname(os.path.dirname(__file__))) + os.sep


@functools.cache
def is_installed(filename: str) -> bool:
    """Whether a file belongs to the standard library or an installed distribution, or to this package."""
    if filename.startswith("<frozen "):
        return True
    path = os.path.realpath(filename)
    return path.startswith(_INSTALLED) or path.startswith(_OWN)


def is_own(filename: str) -> bool:
    """Whether a file belongs to this package."""
    return filename.startswith(_OWN)


def is_known(module: str) -> bool:
    """Whether a module is installed code, whose version, or content, is in every key."""
    found = sys.modules.get(module)
    if found is None:
        return False
    filename = getattr(found, "__file__", None)
    if filename is None:
        # Built in, or a namespace package of installed ones.
        paths = list(getattr(found, "__path__", ()))
        return module in sys.builtin_module_names or (bool(paths) and all(map(is_installed, paths)))
    return is_installed(filename)


def is_installed_function(function: types.FunctionType) -> bool:
    """Whether its code is installed code, or was made by it: the methods of a dataclass have no file."""
    filename = function.__code__.co_filename
    if filename == "<string>":
        name = str(function.__globals__.get("__name__", ""))
        # `collections.namedtuple` makes a module for its ``__new__``, which a digest of the code tells.
        return name.startswith("namedtuple_") or is_known(name)
    return is_installed(filename)


def is_genuine(item: Any) -> bool:
    """Whether an entry of an installed class or module is its own: no function from anywhere else."""
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    if isinstance(item, property):
        return all(part is None or is_genuine(part) for part in (item.fget, item.fset, item.fdel))
    if isinstance(item, types.FunctionType):
        return is_installed_function(item)
    if isinstance(item, types.MethodType):
        return is_genuine(item.__func__)
    if isinstance(item, type):
        return typing.cast(Any, item).__module__ not in sys.modules or is_known(item.__module__)
    return True
