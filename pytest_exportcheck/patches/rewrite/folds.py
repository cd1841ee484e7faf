"""Fold ``return``, ``break`` and ``continue`` away: what follows them moves into the other branch."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

from .names import contains, in_place, own_nodes
from .source import FunctionSource
from .tests_in import assign, expression
from .values import RewriteRefused

__all__ = [
    "SpelledSuper",
    "changed",
    "fold_jumps",
    "fold_returns",
    "same",
    "unconditional",
    "written_attributes",
]


def same(made: Sequence[ast.stmt], stmts: Sequence[ast.stmt]) -> bool:
    """Whether two blocks hold the same objects."""
    return len(made) == len(stmts) and all(a is b for a, b in zip(made, stmts, strict=True))


def changed(node: Any, **changes: Any) -> Any:
    """A copy of one node with other children."""
    made = copy.copy(node)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def fold_returns(stmts: Sequence[ast.stmt], result: str, source: FunctionSource) -> list[ast.stmt]:
    """The rest of a function with ``result = ...`` at the end of every path."""
    made: list[ast.stmt] = []
    for position, stmt in enumerate(stmts):
        if isinstance(stmt, ast.Return):
            return [*made, assign(result, stmt.value or ast.Constant(None), stmt)]
        if isinstance(stmt, ast.Raise):
            return [*made, stmt]
        if contains(stmt, ast.Return):
            if not isinstance(stmt, ast.If):
                raise RewriteRefused(
                    f"`return` inside `{type(stmt).__name__.lower()}`, after or under a test that "
                    f"depends on a tensor",
                    "keep the result in a variable and return it at the end of the function",
                    source.place(stmt),
                )
            rest = list(stmts[position + 1 :])
            body = fold_returns([*stmt.body, *rest], result, source)
            orelse = fold_returns([*stmt.orelse, *copy.deepcopy(rest)], result, source)
            return [*made, changed(stmt, body=body, orelse=orelse)]
        made.append(stmt)
    return [*made, assign(result, ast.Constant(None), stmts[-1] if stmts else source.node)]


def fold_jumps(stmts: Sequence[ast.stmt], flag: str, source: FunctionSource) -> list[ast.stmt]:
    """The body of a loop without ``break`` (it sets `flag`) and ``continue``."""
    jumps = (ast.Break, ast.Continue)
    made: list[ast.stmt] = []
    for position, stmt in enumerate(stmts):
        if isinstance(stmt, ast.Break):
            return [*made, assign(flag, ast.Constant(True), stmt)]
        if isinstance(stmt, ast.Continue):
            return made
        if not isinstance(stmt, (ast.For, ast.While)) and contains(stmt, jumps, loops=False):
            if not isinstance(stmt, ast.If):
                raise RewriteRefused(
                    "`break` or `continue` inside `with` or `try`, under a test that depends on a tensor",
                    "move it out of the block",
                    source.place(stmt),
                )
            rest = list(stmts[position + 1 :])
            body = fold_jumps([*stmt.body, *rest], flag, source) or [ast.Pass()]
            orelse = fold_jumps([*stmt.orelse, *copy.deepcopy(rest)], flag, source)
            return [*made, changed(stmt, body=body, orelse=orelse)]
        made.append(stmt)
    return made


def unconditional(node: ast.AST) -> list[ast.AST]:
    """The expressions of a statement that are computed whenever it runs."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue
        found.append(child)
        if not isinstance(child, ast.IfExp):
            found += unconditional(child.values[0] if isinstance(child, ast.BoolOp) else child)
    return found


def written_attributes(stmts: Sequence[ast.stmt]) -> dict[str, ast.Attribute]:
    """``self.a`` and the like that statements assign, or change in place, by their text."""
    found: dict[str, ast.Attribute] = {}
    for node in own_nodes(stmts):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and in_place(node.func.attr):
            targets = [node.func.value]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                read = copy.deepcopy(target)
                read.ctx = ast.Load()
                found.setdefault(ast.unparse(read), read)
    return found


class SpelledSuper(ast.NodeTransformer):
    """``super()`` needs the frame of the method; in a nested function it is spelled out."""

    def __init__(self, first: str) -> None:
        self.first = first

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return expression(f"super(__class__, {self.first})")
        return self.generic_visit(node)
