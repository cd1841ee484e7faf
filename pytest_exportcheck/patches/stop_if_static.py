"""A dynamic axis that becomes a constant as an error where it happens, and not a guard at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from .patch import Patch

__all__ = ["FrozenAt", "StaticAxisError", "frozen_axes", "stop_if_static_patch"]

#: Where a dynamic axis became a constant: (code, line, last instruction) of every frame, the innermost first.
FrozenAt = tuple[tuple[CodeType, int, int], ...]

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
    """While active, where each dynamic axis becomes a constant is noted in the list, in order."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[FrozenAt] = []
    original = ShapeEnv._set_replacement

    def _set_replacement(self: Any, a: Any, tgt: Any, msg: str) -> None:
        if _frozen(self, a, tgt):
            frame: FrameType | None = sys._getframe(1)
            frames = []
            while frame is not None:
                frames.append((frame.f_code, frame.f_lineno, frame.f_lasti))
                frame = frame.f_back
            found.append(tuple(frames))
        original(self, a, tgt, msg)

    ShapeEnv._set_replacement = _set_replacement  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]


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
