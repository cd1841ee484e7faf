"""Lists that grow by one value a round of a loop, and what is made of them after it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .probe import Kind
from .tests_in import expression, name

__all__ = ["Grown", "Stacked", "appended"]


@dataclass(frozen=True)
class Grown:
    """A list that every round appends one value to: its stacked values, what one of them is, and the name
    that the values from before the loop get, if it has some.
    """

    text: str
    value: str
    stacked: str
    kind: Kind
    first: str = ""


class Stacked(ast.NodeTransformer):
    """``torch.stack(values, d)`` and ``torch.cat(values, d)`` of what is stacked along axis 0 already."""

    def __init__(self, lists: dict[str, Grown]) -> None:
        self.lists = lists

    def visit_Call(self, node: ast.Call) -> ast.AST:
        func = ast.unparse(node.func)
        names = ("torch.stack", "torch.cat", "torch.concat", "torch.concatenate")
        by_name = {keyword.arg: keyword.value for keyword in node.keywords}
        arguments = list(node.args)
        listed = arguments.pop(0) if arguments else by_name.pop("tensors", None)
        dim = arguments.pop(0) if arguments else by_name.pop("dim", by_name.pop("axis", ast.Constant(0)))
        if func not in names or arguments or by_name or not isinstance(listed, ast.Name):
            return self.generic_visit(node)
        found = self.lists.get(listed.id)
        axis = _literal(dim)
        if found is None or axis is None:
            return self.generic_visit(node)
        size = len(found.kind.shape or ())
        stacks = func == "torch.stack"
        axis %= size + 1 if stacks else max(size, 1)
        text = "a"
        if axis:  # in the order of memory that the original has: what follows computes the same bits
            text = f"a.movedim(0, {axis}).clone(memory_format=torch.contiguous_format)"
        if not stacks:
            text = f"{text}.flatten({axis}, {axis + 1})"
        if found.first:
            first = f"torch.{'stack' if stacks else 'cat'}({found.first}, {axis})"
            text = f"torch.cat([{first}, {text}], {axis})"
        return ast.copy_location(expression(text, a=name(found.stacked)), node)


def _literal(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def appended(stmt: ast.AST) -> tuple[str, ast.expr] | None:
    """The list and the value of ``values.append(value)`` or ``values += [value]``."""
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        call = stmt.value
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "append"
            and isinstance(call.func.value, ast.Name)
            and len(call.args) == 1
        ):
            return call.func.value.id, call.args[0]
    added = isinstance(stmt, ast.AugAssign) and isinstance(stmt.op, ast.Add)
    if added and isinstance(stmt.target, ast.Name) and isinstance(stmt.value, ast.List):  # type: ignore[attr-defined]
        (value, *more) = [*stmt.value.elts, None]  # type: ignore[attr-defined]
        return (stmt.target.id, value) if more == [None] else None  # type: ignore[attr-defined]
    return None
