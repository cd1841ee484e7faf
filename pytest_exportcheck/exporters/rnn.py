"""Recurrent layers (GRU, LSTM) with a free number of steps, whatever was exported before.

`torch.onnx.export` swaps the Python kernels of ``aten.gru`` and ``aten.lstm`` for loops while it captures.
Two things are missing around it in torch 2.13: a capture made outside of it knows nothing of the loops, and
the kernel that an operator dispatched to stays in ``OpOverload._dispatch_cache`` after the swap, so that the
next capture in the process uses a stale one (pytorch/pytorch#189225, pytorch/pytorch#191855).

The one module that touches these internals (checked on torch 2.13); where they are absent nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["fresh_dispatch", "onnx_loops"]


def _recurrent_operators() -> list[Any]:
    names = ("gru.input", "gru.data", "lstm.input", "lstm.data")
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operator is not None:
            found.append(operator)
    return found


def _forget() -> None:
    for operator in _recurrent_operators():
        cache = getattr(operator, "_dispatch_cache", None)
        if isinstance(cache, dict):
            cache.clear()


@contextlib.contextmanager
def fresh_dispatch() -> Iterator[None]:
    """A block in which recurrent operators dispatch as in a fresh process, and that leaves nothing behind."""
    _forget()
    try:
        yield
    finally:
        _forget()


@contextlib.contextmanager
def onnx_loops() -> Iterator[None]:
    """The loops for GRU and LSTM that `torch.onnx.export` captures with."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_dispatch())
        try:
            from torch.export import _patches
        except ImportError:
            yield
            return
        for name in ("register_lstm_while_loop_decomposition", "register_gru_while_loop_decomposition"):
            loop = getattr(_patches, name, None)
            if loop is not None:
                stack.enter_context(loop())
        yield
