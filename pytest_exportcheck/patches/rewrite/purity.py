"""Which expressions may be computed although the original would not: cheap, without effect, never an
error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

__all__ = ["is_cheap", "is_total"]

#: Element by element, or one pass over the data; no error for any values of the tensor.
_ELEMENTWISE = {
    "abs", "add", "all", "any", "as_tensor", "bool", "ceil", "clamp", "clamp_max", "clamp_min", "clip",
    "clone",
    "contiguous", "cos", "detach", "div", "double", "eq", "erf", "exp", "finfo", "float", "floor",
    "full_like", "ge",
    "gelu", "gt", "half", "iinfo", "int", "isfinite", "isinf", "isnan", "le", "log", "log1p", "log_softmax",
    "logical_and", "logical_not", "logical_or", "long", "lt", "expand_as", "masked_fill", "maximum",
    "mean", "minimum", "mul",
    "nan_to_num", "ne", "neg", "ones_like", "reciprocal", "relu", "round", "rsqrt", "rsub", "sigmoid",
    "sign", "silu",
    "sin", "slice_scatter", "softmax", "sqrt", "square", "sub", "sum", "tanh", "to", "type_as", "where",
    "zeros_like",
}  # fmt: skip
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor)


def _called(node: ast.Call) -> str | None:
    """The name of a torch function or a method that is called; `None` for anything else."""
    if not isinstance(node.func, ast.Attribute):
        return None
    base = node.func.value
    if isinstance(base, ast.Name) and base.id == "self":
        return None  # a method or a submodule of the model
    return node.func.attr


def is_total(node: ast.AST) -> bool:
    """Whether `node` can be computed for every value of its tensors, without an error or an effect."""
    if isinstance(node, ast.Call):
        inside = [*node.args, *(keyword.value for keyword in node.keywords)]
        return (
            (_called(node) in _ELEMENTWISE or _makes_a_scalar(node))
            and isinstance(node.func, ast.Attribute)
            and is_total(node.func.value)
            and all(map(is_total, inside))
        )
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            return isinstance(node.right, ast.Constant) and bool(node.right.value) and is_total(node.left)
        return isinstance(node.op, _BINARY) and is_total(node.left) and is_total(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_total(node.operand)
    if isinstance(node, ast.Compare):
        plain = not any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
        return plain and all(map(is_total, [node.left, *node.comparators]))
    if isinstance(node, ast.BoolOp):
        return all(map(is_total, node.values))
    if isinstance(node, ast.Attribute):
        return is_total(node.value)
    if isinstance(node, ast.Subscript):
        return is_total(node.value) and _total_index(node)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(is_total, node.elts))
    return isinstance(node, (ast.Name, ast.Constant))


def _makes_a_scalar(node: ast.Call) -> bool:
    """``torch.full((), ...)``, ``torch.ones((), ...)``: no size that could be none."""
    shape = node.args[0] if node.args else None
    return _called(node) in ("full", "ones", "zeros") and isinstance(shape, ast.Tuple) and not shape.elts


def _total_index(node: ast.Subscript) -> bool:
    """Whether an index fails for no size: slices, ``None``, ``...``, and ``.shape[i]``."""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return True
    items: Iterable[ast.expr] = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return all(
        isinstance(item, ast.Slice) or (isinstance(item, ast.Constant) and item.value in (None, Ellipsis))
        for item in items
    )


def is_cheap(stmts: Iterable[ast.stmt], limit: int = 12) -> bool:
    """Whether a branch consists of at most `limit` elementwise operations whose results go into plain
    names."""
    operations = 0
    for stmt in stmts:
        if isinstance(stmt, ast.Pass):
            continue
        simple = (
            isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name)
        )
        augmented = isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Name)
        if not isinstance(stmt, (ast.Assign, ast.AugAssign)) or not (simple or augmented):
            return False
        total = stmt.value if simple else ast.BinOp(ast.Name("x", ast.Load()), stmt.op, stmt.value)  # type: ignore[union-attr]
        if not is_total(total):
            return False
        operations += sum(isinstance(item, (ast.Call, ast.BinOp)) for item in ast.walk(stmt.value))
    return operations <= limit
