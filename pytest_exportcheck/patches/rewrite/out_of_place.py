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
from .tests_in import assign, expression, name

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
        items = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        parts = [k for k, item in enumerate(items) if not _whole(item)]
        if any(not isinstance(item, (ast.Slice, ast.Constant, ast.UnaryOp, ast.Compare)) for item in items):
            return None
        if (
            not parts
            or len(parts) > 1
            or any(getattr(item, "value", 0) in (None, Ellipsis) for item in items)
        ):
            return None
        (dimension,) = parts
        item, x = items[dimension], target.value
        if isinstance(item, ast.Compare):
            if len(items) > 1 or not _number(value):
                return None
            made = expression("x.masked_fill(mask, v)", x=_read(x), mask=item, v=value)
        elif isinstance(item, ast.Slice):
            if item.step is not None:
                return None
            start, stop = (ast.Constant(None) if edge is None else edge for edge in (item.lower, item.upper))
            old = _read(target)
            text = f"torch.slice_scatter(x, torch.as_tensor(v).to(x.dtype).expand_as(old), {dimension}, a, b)"
            made = expression(text, x=_read(x), v=value, old=old, a=start, b=stop)
        else:
            text = f"torch.select_scatter(x, torch.as_tensor(v).to(x.dtype).expand_as(old), {dimension}, i)"
            made = expression(text, x=_read(x), v=value, old=_read(target), i=item)
        return assign(x.id, made, target)


def _read(node: ast.expr) -> ast.expr:
    made = copy.deepcopy(node)
    if isinstance(made, (ast.Name, ast.Subscript, ast.Attribute)):
        made.ctx = ast.Load()
    return made


def _whole(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and not (item.lower or item.upper or item.step)


def _number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.operand, ast.Constant)
    )
