"""From the exception of a failed export to the branch that stopped it, and to the function it is in."""

from __future__ import annotations

import ast
import dis
import gc
import inspect
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import TypeGuard

import torch

from ..stop_if_static import FrozenAt
from .source import is_made
from .values import Place, RewriteRefused, Site

__all__ = ["functions_of", "is_data_dependent", "iterates", "locate", "where_frozen"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CAPTURE = os.path.join(_TORCH, "export", "_trace.py")
#: An operator gives a Python value: ``torch.equal``, ``torch.allclose``.
_ANSWERS = "DataDependentOutputException"
_OWN = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True)
class _Frame:
    place: Place
    name: str
    code: CodeType | None


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, the first cause first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found[::-1]


def is_data_dependent(error: BaseException) -> bool:
    """Whether an export failed because Python code asked for the value of a tensor."""
    return any(
        type(one).__name__ in ("GuardOnDataDependentSymNode", _ANSWERS)
        or "data-dependent" in str(one).lower()
        for one in _chain(error)
    )


def _frames(error: BaseException) -> Iterator[_Frame]:
    """The frames outside torch, the most telling ones first."""
    for one in _chain(error):
        # Dynamo reads bytecode: the user's frames are in `real_stack`, not in the traceback.
        for summary in reversed(list(getattr(one, "real_stack", None) or [])):
            if not summary.filename.startswith((_TORCH, _OWN)):
                yield _Frame(Place(summary.filename, summary.lineno or 0), summary.name, None)
        frames = []
        step: TracebackType | None = one.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            if not code.co_filename.startswith((_TORCH, _OWN, "<string>")):
                place = Place(code.co_filename, step.tb_lineno, _column(code, step.tb_lasti))
                frames.append(_Frame(place, code.co_name, code))
            step = step.tb_next
        yield from reversed(frames)


def _column(code: CodeType, instruction: int) -> int:
    if not hasattr(code, "co_positions") or instruction < 0:
        return -1
    positions = list(code.co_positions())
    column = positions[instruction // 2][2] if instruction // 2 < len(positions) else None
    return -1 if column is None else column


def locate(error: BaseException) -> Site:
    """The branch at which an export stopped.

    Raises
    ------
    RewriteRefused
        The error is of another kind, or no line outside torch has a branch.
    """
    lines = str(error).strip().splitlines() or [""]
    if not is_data_dependent(error):
        raise RewriteRefused(
            f"{type(error).__name__} is no data-dependent branch ({lines[0][:160]})",
            "rewriting control flow cannot help here",
        )
    nearest: _Frame | None = None
    answers = any(type(one).__name__ == _ANSWERS for one in _chain(error))
    for frame in _frames(error):
        nearest = nearest or frame
        if answers:
            raise RewriteRefused(
                f"{lines[0]} gives a Python value that depends on tensors",
                "write `(a == b).all()` for torch.equal(a, b), and `torch.isclose(a, b).all()` for "
                "torch.allclose(a, b)",
                nearest.place,
            )
        if not _asks_for_a_value(frame.place):
            continue
        functions = functions_of(frame.code) if frame.code else _functions_at(frame.place, frame.name)
        if functions:
            function, code = functions[0]
            return Site(frame.place, function, code, lines[0])
    if nearest is None:
        raise RewriteRefused(
            "the exception names no line outside torch",
            "pass the exception of torch.export or torch.onnx.export as it was raised",
        )
    line = linecache.getline(nearest.place.file, nearest.place.line).strip()
    raise RewriteRefused(
        f"`{line}` needs the value of a tensor, and there is no branch on this line",
        "bound the value with torch._check(0 <= n), torch._check(n <= x.shape[0]) where it is a size or an "
        "index, or compute the result with tensor operations",
        nearest.place,
    )


def where_frozen(found: FrozenAt) -> tuple[Place, CodeType] | None:
    """The innermost line outside torch that baked a size in; `None` where there is none."""
    for code, line, instruction in found.frames:
        if code.co_filename == _CAPTURE:
            return None  # What called the export: a test, whose file is a spec.
        if not code.co_filename.startswith((_TORCH, _OWN, "<string>", "<frozen")):
            return Place(code.co_filename, line, _column(code, instruction)), code
    return None


def iterates(code: CodeType) -> bool:
    """Whether `code`, or code nested in it, has a ``for`` or a comprehension."""
    # Every second byte is an opcode. `functions_of` takes a thousand times as long.
    return any(dis.opmap["FOR_ITER"] in one.co_code[::2] for one in _all_codes(code))


def functions_of(code: CodeType) -> list[tuple[FunctionType, CodeType]]:
    """The functions that run `code`, or in which it is nested, with `code` itself.

    A function that another one makes anew on every call cannot be replaced; the one that makes it can.
    """
    gc.unfreeze()  # A fresh process sets aside what it was forked with, and nobody finds it there.
    direct = [one for one in gc.get_referrers(code) if _is_of_model(one) and one.__code__ is code]
    lasting = [one for one in direct if _lasts(one)]
    if lasting:
        return [(one, code) for one in lasting]
    outer = [
        one
        for one in gc.get_objects()
        if _is_of_model(one)
        and one.__code__.co_filename == code.co_filename
        and one.__code__ is not code
        and any(nested == code for nested in _all_codes(one.__code__))
        and _lasts(one)
    ]
    outer.sort(key=lambda one: len(one.__qualname__))
    return [(one, code) for one in outer or direct]


def _is_of_model(found: object) -> TypeGuard[FunctionType]:
    # dynamo makes functions of the code of modules, too, in which every other code is nested.
    return (
        type(found) is FunctionType
        and bool(found.__code__.co_flags & inspect.CO_OPTIMIZED)
        and not is_made(found)
    )


def _lasts(function: FunctionType) -> bool:
    """Whether a function outlives the call that made it: an attribute or a variable of a module refers to
    it.
    """
    if "<locals>" not in function.__qualname__:
        return True
    kinds = (
        "dict",
        "type",
        "cell",
        "method",
        "partial",
        "list",
        "tuple",
        "function",
        "staticmethod",
        "classmethod",
    )
    return any(
        type(holder).__name__ in kinds for holder in gc.get_referrers(function)
    ) and not _is_in_a_frame(function)


def _is_in_a_frame(function: FunctionType) -> bool:
    """Whether only the frame of the function that made it still knows it, kept alive by a traceback."""
    holders = [h for h in gc.get_referrers(function) if not isinstance(h, list)]
    return all(type(holder).__name__ in ("frame", "cell") for holder in holders)


def _functions_at(place: Place, name: str) -> list[tuple[FunctionType, CodeType]]:
    """Functions whose code, or code nested in it, has the line: dynamo gives a file, a line and a name."""
    found: list[tuple[FunctionType, CodeType]] = []
    gc.unfreeze()
    for one in gc.get_objects():
        if _is_of_model(one) and one.__code__.co_filename == place.file:
            found += [
                (one, code)
                for code in _all_codes(one.__code__)
                if code.co_name == name and any(line == place.line for *_, line in code.co_lines())
            ]
    found.sort(key=lambda pair: (not _lasts(pair[0]), len(pair[0].__qualname__)))
    return found


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)


def _asks_for_a_value(place: Place) -> bool:
    """Whether the line holds something that turns a tensor into a Python truth value."""
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        tests: list[ast.expr] = []
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = list(node.ifs)
        elif (
            isinstance(node, ast.BoolOp)
            or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
            or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        ):
            tests = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            tests = [node] if node.func.id in ("bool", "any", "all", "max", "min") else []
        if any(test.lineno <= place.line <= (test.end_lineno or test.lineno) for test in tests):
            return True
    return False
