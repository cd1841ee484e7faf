"""What an object of a Python class, or a function, holds, as far as attributes show it."""

from __future__ import annotations

import collections
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["attributes_of", "state_of_instance"]

#: What a process makes up: the hash of a configuration's content, with text in it (transformers 5.24).
_OF_A_PROCESS = {"_original_object_hash"}

#: Of functions: the address of a wrapper (`torch.compiler.disable`), what is told by itself, and what
#: `torch.onnx` keeps there once a conversion has asked for it.
_OF_A_WRAPPER = {"_torchdynamo_wrapper_id", "__wrapped__", "_pt_onnx_signature"}


def attributes_of(function: types.FunctionType) -> dict[str, Any]:
    """What was set on a function, which its code may read; not what it wraps."""
    return {key: item for key, item in vars(function).items() if key not in _OF_A_WRAPPER}


def state_of_instance(value: Any) -> dict[str, Any] | None:
    """What an object of a Python class holds; ``None`` for one that is written in C and tells nothing."""
    state: dict[str, Any] = {}
    readable = False
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__")
        if slots is not None:
            readable = True
            for name in (slots,) if isinstance(slots, str) else slots:
                slot = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") else name
                if name not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    state[slot] = getattr(value, slot)
        elif cls is not object and not _is_python(cls):
            containers = (list, tuple, dict, set, frozenset, collections.deque, collections.OrderedDict)
            if cls not in (*containers, int, float, complex, str, bytes, types.SimpleNamespace):
                return None
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        readable = True
        state.update({key: item for key, item in own.items() if key not in _OF_A_PROCESS})
    if not readable and type(value) is not object:
        return None
    if inspect.isgenerator(value) or isinstance(value, (Iterator, itertools.count)):
        return None
    return state


def _is_python(cls: type) -> bool:
    """Whether a class statement made it: one that is written in C may hold what no attribute shows."""
    if not cls.__flags__ & 1 << 9:  # Py_TPFLAGS_HEAPTYPE
        return False
    module = sys.modules.get(cls.__module__)
    # A module beside a spec is put aside while its code does not run.
    return module is None or str(getattr(module, "__file__", None) or "").endswith(".py")
