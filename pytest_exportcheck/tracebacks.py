"""Of a traceback what a person reads: their own frames, the model's, and the one that raised."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from .plurals import counted

__all__ = ["OWN", "frame_line", "is_machinery", "one_line", "user_lines"]

#: Packages whose frames say little about where a model is refused.
_MACHINERY = ("torch", "onnxscript", "onnx_ir", "onnxruntime", "onnx", "sympy", "_pytest", "pytest", "pluggy")

#: Where the files of this package are.
OWN = str(Path(__file__).resolve().parent) + os.sep
_STANDARD = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

#: So many of the user's frames are shown, the innermost ones, and so many lines of what was raised.
_MOST_FRAMES = 6
_MOST_LINES = 12


def user_lines(error: BaseException) -> list[str]:
    """What was raised, if it is more than a line, and `frame_line` of each frame of the user's code.

    Libraries have two frames at most: the innermost one of a model (transformers), and the one that raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    read = [at for at, frame in enumerate(frames) if not is_machinery(frame.filename)]
    users = [at for at in read if not any(folder in frames[at].filename for folder in _INSTALLED)]
    shown = {*users[-_MOST_FRAMES:], *read[-1:]}
    if frames and not frames[-1].filename.startswith(OWN):
        shown.add(len(frames) - 1)
    # The first line is in the message already.
    raised = [line for text in traceback.format_exception_only(error) for line in text.rstrip().splitlines()]
    if len(raised) == 1:
        raised = []
    if len(raised) > _MOST_LINES:
        raised = [*raised[:_MOST_LINES], f"and {counted(len(raised) - _MOST_LINES, 'more line')}"]
    return [*raised, *(frame_line(frames[at]) for at in sorted(shown))]


def one_line(error: BaseException) -> str:
    """``ValueError: the first line of its message``."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def frame_line(frame: traceback.FrameSummary) -> str:
    """``at nets.py:24 in build: return Net()``."""
    code = f": {frame.line}" if frame.line else ""
    return f"at {frame.filename}:{frame.lineno} in {frame.name}{code}"


def is_machinery(filename: str) -> bool:
    """Whether code of this file belongs to Python, torch, an exporter, a runtime, pytest, or to us."""
    if filename.startswith(("<", OWN)):
        return True
    # Packages are told by where they are: a folder of the user's may be called torch, too.
    if any(filename.startswith(root) for name in _MACHINERY for root in _roots(name)):
        return True
    if any(folder in filename for folder in _INSTALLED):
        return any(f"{folder}{name}{os.sep}" in filename for folder in _INSTALLED for name in _MACHINERY)
    return os.path.realpath(filename).startswith(_STANDARD)


def _roots(name: str) -> Iterable[str]:
    return (path + os.sep for path in getattr(sys.modules.get(name), "__path__", ()))
