"""What a loop runs over: tensors along an axis, and counters."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from .source import FunctionSource
from .tests_in import assign, expression
from .values import RewriteRefused

__all__ = ["Counter", "Iteration", "Rows", "comprehension_as_loop", "iteration_of"]

_FORMS = "write the loop over range(x.shape[d]), over a tensor, x.unbind(d), or zip and enumerate of these"


@dataclass(frozen=True)
class Rows:
    """``for target in tensor``: the slices along `axis`, with the axis (of length 1) where it is kept."""

    target: ast.expr
    tensor: ast.expr
    axis: int
    keeps: bool = False


@dataclass(frozen=True)
class Counter:
    """``for name in range(start, stop, step)``, or the counter of ``enumerate``, whose `stop` is `None`."""

    name: str
    start: ast.expr
    stop: ast.expr | None
    step: ast.expr

    @property
    def from_zero(self) -> bool:
        """Whether it counts 0, 1, 2, ..."""
        return _integer(self.start) == 0 and _integer(self.step) == 1

    @property
    def falls(self) -> bool:
        """Whether it counts down."""
        return (_integer(self.step) or 1) < 0

    @property
    def may_be_negative(self) -> bool:
        """Whether the source leaves it open that a number is negative."""
        start, step = _integer(self.start), _integer(self.step)
        if step is None or step > 0:
            return step is None or start is None or start < 0
        stop = _integer(self.stop)
        return stop is None or stop < -1


@dataclass
class Iteration:
    """All that one ``for`` runs over."""

    rows: list[Rows] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)


def iteration_of(stmt: ast.For, source: FunctionSource) -> Iteration:
    """What `stmt` runs over; `RewriteRefused` for what no scan runs over."""
    found = Iteration()
    _read(stmt.target, stmt.iter, found, source)
    return found


def _read(target: ast.expr, over: ast.expr, found: Iteration, source: FunctionSource) -> None:
    def refuse(what: str) -> RewriteRefused:
        return RewriteRefused(what, _FORMS, source.place(over))

    called = over.func.id if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) else ""
    if isinstance(over, ast.Call) and called in ("range", "enumerate", "zip", "reversed"):
        if called == "range":
            found.counters.append(_counted(target, over, refuse))
            return
        if called == "zip" and isinstance(target, ast.Tuple) and len(target.elts) == len(over.args):
            for one, item in zip(target.elts, over.args, strict=True):
                _read(one, item, found, source)
            return
        if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            starts = [*over.args[1:], *(keyword.value for keyword in over.keywords)]
            if not isinstance(target.elts[0], ast.Name):
                raise refuse(f"a loop over `{ast.unparse(over)}` that unpacks its numbers")
            start = starts[0] if starts else ast.Constant(0)
            found.counters.append(Counter(target.elts[0].id, start, None, ast.Constant(1)))
            _read(target.elts[1], over.args[0], found, source)
            return
        if called == "reversed" and isinstance(over.args[0], ast.Call):
            inner = over.args[0]
            if isinstance(inner.func, ast.Name) and inner.func.id == "range" and len(inner.args) == 1:
                text = "range(n - 1, -1, -1)"
                found.counters.append(_counted(target, expression(text, n=inner.args[0]), refuse))  # type: ignore[arg-type]
                return
        raise refuse(f"a loop over `{ast.unparse(over)}`")
    method = over.func.attr if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) else ""
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and method in ("unbind", "split"):
        arguments = list(over.args)
        tensor: ast.expr = over.func.value
        if isinstance(tensor, ast.Name) and tensor.id == "torch":
            tensor = arguments.pop(0)
        by_name = {keyword.arg: keyword.value for keyword in over.keywords}
        sizes: ast.expr | None = ast.Constant(1)
        if method == "split":
            sizes = arguments.pop(0) if arguments else by_name.get("split_size")
        dim = arguments[0] if arguments else by_name.get("dim", ast.Constant(0))
        axis = _integer(dim)
        if axis is None or _integer(sizes) != 1:
            raise refuse(f"a loop over `{ast.unparse(over)}`")
        found.rows.append(Rows(target, tensor, axis, method == "split"))
        return
    found.rows.append(Rows(target, over, 0))


def _integer(node: ast.expr | None) -> int | None:
    try:
        value = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return value if type(value) is int else None


def _counted(target: ast.expr, call: ast.Call, refuse: Callable[[str], RewriteRefused]) -> Counter:
    if not isinstance(target, ast.Name) or call.keywords:
        raise refuse(f"a loop over `{ast.unparse(call)}` that unpacks its numbers")
    if len(call.args) == 1:
        return Counter(target.id, ast.Constant(0), call.args[0], ast.Constant(1))
    step: ast.expr = call.args[2] if len(call.args) > 2 else ast.Constant(1)
    return Counter(target.id, call.args[0], call.args[1], step)


def comprehension_as_loop(
    stmt: ast.stmt, node: ast.ListComp, fresh: Callable[[str], str]
) -> tuple[list[ast.stmt], ast.For]:
    """``f([g(row) for row in x])`` as a loop that appends, and the statement with the list; the loop."""
    (generator,) = node.generators
    names = {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
    renamed = {name: fresh(name) for name in sorted(names)}

    class Renaming(ast.NodeTransformer):
        def visit_Name(self, found: ast.Name) -> ast.Name:
            return ast.copy_location(ast.Name(renamed.get(found.id, found.id), found.ctx), found)

    values = fresh("values")
    element = Renaming().visit(copy.deepcopy(node.elt))
    append = ast.Expr(expression(f"{values}.append(element)", element=element))
    loop = ast.For(
        target=Renaming().visit(copy.deepcopy(generator.target)),
        iter=generator.iter,
        body=[append],
        orelse=[],
    )
    ast.copy_location(loop, node)
    ast.copy_location(append, node.elt)

    class Replacing(ast.NodeTransformer):
        def visit(self, found: ast.AST) -> ast.AST:
            if found is node:
                return ast.copy_location(ast.Name(values, ast.Load()), node)
            return self.generic_visit(found)

    # A list that is bound to a name needs no second one.
    if isinstance(stmt, ast.Assign) and stmt.value is node and isinstance(stmt.targets[0], ast.Name):
        bound = stmt.targets[0].id
        append.value.func.value = ast.Name(bound, ast.Load())  # type: ignore[attr-defined]
        return [assign(bound, ast.List([], ast.Load()), stmt), loop], loop
    after: ast.stmt = Replacing().visit(_copied_without(stmt, node))  # type: ignore[assignment]
    return [assign(values, ast.List([], ast.Load()), stmt), loop, after], loop


def _copied_without(stmt: ast.stmt, kept: ast.AST) -> ast.stmt:
    """A copy of `stmt` in which `kept` is the same object."""
    return copy.deepcopy(stmt, {id(kept): kept})
