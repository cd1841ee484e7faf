"""The source of a rewritten function: the original text with the changed statements replaced."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from .source import FunctionNode, FunctionSource

__all__ = ["rewritten_text", "unified_diff"]


@dataclass(frozen=True)
class _Edit:
    """Lines `first` to `last` (from 1, inclusive) become `stmts`."""

    first: int
    last: int
    indent: int
    stmts: tuple[ast.stmt, ...]


class _NotByLines(Exception):
    """Two statements share a line."""


def rewritten_text(source: FunctionSource, node: FunctionNode) -> str:
    """The text of `node`, which shares its unchanged statements with ``source.node``."""
    lines = source.text.splitlines(keepends=True)
    try:
        for edit in sorted(_edits(source.node.body, node.body), key=lambda one: -one.first):
            text = "\n".join(ast.unparse(ast.fix_missing_locations(stmt)) for stmt in edit.stmts)
            lines[edit.first - 1 : edit.last] = [textwrap.indent(text, " " * edit.indent) + "\n"]
    except _NotByLines:
        return ast.unparse(ast.fix_missing_locations(node)) + "\n"
    return "".join(lines)


def _edits(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[_Edit]:
    start = 0
    while start < min(len(old), len(new)) and old[start] is new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] is new[-1 - end]:
        end += 1
    before, after = old[start : len(old) - end], new[start : len(new) - end]
    if len(before) == len(after) == 1 and (inner := _inside(before[0], after[0])) is not None:
        return inner
    if not before and after:  # only insertions
        follows = start < len(old)
        neighbour = old[start] if follows else old[-1]
        at = _first(neighbour) if follows else (neighbour.end_lineno or 0) + 1
        return [_Edit(at, at - 1, neighbour.col_offset, tuple(after))]
    if not before:
        return []
    first, last = _first(before[0]), before[-1].end_lineno or 0
    around = [*old[:start][-1:], *old[len(old) - end :][:1]]
    if any(_first(other) <= last and (other.end_lineno or 0) >= first for other in around):
        raise _NotByLines
    return [_Edit(first, last, before[0].col_offset, tuple(after))]


def _inside(old: ast.stmt, new: ast.stmt) -> list[_Edit] | None:
    """Edits in the blocks of a compound statement whose head did not change."""
    if type(old) is not type(new) or hasattr(new, "branch") or not hasattr(old, "body"):
        return None
    found: list[_Edit] = []
    for key, value in ast.iter_fields(old):
        other = getattr(new, key)
        if value is other or (not isinstance(value, (ast.AST, list)) and value == other):
            continue
        if key not in ("body", "orelse", "finalbody") or not value or not other:
            return None
        if _first(value[0]) == old.lineno:
            return None  # `if x: y` on one line
        if key == "orelse" and isinstance(value[0], ast.If) and value[0].col_offset == old.col_offset:
            return None  # an `elif` has no line of its own
        found += _edits(value, other)
    return found


def _first(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def unified_diff(source: FunctionSource, text: str, target: str) -> str:
    """The change as ``diff -u`` shows it."""
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        text.splitlines(keepends=True),
        f"{target} ({source.file}:{source.first_line})",
        f"{target} (rewritten)",
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
