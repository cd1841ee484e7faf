"""The tests of a function: their parts, their numbers, and the copy of a function that reports them."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import Any

from .probe import PROBE
from .purity import is_total
from .source import FunctionNode
from .values import Place

__all__ = [
    "Branch",
    "as_tensor",
    "assign",
    "atoms",
    "branch_of",
    "converted",
    "expression",
    "is_number",
    "is_truth",
    "name",
    "number_tests",
    "opened",
    "statements",
    "with_probes",
]


@dataclass(frozen=True)
class Branch:
    """A test that depends on tensors.

    Attributes
    ----------
    number:
        Unique in the function; a test that was duplicated has several.
    nature:
        ``tensor``, or ``symbol`` for a Python number that came out of a tensor.
    raises:
        The outcome that ends in an exception.
    """

    number: int
    place: Place
    test: str
    nature: str
    raises: bool | None = None


def branch_of(node: ast.AST) -> Branch | None:
    """The branch that `node` (an ``if`` or a ``while``) was found to be."""
    found: Branch | None = getattr(node, "branch", None)
    return found


# Making nodes


def expression(template: str, /, **parts: ast.expr) -> ast.expr:
    """An expression from a template in which names stand for `parts`."""
    made: ast.expr = _Fill(parts).visit(ast.parse(template, mode="eval").body)
    return made


def is_number(value: ast.expr) -> bool:
    """Whether `value` is a number that is written out."""
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    return isinstance(value, ast.Constant) and isinstance(value.value, (bool, int, float))


def as_tensor(value: ast.expr, dtype: str) -> ast.expr:
    """A number, or a tensor of shape [], as a tensor of shape [].

    `torch.as_tensor` of a number makes a constant of the graph: inside a nested branch or a loop the ONNX
    exporter of torch 2.13 cannot decompose it, and a size of a dynamic axis would be baked in.
    """
    kind = ast.parse(dtype, mode="eval").body
    if is_number(value):
        return expression("torch.full((), a, dtype=d)", a=value, d=kind)
    operator = "&" if dtype == "torch.bool" else "*"
    return expression(f"torch.ones((), dtype=d) {operator} a", a=value, d=kind)


def statements(text: str) -> list[ast.stmt]:
    """Statements from text."""
    return ast.parse(text).body


class _Fill(ast.NodeTransformer):
    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.parts[node.id]) if node.id in self.parts else node


def name(text: str, *, store: bool = False) -> ast.Name:
    """A variable."""
    return ast.Name(id=text, ctx=ast.Store() if store else ast.Load())


def assign(target: str, value: ast.expr, at: ast.AST | None = None) -> ast.Assign:
    """``target = value``, placed at `at`."""
    made = ast.Assign(targets=[name(target, store=True)], value=value)
    return made if at is None else ast.copy_location(made, at)


# Parts of tests


def opened(node: ast.expr) -> ast.expr:
    """A comparison chain as the ``and`` of its comparisons, ``bool(x)`` as x; other expressions
    themselves.
    """
    ready: ast.expr | None = getattr(node, "opened", None)
    if ready is not None:
        return ready
    found = node
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        if all(map(is_total, node.comparators[:-1])):  # computed twice
            sides = [node.left, *node.comparators]
            parts: list[ast.expr] = [
                ast.copy_location(ast.Compare(left=a, ops=[op], comparators=[b]), node)
                for a, op, b in zip(sides, node.ops, sides[1:], strict=False)
            ]
            found = ast.copy_location(ast.BoolOp(op=ast.And(), values=parts), node)
    elif _calls(node, "bool"):
        found = opened(node.args[0])  # type: ignore[attr-defined]
    if found is not node:  # copies keep it
        node.opened = found  # type: ignore[attr-defined]
    return found


def _calls(node: ast.AST, *names: str) -> bool:
    """Whether `node` calls one of `names` with one argument."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and len(node.args) == 1
        and not node.keywords
    )


def atoms(test: ast.expr) -> list[ast.expr]:
    """The expressions whose truth a test combines with ``and``, ``or``, ``not``."""
    test = opened(test)
    if isinstance(test, ast.BoolOp):
        return [atom for value in test.values for atom in atoms(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return atoms(test.operand)
    return [test]


def is_truth(node: ast.AST) -> bool:
    """Whether an expression asks for the truth of its operands by itself."""
    return (
        isinstance(node, ast.BoolOp)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
        or (isinstance(node, ast.expr) and opened(node) is not node)
    )


def converted(node: ast.AST) -> ast.expr | None:
    """The argument of ``int(x)`` or ``float(x)``, or what a loop runs over."""
    if _calls(node, "int", "float"):
        argument: ast.expr = node.args[0]  # type: ignore[attr-defined]
        return argument
    return node.iter if isinstance(node, ast.For) else None


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return list(node.ifs)
    return [node] if isinstance(node, ast.expr) and is_truth(node) else []


def number_tests(tree: ast.AST) -> None:
    """Number the tests and their parts, in place: an attribute of the nodes that copies keep."""
    count = 0
    for node in list(ast.walk(tree)):
        found: list[ast.expr] = []
        for test in _tests(node):
            found += [test, *atoms(test)]
        argument = converted(node)
        for item in [*found, *([argument] if argument is not None else [])]:
            if not hasattr(item, "number"):
                item.number = count  # type: ignore[attr-defined]
                count += 1


# Reporting


def _report(method: str, *arguments: ast.expr) -> ast.Call:
    func = ast.Attribute(value=name(PROBE), attr=method, ctx=ast.Load())
    return ast.Call(func=func, args=list(arguments), keywords=[])


class _Probes(ast.NodeTransformer):
    """Reports every numbered expression, every test, and where it is marked the ends of branches."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and is_truth(node):
            return self._truth(node)
        mark = branch_of(node)
        number = getattr(getattr(node, "test", None), "number", None)
        seen = self.generic_visit(node)
        if isinstance(seen, (ast.If, ast.While)) and mark is not None:
            constant = ast.Constant(mark.number)
            seen.test = _report("decide", constant, seen.test, expression("locals()"))
            seen.body.append(_left(mark, True))
            if isinstance(seen, ast.If):
                seen.orelse.append(_left(mark, False))
        elif isinstance(seen, (ast.If, ast.While, ast.IfExp, ast.Assert)) and number is not None:
            seen.test = _report("decide", ast.Constant(number), seen.test)
        return seen

    def generic_visit(self, node: ast.AST) -> ast.AST:
        argument = converted(node)
        number = getattr(argument, "number", None)
        tests = [test for test in _tests(node) if not is_truth(test)]
        marks = {id(test): getattr(test, "number", None) for test in tests}
        node = super().generic_visit(node)
        if number is not None and isinstance(node, ast.Call):
            node.args = [_report("atom", ast.Constant(number), node.args[0])]
        elif number is not None and isinstance(node, ast.For):
            node.iter = _report("atom", ast.Constant(number), node.iter)
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) and tests:
            mark = marks[id(tests[0])]
            if mark is not None:
                node.test = _report("atom", ast.Constant(mark), node.test)
        return node

    def _truth(self, node: ast.expr) -> ast.expr:
        node = opened(node)
        if isinstance(node, ast.BoolOp):
            values = [self._truth(value) for value in node.values]
            return ast.copy_location(ast.BoolOp(op=node.op, values=values), node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ast.copy_location(ast.UnaryOp(op=node.op, operand=self._truth(node.operand)), node)
        number = getattr(node, "number", None)
        made: ast.expr = self.generic_visit(node)  # type: ignore[assignment]
        return made if number is None else _report("atom", ast.Constant(number), made)


def _left(branch: Branch, outcome: bool) -> ast.stmt:
    return ast.Expr(
        _report("leave", ast.Constant(branch.number), ast.Constant(outcome), expression("locals()"))
    )


def with_probes(node: FunctionNode) -> FunctionNode:
    """A copy of a function that reports to the probe."""
    made = copy.deepcopy(node)
    made.body = [_Probes().visit(stmt) for stmt in made.body]
    made.body.insert(0, ast.Expr(_report("enter", expression("locals()"))))
    return ast.fix_missing_locations(made)
