"""A dynamic axis that becomes a constant as an error where it happens, and not a guard at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from .patch import Patch

__all__ = ["FrozenAt", "StaticAxisError", "frozen_axes", "stop_if_static_patch"]


@dataclass(frozen=True)
class FrozenAt:
    """Where the size of the example was baked in.

    Attributes
    ----------
    frames:
        (code, line, last instruction) of every frame, the innermost first.
    axis:
        Whether a dynamic axis became a constant by this, which no export allows; else it was a number made of
        sizes (``range(x.shape[1] // 8)``).
    """

    frames: tuple[tuple[CodeType, int, int], ...]
    axis: bool


_MACHINERY = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("torch", "sympy", "pytest_exportcheck", "onnxscript", "onnx_ir")
)


class StaticAxisError(Exception):
    """A dynamic axis was made a constant while tracing.

    Attributes
    ----------
    symbol, value:
        The axis as torch calls it (``s77``), and its constant.
    sources:
        Where the symbol comes from: ``L['x'].size()[0]``.
    place:
        ``file:line`` of the model's or the user's code that did it; ``""`` if only machinery is on the stack.
    """

    def __init__(self, symbol: str, value: int, sources: list[str], place: str, line: str) -> None:
        self.symbol, self.value, self.sources, self.place = symbol, value, sources, place
        named = f"{symbol} ({', '.join(sources)})" if sources else symbol
        where = f"at {place}: {line}" if place else "outside the model's code"
        super().__init__(
            f"dynamic axis {named} becomes the constant {value} {where}\n"
            "make this line independent of the size, or leave the axis out of dynamic_shapes"
        )


def _raising(original: Any) -> Any:
    def _set_replacement(self: Any, a: Any, tgt: Any, msg: str) -> None:
        sources = _frozen(self, a, tgt)
        if sources:
            place, line = _place()
            raise StaticAxisError(str(a), int(tgt), sources, place, line)
        original(self, a, tgt, msg)

    return _set_replacement


def _frozen(env: Any, a: Any, tgt: Any) -> list[str]:
    """Where the symbol comes from, if a dynamic axis becomes a constant by this."""
    if not getattr(tgt, "is_Integer", False) or env.replacements.get(a) == tgt or str(a).startswith("u"):
        return []
    # A symbol without a source is data (``u0``), or made by the trace itself.
    return [_text(source) for source in env.var_to_sources.get(a, ())]


@contextlib.contextmanager
def frozen_axes() -> Iterator[list[FrozenAt]]:
    """While active, where sizes of the example are baked in is noted in the list, in order."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment: Any = ShapeEnv
    found: list[FrozenAt] = []
    replace, evaluate = environment._set_replacement, environment.evaluate_expr

    def _set_replacement(self: Any, a: Any, tgt: Any, msg: str) -> None:
        if _frozen(self, a, tgt):
            found.append(FrozenAt(_frames(), axis=True))
        replace(self, a, tgt, msg)

    def evaluate_expr(self: Any, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        free = getattr(orig_expr, "free_symbols", ())
        sized = any(self.var_to_sources.get(symbol) for symbol in free)
        if sized and not orig_expr.is_Symbol and not getattr(orig_expr, "is_Boolean", True):
            found.append(FrozenAt(_frames(), axis=False))
        return evaluate(self, orig_expr, *args, **kwargs)

    environment._set_replacement, environment.evaluate_expr = _set_replacement, evaluate_expr
    try:
        yield found
    finally:
        environment._set_replacement, environment.evaluate_expr = replace, evaluate


def _frames() -> tuple[tuple[CodeType, int, int], ...]:
    frame: FrameType | None = sys._getframe(2)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def _text(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _place() -> tuple[str, str]:
    """(file:line, its text) of the innermost frame that is the model's or the user's."""
    from torch._guards import TracingContext

    # In strict mode dynamo reads the model's bytecode, and its frames are those of the tracing context.
    traced = TracingContext.extract_stack() if TracingContext.try_get() is not None else []
    for frame in reversed([*traceback.extract_stack(), *traced]):
        if not frame.filename.startswith("<frozen") and not any(
            part in frame.filename for part in _MACHINERY
        ):
            return f"{frame.filename}:{frame.lineno}", frame.line or ""
    return "", ""


def stop_if_static_patch() -> Patch:
    """The patch behind ``torch_export_patches(stop_if_static=1)``."""
    return Patch(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv._set_replacement",
        _raising,
        why="torch.export reports a specialised axis at the end, without the line that did it",
        versions=(("torch", ">=2.13"),),
        wraps=True,
        name="stop_if_static",
    )
