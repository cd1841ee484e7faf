"""From a function to its syntax tree, and from a changed source back to a function.

A rewritten function keeps what the original has: its globals (the same dict, not a copy), its closure cells,
``__class__`` for ``super()``, defaults, mangled private names. It is put in place by exchanging ``__code__``,
so decorators, subclasses and names imported elsewhere see it too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import linecache
import textwrap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from .values import Place, RewriteRefused

__all__ = [
    "FunctionNode",
    "FunctionSource",
    "compile_function",
    "exchanged",
    "is_made",
    "plain_function",
    "read_source",
    "target_name",
]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_numbers = itertools.count(1)

#: File name of a rewritten function -> what it was made of: for places where it is rewritten again.
_origins: dict[str, FunctionSource] = {}

_made: weakref.WeakSet[FunctionType] = weakref.WeakSet()


def plain_function(value: Any) -> FunctionType:
    """The Python function behind methods, partials, static and class methods and wrapping decorators."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (staticmethod, classmethod)) or inspect.ismethod(value):
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        elif isinstance(value, FunctionType):
            return value
        else:
            raise RewriteRefused(
                f"{value!r} is no Python function", "name a function or a method written in Python"
            )


def target_name(function: FunctionType) -> str:
    """Dotted path of a function."""
    return f"{function.__module__}.{function.__qualname__}"


@dataclass(frozen=True)
class FunctionSource:
    """The source of one function, dedented and without decorators, which stay around what is replaced.

    Attributes
    ----------
    file, first_line:
        Where it comes from; line 1 of `text` is `first_line` of `file`.
    node:
        Its tree, parsed from `text`.
    """

    function: FunctionType
    file: str
    first_line: int
    indent: int
    text: str
    node: FunctionNode

    def place(self, node: ast.AST) -> Place:
        """Where `node` stands in the file; in a rewritten function, where the original has that line."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        origin = _origins.get(self.file)
        if origin is None:
            return Place(self.file, line + self.first_line - 1, column + self.indent)
        text = self.text.splitlines()[line - 1]
        found = [k for k, each in enumerate(origin.text.splitlines(), 1) if each == text]
        if len(found) != 1:
            return origin.place(origin.node)
        return origin.place(ast.Pass(lineno=found[0], col_offset=column))

    def line_of(self, place: Place) -> Place:
        """The line of `place`; where this is a rewritten function, the one that the original has."""
        if place.file not in _origins or place.file != self.file:
            return place
        return self.place(ast.Pass(lineno=place.line - self.first_line + 1, col_offset=0))


def read_source(function: FunctionType) -> FunctionSource:
    """The source of `function`; `RewriteRefused` where there is none."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    place = Place(code.co_filename, code.co_firstlineno)
    if not lines:
        raise RewriteRefused(
            f"the source of {target_name(function)} is not available", "load it from a file", place
        )
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError as error:
        raise RewriteRefused(
            f"the source of {target_name(function)} is no Python ({error.msg})", "load it from a file", place
        ) from error
    found = [node for node in ast.walk(tree) if _is_node_of(node, code)]
    if len(found) != 1:
        what = "more than one function starts" if found else "no function starts"
        raise RewriteRefused(
            f"{what} at this line (the file may have changed since it was loaded)",
            "give the function a line of its own",
            place,
        )
    (node,) = found
    if isinstance(node, ast.Lambda):
        return _lambda_source(function, node)
    assert isinstance(node, FunctionNode)
    text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
    if not text.endswith("\n"):
        text += "\n"
    parsed = ast.parse(text).body[0]
    assert isinstance(parsed, FunctionNode)
    return FunctionSource(function, code.co_filename, node.lineno, node.col_offset, text, parsed)


def _is_node_of(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, FunctionNode):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
        if not hasattr(code, "co_positions"):  # Python 3.10: only one lambda a line
            return True
        columns = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
        start = (node.body.lineno, node.body.col_offset)
        end = (node.body.end_lineno or 0, node.body.end_col_offset or 0)
        return bool(columns) and all(start <= position < end for position in columns)
    return False


def _lambda_source(function: FunctionType, node: ast.Lambda) -> FunctionSource:
    """A lambda as a function of one ``return``."""
    template = ast.parse("def lambda_():\n    return None").body[0]
    assert isinstance(template, ast.FunctionDef)
    template.args = node.args
    template.body = [ast.Return(node.body)]
    text = ast.unparse(ast.fix_missing_locations(template)) + "\n"
    parsed = ast.parse(text).body[0]
    assert isinstance(parsed, FunctionNode)
    code = function.__code__
    return FunctionSource(function, code.co_filename, code.co_firstlineno, 0, text, parsed)


def is_made(function: FunctionType) -> bool:
    """Whether `compile_function` made it: a function of the model runs its code meanwhile."""
    return function in _made


def compile_function(source: FunctionSource, node: FunctionNode, text: str | None = None) -> FunctionType:
    """A function from `node` that stands in the same surroundings as the original.

    Parameters
    ----------
    text:
        The source that tracebacks and `inspect` show, with `node` parsed from it.
    """
    original = source.function
    file = f"<rewritten {target_name(original)} {next(_numbers)}>"
    if text is not None:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        _origins[file] = source
    free = original.__code__.co_freevars
    wrapped: ast.stmt = ast.fix_missing_locations(node)
    owner = _owner(original)
    if owner is not None:  # mangles private names as the class body did
        wrapped = ast.ClassDef(name=owner, bases=[], keywords=[], body=[wrapped], decorator_list=[])
    outer = ast.parse("def surroundings(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args = [ast.arg(arg=name) for name in free]
    outer.body = [wrapped]
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    code = _find_code(compile(module, file, "exec"), node)
    if tuple(code.co_freevars) != tuple(free):
        raise RewriteRefused(
            f"the rewritten {target_name(original)} uses the free variables {code.co_freevars}, "
            f"the original {free}",
            "rewrite this function by hand",
            source.place(source.node),
        )
    changes: dict[str, Any] = {"co_name": original.__code__.co_name}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = original.__code__.co_qualname
    made = FunctionType(
        code.replace(**changes),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    made.__kwdefaults__ = original.__kwdefaults__
    made.__qualname__ = original.__qualname__
    made.__module__ = original.__module__
    made.__doc__ = original.__doc__
    made.__annotations__ = original.__annotations__
    _made.add(made)
    return made


def _owner(function: FunctionType) -> str | None:
    parts = function.__qualname__.split(".")
    return parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else None


def _find_code(code: CodeType, node: FunctionNode) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == node.name and constant.co_firstlineno == node.lineno:
                return constant
            with contextlib.suppress(LookupError):
                return _find_code(constant, node)
    raise LookupError(node.name)


@contextlib.contextmanager
def exchanged(original: FunctionType, replacement: FunctionType) -> Iterator[None]:
    """While active, `original` runs the code of `replacement`."""
    code = original.__code__
    original.__code__ = replacement.__code__
    try:
        yield
    finally:
        original.__code__ = code
