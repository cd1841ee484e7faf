"""What statements read, write and change in place: the analysis of names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "FreeNames",
    "assigned",
    "captured",
    "contains",
    "in_place",
    "live_before",
    "loads",
    "mutated",
    "own_nodes",
    "plain_targets",
    "reads_before_write",
    "root_name",
]

Nodes = ast.AST | Iterable[ast.AST]
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _tops(nodes: Nodes) -> list[ast.AST]:
    return [nodes] if isinstance(nodes, ast.AST) else list(nodes)


def own_nodes(nodes: Nodes, *, loops: bool = True) -> Iterator[ast.AST]:
    """The nodes in `nodes` that run in the same frame: not those of nested functions and classes.

    Parameters
    ----------
    loops:
        Whether the bodies of loops are entered (a ``break`` in there belongs to that loop).
    """
    for node in _tops(nodes):
        yield node
        if isinstance(node, _SCOPES) or (not loops and isinstance(node, (ast.For, ast.While))):
            continue
        yield from own_nodes(ast.iter_child_nodes(node), loops=loops)


def contains(nodes: Nodes, kinds: type | tuple[type, ...], *, loops: bool = True) -> bool:
    """Whether a node of `kinds` runs in the frame of `nodes`."""
    return any(isinstance(node, kinds) for node in own_nodes(nodes, loops=loops))


def loads(nodes: Nodes) -> set[str]:
    """Every name that is read anywhere, nested functions included."""
    found = set()
    for top in _tops(nodes):
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


class FreeNames:
    """Names that a function does not use: the stem, or the stem with a number. Each is given once."""

    def __init__(self, node: ast.AST) -> None:
        arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        self._used = loads(node) | assigned(node) | arguments

    def __call__(self, stem: str) -> str:
        text, count = stem, 1
        while text in self._used:
            count += 1
            text = f"{stem}_{count}"
        self._used.add(text)
        return text


def captured(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """The names that a nested function reads from around it: not those that it binds itself."""
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    outer = {text for n in own_nodes(body) if isinstance(n, (ast.Global, ast.Nonlocal)) for text in n.names}
    own = assigned(body) | {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
    # Defaults and decorators are evaluated around it.
    around = [node.args, *getattr(node, "decorator_list", ())]
    return (loads(body) - (own - outer)) | loads(around)


def _stored(target: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def plain_targets(nodes: Nodes) -> set[str]:
    """Names bound by statements of this frame (comprehension variables have a scope of their own)."""
    found: set[str] = set()
    for node in own_nodes(nodes):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found |= _stored(target)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
            found |= _stored(node.target)
        elif isinstance(node, ast.With):
            for item in node.items:
                found |= _stored(item.optional_vars) if item.optional_vars is not None else set()
    return found


def assigned(nodes: Nodes) -> set[str]:
    """The names bound in this frame, by functions, classes and imports too."""
    found = plain_targets(nodes)
    for node in own_nodes(nodes):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def in_place(method: str) -> bool:
    """Whether a method of tensors changes its tensor, by torch's naming: ``add_``."""
    return method.endswith("_") and not method.endswith("__") and not method.startswith("_")


def root_name(node: ast.expr) -> str | None:
    """The variable that ``a``, ``a[i]`` or ``a[i][j]`` writes into."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def mutated(nodes: Nodes) -> set[str]:
    """Names whose value is changed in place: ``a[i] = v``, ``a += v``, ``a.add_(v)``, ``a[i].zero_()``."""
    found = set()
    for node in own_nodes(nodes):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [t for t in node.targets if isinstance(t, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and in_place(node.func.attr):
            targets = [node.func.value]
        found |= {name for target in targets if (name := root_name(target)) is not None}
    return found


def reads_before_write(stmts: Sequence[ast.stmt]) -> set[str]:
    """Names whose value from before the block may be read in it."""
    return live_before(stmts, set())


def live_before(stmts: Sequence[ast.stmt], after: set[str]) -> set[str]:
    """Names whose value may be read at the start of `stmts`, when those in `after` are read at its end."""
    live = set(after)
    for stmt in reversed(stmts):
        live = _live_before_one(stmt, live)
    return live


def _live_before_one(stmt: ast.stmt, after: set[str]) -> set[str]:
    if isinstance(stmt, ast.If):
        return loads(stmt.test) | live_before(stmt.body, after) | live_before(stmt.orelse, after)
    if isinstance(stmt, (ast.For, ast.While)):
        head = loads(stmt.iter) if isinstance(stmt, ast.For) else loads(stmt.test)
        bound = _stored(stmt.target) if isinstance(stmt, ast.For) else set()
        live = head | live_before(stmt.orelse, after) | after
        while True:  # what one round reads, the round before it must keep
            more = live | (live_before(stmt.body, live) - bound)
            if more == live:
                return live
            live = more
    if isinstance(stmt, (ast.Return, ast.Raise)):
        return loads(stmt)
    if isinstance(stmt, (ast.Assign, ast.AnnAssign)):
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        return (after - set().union(*map(_stored, targets))) | loads(stmt)
    if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return (after - {stmt.name}) | captured(stmt)
    if isinstance(stmt, ast.ClassDef):
        return (after - {stmt.name}) | loads(stmt)
    return after | loads(stmt)
