"""Control-flow operators of torch, captured as if nothing had been captured before.

Each of them compiles a function of its own, and dynamo keeps what it compiled. A second capture in the
process then asks the guards of the first one whether they hold, with sizes that are symbols: that makes the
sizes constants (torch 2.13). The verdict of an export must not depend on the one before it.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch._higher_order_ops import scan as _scan

__all__ = ["forget_captures", "scan"]


def forget_captures(operator: Any) -> None:
    """Drop what dynamo keeps of earlier calls of `operator`, unless dynamo is reading this code itself."""
    if not torch.compiler.is_dynamo_compiling():
        from torch._dynamo.eval_frame import remove_from_cache

        for code in operator.__code__.co_consts:
            if isinstance(code, CodeType):
                remove_from_cache(code)


def scan(combine_fn: Any, init: Any, xs: Any) -> Any:
    """`torch._higher_order_ops.scan` along axis 0."""
    forget_captures(_scan)
    return _scan(combine_fn, init, xs)
