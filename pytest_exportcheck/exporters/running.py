"""Which module of the model runs, asked from inside a capture.

The one module that touches what dynamo reads with (private, read with torch 2.13): in strict mode it reads
the bytecode of the model, whose own frames are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

__all__ = ["running_modules"]

_TRANSLATORS = "torch._dynamo.symbolic_convert"


def running_modules(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """The modules whose methods run in `frame` and further out, the innermost first."""
    while frame is not None:
        names = frame.f_code.co_varnames[:1]
        first = frame.f_locals.get(names[0]) if names else None
        # By its type: other objects, such as a proxy, answer to every name.
        if type(first).__module__ == _TRANSLATORS:
            yield from _translated(first)
            return
        if isinstance(first, torch.nn.Module):
            yield first
        frame = frame.f_back


def _translated(translator: Any) -> Iterator[torch.nn.Module]:
    """The same for the functions that dynamo reads: each knows the one that calls it."""
    while translator is not None:
        names = translator.f_code.co_varnames[:1]
        first = _value(translator.symbolic_locals.get(names[0])) if names else None
        if isinstance(first, torch.nn.Module):
            yield first
        translator = getattr(translator, "parent", None)


def _value(variable: object) -> object:
    """What a variable of dynamo stands for, where it is at hand: its properties compute, and may raise."""
    held = vars(variable) if hasattr(variable, "__dict__") else {}
    cache = held.get("_cache")  # of one that was not looked at yet
    return held.get("value", getattr(cache, "value", None))
