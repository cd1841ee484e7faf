"""Writes in place inside a branch as new tensors: torch 2.13 exports a `torch.cond` whose branch writes in
place, and `torch.onnx.export` then fails to convert it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

import torch

from .names import in_place, root_name
from .tests_in import assign, expression, is_number, name

__all__ = ["out_of_place"]

_FILLS = {"zero_": "torch.zeros_like(x)", "fill_": "torch.full_like(x, v)"}


def out_of_place(stmts: Sequence[ast.stmt], tensors: set[str]) -> list[ast.stmt]:
    """`stmts` with writes into the variables `tensors` replaced, where there is a form for it."""
    visitor = _Visitor(tensors)
    made = []
    for stmt in stmts:
        new = (
            stmt if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)) else visitor.visit(copy.deepcopy(stmt))
        )
        # An unchanged statement stays the same object: its text is kept.
        made.append(stmt if ast.dump(new) == ast.dump(stmt) else new)
    return made


class _Visitor(ast.NodeTransformer):
    def __init__(self, tensors: set[str]) -> None:
        self.tensors = tensors

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Subscript):
            return self._written(target, node.value) or node
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target = node.target
        if isinstance(target, ast.Name) and target.id in self.tensors:
            return assign(target.id, ast.BinOp(left=name(target.id), op=node.op, right=node.value), node)
        if isinstance(target, ast.Subscript):
            read = copy.deepcopy(target)
            read.ctx = ast.Load()
            return self._written(target, ast.BinOp(left=read, op=node.op, right=node.value)) or node
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and in_place(call.func.attr)
        ):
            return node
        target, method = call.func.value, call.func.attr
        fill = _FILLS.get(method)
        if fill is not None:
            value: ast.expr = expression(fill, x=_read(target), **({"v": call.args[0]} if call.args else {}))
        elif hasattr(torch.Tensor, method[:-1]):
            func = ast.Attribute(value=_read(target), attr=method[:-1], ctx=ast.Load())
            value = ast.Call(func=func, args=call.args, keywords=call.keywords)
        else:
            return node
        if isinstance(target, ast.Name) and target.id in self.tensors:
            return assign(target.id, value, node)
        return (self._written(target, value) if isinstance(target, ast.Subscript) else None) or node

    def _written(self, target: ast.Subscript, value: ast.expr) -> ast.stmt | None:
        """``x[index] = value``; `None` where no form is known."""
        if not isinstance(target.value, ast.Name) or root_name(target) not in self.tensors:
            return None
        x = target.value
        items = list(target.slice.elts) if isinstance(target.slice, ast.Tuple) else [target.slice]
        if isinstance(items[0], ast.Compare):
            if len(items) > 1 or not is_number(value):
                return None
            made = expression("x.masked_fill(mask, v)", x=_read(x), mask=items[0], v=value)
            return assign(x.id, made, target)
        steps = _steps(items)
        return None if steps is None else assign(x.id, _scattered(_read(x), steps, value, x.id), target)


def _steps(items: list[ast.expr]) -> list[tuple[int, ast.expr]] | None:
    """The axes that an index does not take whole, counted from the end behind ``...``; `None` where an item
    may be anything but an integer or a slice.
    """
    dots = [k for k, item in enumerate(items) if getattr(item, "value", None) is Ellipsis]
    found = []
    for place, item in enumerate(items):
        if place in dots or _whole(item):
            continue
        if not isinstance(item, ast.Slice) and not (is_number(item) and _integer(item)):
            return None
        if isinstance(item, ast.Slice) and item.step is not None:
            return None
        found.append((place - len(items) if dots and place > dots[0] else place, item))
    return found if len(dots) < 2 else None


def _scattered(x: ast.expr, steps: list[tuple[int, ast.expr]], value: ast.expr, of: str) -> ast.expr:
    """`x` with `value` at an index; `of` is the variable whose dtype it takes."""
    if not steps:
        if is_number(value):
            return expression("torch.full_like(x, v)", x=x, v=value)
        return expression(f"torch.as_tensor(v).to({of}.dtype).expand_as(x)", x=x, v=value)
    (dimension, item), *rest = steps
    whole: list[ast.expr] = [ast.Slice()]
    if dimension >= 0:
        index = [*whole * dimension, item]
    else:
        index = [ast.Constant(...), item, *whole * (-dimension - 1)]
    part = ast.Subscript(
        value=x,
        slice=index[0] if len(index) == 1 else ast.Tuple(elts=index, ctx=ast.Load()),
        ctx=ast.Load(),
    )
    if not isinstance(item, ast.Slice):
        rest = [(axis - 1 if axis > dimension >= 0 else axis, one) for axis, one in rest]
    new = _scattered(part, rest, value, of)
    if isinstance(item, ast.Slice):
        start, stop = (ast.Constant(None) if edge is None else edge for edge in (item.lower, item.upper))
        return expression(f"torch.slice_scatter(x, v, {dimension}, a, b)", x=x, v=new, a=start, b=stop)
    return expression(f"torch.select_scatter(x, v, {dimension}, i)", x=x, v=new, i=item)


def _read(node: ast.expr) -> ast.expr:
    made = copy.deepcopy(node)
    if isinstance(made, (ast.Name, ast.Subscript, ast.Attribute)):
        made.ctx = ast.Load()
    return made


def _whole(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and not (item.lower or item.upper or item.step)


def _integer(item: ast.expr) -> bool:
    value = item.operand if isinstance(item, ast.UnaryOp) else item
    return type(getattr(value, "value", None)) is int
