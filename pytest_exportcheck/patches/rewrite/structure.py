"""Bring a function into the form that can be rewritten branch by branch; it stays plain Python with the
same meaning.

Afterwards every test that depends on tensors stands alone in an ``if`` or ``while``: the Python parts of a
test
(``x.dtype == torch.float16 and ...``) are an ``if`` of their own around it, conditional expressions and
asserts are statements, ``return``, ``break`` and ``continue`` under such a test are gone.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from .folds import changed, fold_jumps, fold_returns, same, unconditional, written_attributes
from .names import FreeNames, assigned, contains, loads, mutated, own_nodes, plain_targets
from .probe import Probe
from .purity import is_total
from .source import FunctionNode, FunctionSource
from .tests_in import Branch, assign, atoms, converted, expression, is_truth, name, opened
from .values import Place, RewriteRefused

__all__ = ["FIRST_BRANCH", "Structurer"]

#: Numbers of branches start here, above those of the tests in the source.
FIRST_BRANCH = 100_000


class Structurer:
    """Builds the structured form of one function.

    Parameters
    ----------
    source:
        Its `node` was numbered by `number_tests`.
    probe:
        What was seen at the tests.
    stopped_at:
        Where the export stopped: an expression there depends on a tensor, whatever eager has seen.
    """

    def __init__(self, source: FunctionSource, probe: Probe, stopped_at: Place | None = None) -> None:
        self.source = source
        self.probe = probe
        self.stopped_at = stopped_at
        self.branches: list[Branch] = []
        self.fresh = FreeNames(source.node)
        self.on_tensors = self._parts_of_tests_on_tensors()
        self.tainted: dict[str, str] = {}
        self._find_taints()

    def function(self, node: FunctionNode) -> FunctionNode:
        """The structured function; the same object where nothing depends on tensors."""
        body = self._block(node.body)
        returning = [
            stmt
            for stmt in body
            if any(
                isinstance(n, ast.If) and self.dynamic(n.test) and contains(n, ast.Return)
                for n in own_nodes(stmt)
            )
        ]
        if returning:
            result = self.fresh("result")
            start = body.index(returning[0])
            folded = fold_returns(body[start:], result, self.source)
            body = [*body[:start], *folded, ast.copy_location(ast.Return(value=name(result)), returning[0])]
        body = self._split(body)
        return node if body is node.body else changed(node, body=body)

    # Natures of expressions

    def _find_taints(self) -> None:
        """Names of Python values that come out of tensors: ``n = x.sum().item()``, ``found = bool(t)``."""
        size = -1
        while len(self.tainted) != size:
            size = len(self.tainted)
            for node in ast.walk(self.source.node):
                if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
                    nature = self._comes_from(node.value)
                    for target in node.targets:
                        if nature is not None and isinstance(target, ast.Name):
                            self.tainted.setdefault(target.id, nature)

    def _parts_of_tests_on_tensors(self) -> set[int]:
        """Numbers of the parts of tests in which a tensor was seen: no other part of them stopped the
        export.
        """
        found: set[int] = set()
        for node in ast.walk(self.source.node):
            test = getattr(node, "test", None)
            if isinstance(test, ast.expr):
                numbers = [getattr(atom, "number", -1) for atom in atoms(test)]
                if any(kind.kind == "tensor" for n in numbers for kind in self.probe.atoms.get(n, ())):
                    found.update(numbers)
        return found

    def _comes_from(self, value: ast.expr) -> str | None:
        if is_truth(value) and any(self.nature(atom) == "tensor" for atom in atoms(value)):
            return "tensor"
        return "symbol" if self._takes_value(value) else None

    def _takes_value(self, value: ast.expr) -> bool:
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("item", "tolist"):
                    return True
            elif isinstance(node, ast.Name) and self.tainted.get(node.id) == "symbol":
                return True
            argument = converted(node) if isinstance(node, ast.Call) else None
            if argument is not None and "tensor" in self.kinds(argument):
                return True
        return False

    def kinds(self, node: ast.expr) -> set[str]:
        """The kinds an expression had."""
        return {kind.kind for kind in self.probe.atoms.get(getattr(node, "number", -1), set())}

    def nature(self, atom: ast.expr) -> str:
        """``static``, ``tensor`` or ``symbol`` of an expression in a test."""
        marked: str | None = getattr(atom, "nature", None)
        if marked is not None:
            return marked
        kinds = self.kinds(atom)
        if "tensor" in kinds:
            if kinds != {"tensor"}:
                others = " or ".join(sorted(kinds - {"tensor"}))
                raise RewriteRefused(
                    f"`{ast.unparse(atom)}` is a tensor in one call and {others} in another",
                    "make it a tensor always, or test for the other type first",
                    self.source.place(atom),
                )
            return "tensor"
        if isinstance(atom, ast.Name) and self.tainted.get(atom.id) == "tensor":
            return "tensor"
        if not isinstance(atom, ast.Constant) and (
            self._takes_value(atom) or self._is_where_it_stopped(atom)
        ):
            return "symbol"
        return "static"

    def _is_where_it_stopped(self, atom: ast.expr) -> bool:
        at = self.stopped_at
        number = getattr(atom, "number", None)
        if at is None or at.file != self.source.file or number is None or number in self.on_tensors:
            return False
        start, end = self.source.place(atom), (atom.end_lineno or 0) + self.source.first_line - 1
        if not start.line <= at.line <= end or not self.kinds(atom) <= {"number"}:
            return False
        if at.column < 0:
            return True
        last = (atom.end_col_offset or 0) + self.source.indent
        return (start.line, start.column) <= (at.line, at.column) < (end, last)

    def dynamic(self, test: ast.expr) -> bool:
        """Whether a test depends on a tensor."""
        return any(self.nature(atom) != "static" for atom in atoms(test))

    # Expressions

    def _block(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for stmt in stmts:
            made += self._statement(stmt)
        return stmts if same(made, stmts) else made

    def _statement(self, stmt: ast.stmt) -> list[ast.stmt]:
        if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [self.function(stmt)]
        if isinstance(stmt, ast.If):
            self._refuse_choices(stmt.test)
            return [self._with_blocks(stmt)]
        if isinstance(stmt, (ast.For, ast.While)):
            return self._loop(self._with_blocks(stmt))
        if isinstance(stmt, (ast.With, ast.Try)):
            return [self._with_blocks(stmt)]
        if isinstance(stmt, ast.Assert) and self.dynamic(stmt.test):
            return [self._as_raise(stmt)]
        return self._simple(stmt)

    def _with_blocks(self, stmt: Any) -> Any:
        changes = {}
        for part in ("body", "orelse", "finalbody"):
            block = getattr(stmt, part, None)
            if block and (made := self._block(block)) is not block:
                changes[part] = made
        return changed(stmt, **changes) if changes else stmt

    def _as_raise(self, stmt: ast.Assert) -> ast.If:
        """``assert t, message`` as ``if not t: raise AssertionError(message)``."""
        message = stmt.msg if stmt.msg is not None else ast.Constant(ast.unparse(stmt.test))
        error = ast.Raise(exc=expression("AssertionError(message)", message=message), cause=None)
        test = ast.copy_location(ast.UnaryOp(op=ast.Not(), operand=stmt.test), stmt.test)
        return ast.copy_location(ast.If(test=test, body=[ast.copy_location(error, stmt)], orelse=[]), stmt)

    def _simple(self, stmt: ast.stmt) -> list[ast.stmt]:
        value = getattr(stmt, "value", None)
        if isinstance(value, ast.IfExp) and self.dynamic(value.test):
            plain = isinstance(stmt, ast.Assign) and all(isinstance(t, ast.Name) for t in stmt.targets)
            if plain or isinstance(stmt, ast.Return):
                self._refuse_choices(value.test)
                made = ast.If(
                    test=value.test,
                    body=self._block([changed(stmt, value=value.body)]),
                    orelse=self._block([changed(stmt, value=value.orelse)]),
                )
                return [ast.copy_location(made, stmt)]
        choices = [n for n in own_nodes(stmt) if isinstance(n, ast.IfExp) and self.dynamic(n.test)]
        if not choices:
            return [stmt]
        hoisted = [n for n in unconditional(stmt) if n in choices]
        if not hoisted:
            self._refuse_choices(stmt)
        before: list[ast.stmt] = []
        names: dict[ast.AST, ast.expr] = {}
        for choice in hoisted:
            assert isinstance(choice, ast.IfExp)
            text = self.fresh("choice")
            before += self._simple(assign(text, choice, stmt))
            names[choice] = name(text)
        return [*before, *self._simple(_replaced(stmt, names))]

    def _refuse_choices(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.IfExp) and self.dynamic(inner.test):
                raise RewriteRefused(
                    f"the conditional expression `{ast.unparse(inner)}` on a tensor is only sometimes "
                    f"computed",
                    "compute it in a statement before, with torch.where",
                    self.source.place(inner),
                )

    # Loops

    def _loop(self, stmt: ast.For | ast.While) -> list[ast.stmt]:
        under = [
            n for n in own_nodes(stmt.body, loops=False) if isinstance(n, ast.If) and self.dynamic(n.test)
        ]
        leaves = [n for n in under if contains(n, ast.Return)]
        while_dynamic = isinstance(stmt, ast.While) and self.dynamic(stmt.test)
        if leaves or (while_dynamic and contains(stmt.body, ast.Return)):
            raise RewriteRefused(
                "`return` out of a loop under a test that depends on a tensor",
                "keep the result in a variable that has a value before the loop, and leave the loop "
                "with `break`",
                self.source.place(leaves[0] if leaves else stmt),
            )
        jumping = any(contains(n, (ast.Break, ast.Continue), loops=False) for n in under)
        if not jumping and not while_dynamic:
            return [stmt]
        flag = self.fresh("stopped") if contains(stmt.body, ast.Break, loops=False) else ""
        body = fold_jumps(stmt.body, flag, self.source) or [ast.Pass()]
        before: list[ast.stmt] = []
        if flag:
            start = assign(flag, ast.Constant(False), stmt)
            before.append(start)
        if isinstance(stmt, ast.For) and not self._runs_over_data(stmt):
            if flag:
                start.flag = True  # type: ignore[attr-defined]
                body = [ast.copy_location(ast.If(test=self._running(flag, stmt), body=body, orelse=[]), stmt)]
            made: ast.stmt = changed(stmt, body=body, orelse=[])
        else:
            if isinstance(stmt, ast.For):
                first, test, head, step = self._as_while(stmt)
                before += first
                body = [*head, *body, *step]
            else:
                test = stmt.test
            parts = [self._running(flag, stmt)] if flag else []
            if not (isinstance(test, ast.Constant) and test.value):
                parts.append(test)
            whole = parts[0] if len(parts) == 1 else ast.copy_location(ast.BoolOp(ast.And(), parts), stmt)
            made = ast.copy_location(ast.While(test=whole, body=body, orelse=[]), stmt)
            self._mark(made, whole)
        after = list(stmt.orelse)
        if after and flag:
            after = [ast.copy_location(ast.If(self._running(flag, stmt), after, []), stmt)]
        return [*before, made, *after]

    def _running(self, flag: str, at: ast.AST) -> ast.expr:
        atom = ast.copy_location(name(flag), at)
        atom.nature = "tensor"  # type: ignore[attr-defined]
        return ast.copy_location(ast.UnaryOp(op=ast.Not(), operand=atom), at)

    def _runs_over_data(self, stmt: ast.For) -> bool:
        """Whether the number of rounds comes from the size of a tensor."""
        call = stmt.iter
        if "tensor" in self.kinds(call):
            return True
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            return False
        return any(
            (isinstance(node, ast.Attribute) and node.attr in ("shape", "size"))
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len")
            for argument in call.args
            for node in ast.walk(argument)
        )

    def _as_while(self, stmt: ast.For) -> tuple[list[ast.stmt], ast.expr, list[ast.stmt], list[ast.stmt]]:
        """What stands before the loop, its test, and the first and last statements of a round."""
        steps = isinstance(stmt.iter, ast.Call) and len(stmt.iter.args) > 2
        if not isinstance(stmt.target, ast.Name) or steps:
            raise RewriteRefused(
                "a loop over several variables, or with a step, that stops on a tensor",
                "write it over range(x.shape[0]), or with torch.while_loop",
                self.source.place(stmt),
            )
        index, target = self.fresh("index"), stmt.target.id
        start: ast.expr = ast.Constant(0)
        counted = isinstance(stmt.iter, ast.Call)
        before: list[ast.stmt] = []
        if loads(stmt.iter) & assigned(stmt.body):
            # What a loop runs over is computed once, and a round binds its name anew.
            over = stmt.iter.args[-1] if counted else stmt.iter  # type: ignore[attr-defined]
            if not counted and loads(over) & mutated(stmt.body):
                raise RewriteRefused(
                    f"a round changes `{ast.unparse(over)}`, which the loop runs over, in place",
                    "run over a copy, `x.clone()`, or change another tensor",
                    self.source.place(stmt),
                )
            once = self.fresh("stop" if counted else "rows")
            # An operator wants no two names of one tensor.
            value = over if counted else expression("a.clone()", a=over)
            before.append(assign(once, value, stmt))
            if counted:
                stmt = changed(stmt, iter=changed(stmt.iter, args=[*stmt.iter.args[:-1], name(once)]))  # type: ignore[attr-defined]
            else:
                stmt = changed(stmt, iter=name(once))
        if isinstance(stmt.iter, ast.Call):
            stop = stmt.iter.args[-1]
            start = stmt.iter.args[0] if len(stmt.iter.args) == 2 else start
            item: ast.expr = name(index)
        else:
            stop = expression("rows.shape[0]", rows=stmt.iter)
            item = expression("rows[index]", rows=stmt.iter, index=name(index))
        compared = ast.Compare(left=name(index), ops=[ast.Lt()], comparators=[copy.deepcopy(stop)])
        step: list[ast.stmt] = [assign(index, expression("index + 1", index=name(index)), stmt)]
        head: list[ast.stmt] = [assign(target, item, stmt)]
        before.append(assign(index, start, stmt))
        return before, ast.copy_location(compared, stmt), head, step

    # Tests

    def _split(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for stmt in stmts:
            if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
                made.append(stmt)
                continue
            changes = {
                part: done
                for part in ("body", "orelse", "finalbody")
                if (block := getattr(stmt, part, None)) and (done := self._split(block)) is not block
            }
            if isinstance(stmt, ast.If) and self.dynamic(stmt.test):
                body, orelse = changes.get("body", stmt.body), changes.get("orelse", stmt.orelse)
                made += self._split_if(stmt.test, body, orelse, stmt)
            else:
                made.append(changed(stmt, **changes) if changes else stmt)
        return stmts if same(made, stmts) else made

    def _split_if(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], at: ast.AST
    ) -> list[ast.stmt]:
        test = opened(test)
        natures = {self.nature(atom) for atom in atoms(test)}
        if natures == {"static"}:
            return [ast.copy_location(ast.If(test=test, body=body or [ast.Pass()], orelse=orelse), at)]
        if self._whole(test, natures):
            return self._alone(test, body, orelse, at)
        if isinstance(test, ast.UnaryOp):
            return self._split_if(test.operand, orelse, body, at)
        assert isinstance(test, ast.BoolOp)
        first, tail = self._parted(test)
        # The first part decides alone whether the rest of the test is computed.
        if isinstance(test.op, ast.And):
            inner = self._split_if(tail, body, orelse, at)
            return self._split_if(first, inner, copy.deepcopy(orelse), at)
        inner = self._split_if(tail, body, orelse, at)
        return self._split_if(first, copy.deepcopy(body), inner, at)

    def _parted(self, test: ast.BoolOp) -> tuple[ast.expr, ast.expr]:
        """An ``and`` or ``or`` in two: leading Python parts, or the first part, and the rest."""
        count = 0
        while count < len(test.values) and not self.dynamic(test.values[count]):
            count += 1
        count = max(count, 1)

        def joined(values: list[ast.expr]) -> ast.expr:
            return values[0] if len(values) == 1 else ast.copy_location(ast.BoolOp(test.op, values), test)

        return joined(test.values[:count]), joined(test.values[count:])

    def _whole(self, test: ast.expr, natures: set[str]) -> bool:
        """Whether a test can be one predicate: one nature, and nothing that only a part before it makes
        valid.
        """
        if len(natures) != 1:
            return False
        test = opened(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._whole(test.operand, natures)
        if isinstance(test, ast.BoolOp):
            return all(self._whole(v, natures) for v in test.values) and all(map(is_total, test.values[1:]))
        return True

    def _alone(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], at: ast.AST
    ) -> list[ast.stmt]:
        """An ``if`` on tensors only; attributes that it writes are variables in it."""
        before: list[ast.stmt] = []
        after: list[ast.stmt] = []
        for text, node in written_attributes([*body, *orelse]).items():
            short = self.fresh(text.replace(".", "_"))
            before.append(assign(short, node, at))
            body = [_Rename(text, short).visit(copy.deepcopy(stmt)) for stmt in body]
            orelse = [_Rename(text, short).visit(copy.deepcopy(stmt)) for stmt in orelse]
            if short in plain_targets([*body, *orelse]):
                target = copy.deepcopy(node)
                target.ctx = ast.Store()
                after.append(ast.copy_location(ast.Assign(targets=[target], value=name(short)), at))
        found = ast.copy_location(ast.If(test=test, body=body or [ast.Pass()], orelse=list(orelse)), at)
        self._mark(found, test)
        return [*before, found, *after]

    def _mark(self, node: ast.If | ast.While, test: ast.expr) -> None:
        nature = "tensor" if any(self.nature(atom) == "tensor" for atom in atoms(test)) else "symbol"
        at = test if hasattr(test, "lineno") else node
        ends = [block[-1] if block else None for block in (node.body, node.orelse)]
        raising = [
            outcome for outcome, end in zip((True, False), ends, strict=True) if isinstance(end, ast.Raise)
        ]
        number = FIRST_BRANCH + len(self.branches)
        branch = Branch(
            number, self.source.place(at), ast.unparse(test), nature, raising[0] if raising else None
        )
        self.branches.append(branch)
        node.branch = branch  # type: ignore[union-attr]


class _Rename(ast.NodeTransformer):
    """An attribute becomes a variable."""

    def __init__(self, text: str, short: str) -> None:
        self.text = text
        self.short = short

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node) == self.text:
            return ast.copy_location(ast.Name(id=self.short, ctx=node.ctx), node)
        return self.generic_visit(node)


def _replaced(node: Any, names: dict[ast.AST, ast.expr]) -> Any:
    """A copy of `node` in which some expressions are replaced."""
    if node in names:
        return names[node]
    made = copy.copy(node)
    for key, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            setattr(made, key, _replaced(value, names))
        elif isinstance(value, list):
            setattr(made, key, [_replaced(v, names) if isinstance(v, ast.AST) else v for v in value])
    return made
