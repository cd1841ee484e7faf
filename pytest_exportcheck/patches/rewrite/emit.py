"""Write the branches of a structured function with `torch.where`, `torch.cond` and `torch.while_loop`.

Which of them: `torch.where` where both branches are cheap, have no effect and no error; it converts to one
ONNX node and needs no capture of branches. `torch.cond` (ONNX ``If``) otherwise. An error that only a tensor
decides becomes `torch._assert_async`: of the checks of torch 2.13 it is the one that ``torch.onnx.export``
converts, in branches too (`torch._check_tensor_all` and, in a branch, ``torch._check(t.item())`` do not).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .folds import SpelledSuper, changed, same
from .forms import Form, has_number, is_operand, merged, output, selectable
from .loops import IndexByTensor
from .names import (
    assigned,
    in_place,
    live_before,
    loads,
    mutated,
    own_nodes,
    plain_targets,
    reads_before_write,
)
from .out_of_place import out_of_place
from .probe import PROBE, Kind, Probe
from .purity import is_cheap
from .source import FunctionNode, FunctionSource
from .structure import Structurer
from .tests_in import (
    Branch,
    as_tensor,
    assign,
    atoms,
    branch_of,
    expression,
    is_truth,
    name,
    opened,
    statements,
)
from .values import RewriteRefused

__all__ = ["Emitter"]

_LOGGERS = {"log", "logger", "logging", "print", "warnings"}
_FORBIDDEN = (
    ast.Await,
    ast.Delete,
    ast.Global,
    ast.Import,
    ast.ImportFrom,
    ast.Nonlocal,
    ast.Return,
    ast.Yield,
    ast.YieldFrom,
)
_Blocks = tuple[list[ast.stmt], list[ast.stmt]]


class Emitter:
    """Emits one function.

    Parameters
    ----------
    structure:
        Made the structured form; knows what tests are.
    probe:
        Ran the structured form: the kinds of the variables before and after each branch.
    probed:
        Emit a form that asks a probe for forced outcomes; only for the proof.
    """

    def __init__(
        self, source: FunctionSource, structure: Structurer, probe: Probe, *, probed: bool = False
    ) -> None:
        self.source = source
        self.structure = structure
        self.probe = probe
        self.probed = probed
        self.targets: list[str] = []
        self.notes: list[str] = []
        self.count = 0
        self.promoted: set[str] = set()
        self.generated: set[str] = set()
        # Names that nested functions read: any call may read them.
        self.captured = _captured(source.node)
        self.outside = {
            text
            for inner in ast.walk(source.node)
            if isinstance(inner, (ast.Global, ast.Nonlocal))
            for text in inner.names
        }
        self.tries = 0
        arguments = source.node.args
        names = [*arguments.posonlyargs, *arguments.args]
        self.first = names[0].arg if names else ""

    def function(self, node: FunctionNode) -> FunctionNode:
        """The rewritten function."""
        body = self._block(node.body, _captured(node))
        if not isinstance(self.source.function.__globals__.get("torch"), ModuleType):
            body = [ast.Import(names=[ast.alias(name="torch")]), *body]
        return changed(node, body=body)  # type: ignore[no-any-return]

    # Blocks

    def _block(self, stmts: list[ast.stmt], after: set[str]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for position, stmt in enumerate(stmts):
            made += self._statement(stmt, live_before(stmts[position + 1 :], after) | self.captured)
        return stmts if same(made, stmts) else made

    def _statement(self, stmt: ast.stmt, after: set[str]) -> list[ast.stmt]:
        if isinstance(stmt, ast.If) and branch_of(stmt) is not None:
            return self._if(stmt, after)
        if isinstance(stmt, ast.While) and branch_of(stmt) is not None:
            return self._while(stmt, after)
        if getattr(stmt, "flag", False):
            assert isinstance(stmt, ast.Assign)
            # The flag of a loop is decided by tensors from its first round on.
            return [assign(ast.unparse(stmt.targets[0]), expression("torch.zeros((), dtype=torch.bool)"))]
        if isinstance(stmt, (ast.For, ast.While)):
            after = after | live_before([stmt], after)
        if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            after = set()
        if isinstance(stmt, (ast.Try, ast.With)) and self.probe.before:
            # What an exception or the end of the block finds in the variables is not known.
            after = after | assigned(stmt)
        changes = {}
        for part in ("body", "orelse", "finalbody"):
            block = getattr(stmt, part, None)
            inside = isinstance(stmt, ast.Try) and part == "body"
            self.tries += inside
            if block and (done := self._block(block, after)) is not block:
                changes[part] = done
            self.tries -= inside
        if changes:
            return [changed(stmt, **changes)]
        return [stmt] if hasattr(stmt, "body") else [self._truths(stmt)]

    def _truths(self, stmt: ast.stmt) -> ast.stmt:
        """``not t``, ``bool(t)``, ``s and t``, ``0 < t < 1`` outside tests, with tensor operators."""
        outer = self
        if not any(is_truth(n) and self.structure.dynamic(n) for n in own_nodes(stmt)):  # type: ignore[arg-type]
            return stmt

        class Visitor(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> Any:
                if isinstance(node, ast.expr) and is_truth(node):
                    natures = {outer.structure.nature(atom) for atom in atoms(node)}
                    if natures == {"tensor"}:
                        return outer.predicate(node, "tensor")
                    if "tensor" in natures:
                        raise RewriteRefused(
                            f"`{ast.unparse(node)}` combines tensors with Python values outside a test",
                            "test the Python value with an `if` of its own, and combine the tensors with "
                            "torch.logical_and, torch.logical_or, torch.logical_not",
                            outer.source.place(node),
                        )
                return self.generic_visit(node)

        made: ast.stmt = Visitor().visit(copy.deepcopy(stmt))
        self.targets.append("tensor operators")
        return made

    # Predicates

    def predicate(self, test: ast.expr, nature: str, *, negate: bool = False) -> ast.expr:
        """A test as a boolean tensor of shape [], or as a symbolic boolean."""
        test = opened(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.predicate(test.operand, nature, negate=not negate)
        if isinstance(test, ast.BoolOp):
            tensor, both = nature == "tensor", isinstance(test.op, ast.And)
            if tensor:
                template = "torch.logical_and(a, b)" if both else "torch.logical_or(a, b)"
            else:
                template = "a & b" if both else "a | b"
            made, *parts = [self.predicate(value, nature) for value in test.values]
            for part in parts:
                made = expression(template, a=made, b=part)
        else:
            made = self._atom(test, nature)
        if negate:
            return expression("torch.logical_not(a)" if nature == "tensor" else "torch.sym_not(a)", a=made)
        return made

    def _atom(self, atom: ast.expr, nature: str) -> ast.expr:
        kinds = self.structure.probe.atoms.get(getattr(atom, "number", -1), set())
        if isinstance(atom, ast.Compare) and len(atom.ops) > 1:
            raise RewriteRefused(
                f"`{ast.unparse(atom)}` asks for the truth of its first comparison",
                "put what stands in the middle in a variable",
                self.source.place(atom),
            )
        made = copy.deepcopy(atom)
        boolean = all(str(k.dtype) == "torch.bool" if k.kind == "tensor" else k.type == "bool" for k in kinds)
        if any(k.kind == "tensor" and k.shape for k in kinds):
            made = expression("a.reshape(())", a=made)
        if not boolean and not isinstance(atom, ast.Compare):
            made = expression("a != 0", a=made)
        return made

    def _forced(self, test: ast.expr, branch: Branch) -> ast.expr:
        return expression(f"{PROBE}.decide({branch.number}, test)", test=test) if self.probed else test

    # Checks

    def _check(self, test: ast.expr, message: str, branch: Branch, *, negate: bool) -> list[ast.stmt]:
        nature = branch.nature
        if self.probed:
            condition = self._forced(self.predicate(test, nature), branch)
            if negate:
                condition = expression("torch.logical_not(torch.as_tensor(a))", a=condition)
            nature = "tensor"
            condition = expression("torch.as_tensor(a)", a=condition)
        else:
            condition = self.predicate(test, nature, negate=negate)
        self.targets.append("torch._check" if nature == "symbol" else "torch._assert_async")
        template = "torch._check(c, lambda: text)" if nature == "symbol" else "torch._assert_async(c, text)"
        return [ast.Expr(expression(template, c=condition, text=ast.Constant(message)))]

    # Branches

    def _without_logs(self, stmts: Sequence[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for stmt in stmts:
            if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
                root: ast.AST = stmt.value.func
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in _LOGGERS:
                    self._note(f"{self.source.place(stmt)}: `{ast.unparse(stmt.value.func)}(...)` is dropped")
                    continue
            made.append(stmt)
        return made or [ast.Pass()]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_numbers(self, forms: dict[str, Form], branch: Branch) -> None:
        for text, form in forms.items():
            if has_number(form):
                self._note(
                    f"{branch.place}: `{text}`, a Python number, is a tensor of shape [] after the branch"
                )

    def _if(self, stmt: ast.If, after: set[str]) -> list[ast.stmt]:
        branch = branch_of(stmt)
        assert branch is not None
        body, orelse = self._without_logs(stmt.body), self._without_logs(stmt.orelse or [ast.Pass()])
        for raising, other, negate in ((body, orelse, True), (orelse, body, False)):
            if isinstance(raising[-1], ast.Raise):
                if self.tries:
                    raise RewriteRefused(
                        f"`raise` under the test `{branch.test}`, inside `try`",
                        "compute what the handler computes with `if` and `else`",
                        self.source.place(raising[-1]),
                    )
                self._refuse_effects(raising[:-1], branch)
                check = self._check(stmt.test, _message(raising[-1], branch), branch, negate=negate)
                rest = [one for one in other if not isinstance(one, ast.Pass)]
                return [*check, *self._block(rest, after)]
        self._refuse_effects(body, branch)
        self._refuse_effects(orelse, branch)
        outs = self._outs(body, orelse, after, branch)
        forms = {out: self._form(out, branch) for out in outs}
        blocks = self._emitted(body, after, branch), self._emitted(orelse, after, branch)
        tail: list[ast.stmt] = [assign(out, ast.Constant(None)) for out in outs if forms[out].kind == "none"]
        outs = [out for out in outs if forms[out].kind != "none"]
        forms = {out: forms[out] for out in outs}
        checks = any(isinstance(one, ast.Expr) for block in blocks for one in block)
        if not outs and not checks:
            self.targets.append("nothing")  # nobody reads what the branches compute
            return tail
        self._note_numbers(forms, branch)
        test = self._forced(self.predicate(stmt.test, branch.nature), branch)
        cheap = all(map(is_cheap, blocks)) and all(map(selectable, forms.values()))
        filled = [out for out in outs if self._is_filled(out, body, orelse, branch)]
        if branch.nature == "tensor" and cheap:
            return [*self._where(test, blocks, forms, filled, loads(stmt.test)), *tail]
        return [*self._cond(test, blocks, (body, orelse), forms, filled, branch), *tail]

    def _emitted(self, stmts: list[ast.stmt], after: set[str], branch: Branch) -> list[ast.stmt]:
        """What stands in a branch function: nothing that writes in place, where there is a form for it."""
        seen = [self.probe.before.get(branch.number, {})]
        seen += [self.probe.after.get((branch.number, outcome), {}) for outcome in (True, False)]
        tensors = {
            text for kinds in seen for text, k in kinds.items() if {kind.kind for kind in k} == {"tensor"}
        }
        return self._block(out_of_place(stmts, tensors | self.promoted), after)

    def _refuse_effects(self, stmts: Sequence[ast.stmt], branch: Branch) -> None:
        advice = "move it out of the branch, and let the branch only compute tensors"
        before = self.probe.before.get(branch.number, {})
        known = {text for text in before if text != self.first or not self._is_method()} | assigned(stmts)
        for node in own_nodes(stmts):
            if isinstance(node, _FORBIDDEN):
                kind = type(node).__name__.lower()
                raise RewriteRefused(
                    f"`{kind}` under the test `{branch.test}`, which depends on a tensor",
                    advice,
                    self.source.place(node),
                )
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
                func = node.value.func if isinstance(node.value, ast.Call) else None
                check = func is not None and ast.unparse(func).startswith(("torch._check", "torch._assert"))
                if not mutated(node) and not check:
                    raise RewriteRefused(
                        f"`{ast.unparse(node)}` under the test `{branch.test}` has an effect that a "
                        f"branch of a "
                        "graph cannot have",
                        advice,
                        self.source.place(node),
                    )
            written: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                written = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                written = [node.target]
            roots = {root for one in written if (root := _root(one))}
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and in_place(node.func.attr):
                    roots.add(_root(node.func.value) or ast.unparse(node.func))
                for keyword in node.keywords:
                    if keyword.arg == "out" or (
                        keyword.arg == "inplace" and getattr(keyword.value, "value", True)
                    ):
                        roots.add(f"{keyword.arg}=")
            unknown = {root for root in roots if root not in known or root in self.outside}
            if unknown:
                raise RewriteRefused(
                    f"`{ast.unparse(node)}` under the test `{branch.test}` writes to `{min(unknown)}`, "
                    f"which is no "
                    "variable of the function",
                    advice,
                    self.source.place(node),
                )
        for text in mutated(stmts) & reads_before_write(stmts):
            bad = {k.type for k in before.get(text, set()) if k.kind == "other" or k.type in ("list", "dict")}
            if bad:
                raise RewriteRefused(
                    f"`{text}`, a {bad.pop()}, is changed under the test `{branch.test}`",
                    "build the new value in both branches, and store it after the `if`",
                    branch.place,
                )

    def _is_method(self) -> bool:
        return self.first in ("self", "cls")

    def _outs(
        self, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], after: set[str], branch: Branch
    ) -> list[str]:
        names = assigned(body) | assigned(orelse) | mutated(body) | mutated(orelse)
        return [
            text for text in sorted(names) if text in after or self._is_filled(text, body, orelse, branch)
        ]

    def _is_filled(
        self, text: str, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], branch: Branch
    ) -> bool:
        """Whether a branch changes a tensor in place that something else refers to: it must be filled."""
        before = self.probe.before.get(branch.number, {})
        shared = text in self.probe.shared.get(branch.number, set())
        return shared and (_changed_in_place(text, body, before) or _changed_in_place(text, orelse, before))

    def _form(self, text: str, branch: Branch) -> Form:
        sides = []
        for outcome in (True, False):
            seen = self.probe.after.get((branch.number, outcome))
            if seen is None:
                raise RewriteRefused(
                    f"no call could be run with `{branch.test}` {outcome}, so what `{text}` is there is "
                    f"unknown",
                    "observe a call that takes this branch",
                    branch.place,
                )
            if text not in seen:
                raise RewriteRefused(
                    f"`{text}` is used after the `if`, and has no value where `{branch.test}` is {outcome}",
                    f"give `{text}` a value of the same type before the `if`",
                    branch.place,
                )
            sides.append(seen[text])
        return merged(text, sides[0], sides[1], branch)

    # torch.where

    def _where(
        self, test: ast.expr, blocks: _Blocks, forms: dict[str, Form], filled: list[str], in_test: set[str]
    ) -> list[ast.stmt]:
        self.targets.append("torch.where")
        body, orelse = blocks
        made, true = self._inlined(body, list(forms), loads(orelse) | in_test, "if")
        more, false = self._inlined(orelse, list(forms), loads(body) | in_test, "else")
        made = [*made, *more]
        if len(forms) > 1:
            text = self.structure.fresh("test")
            made.append(assign(text, test))
            test = name(text)
        values: dict[str, ast.expr] = {}
        for out, form in forms.items():
            a, b = true[out], false[out]
            if form.kind == "number" and form.dtype not in ("torch.int64", "torch.bool"):
                # torch.where makes a float32 tensor of Python floats
                a, b = (as_tensor(side, form.dtype) for side in (a, b))
            values[out] = _chosen(form, test, a, b)
        if any((loads(value) - {out}) & set(forms) for out, value in values.items()):
            for out in forms:  # all values before any of them is bound: `a, b = b, a`
                text = self.structure.fresh(f"{out}_new")
                made.append(assign(text, values[out]))
                values[out] = name(text)
        return [*made, *(_bound(out, value, filled) for out, value in values.items())]

    def _inlined(
        self, stmts: list[ast.stmt], outs: list[str], elsewhere: set[str], suffix: str
    ) -> tuple[list[ast.stmt], dict[str, ast.expr]]:
        """The expressions of a branch: statements to put before, and the value of each result."""
        before: list[ast.stmt] = []
        renamed: dict[str, ast.expr] = {}
        final: dict[str, ast.expr] = {out: name(out) for out in outs}
        for position, stmt in enumerate(stmts):
            if isinstance(stmt, ast.AugAssign):
                assert isinstance(stmt.target, ast.Name)
                target = stmt.target.id
                value: ast.expr = ast.BinOp(left=name(target), op=stmt.op, right=stmt.value)
            elif isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Name):
                target, value = stmt.targets[0].id, stmt.value
            else:
                continue
            value = _substituted(value, renamed)
            if target in outs and target not in loads(stmts[position + 1 :]):
                final[target] = value
                continue
            text = target
            if target in outs or target in elsewhere:
                text = self.structure.fresh(f"{target}_{suffix}")
            before.append(assign(text, value))
            renamed[target] = name(text)
            if target in outs:
                final[target] = name(text)
        return before, final

    # torch.cond

    def _cond(
        self,
        test: ast.expr,
        blocks: _Blocks,
        originals: _Blocks,
        forms: dict[str, Form],
        filled: list[str],
        branch: Branch,
    ) -> list[ast.stmt]:
        self.targets.append("torch.cond")
        self.count += 1
        before = self.probe.before.get(branch.number, {})
        bound = set()
        used = set(forms)
        for block in [*blocks, *originals]:
            bound |= (assigned(block) | mutated(block)) & set(before)
            used |= reads_before_write(block)
        passed = sorted((bound & used) - self.generated)
        operands = [p for p in passed if all(map(is_operand, before[p])) or p in self.promoted]
        defaults = [p for p in passed if p not in operands]
        functions = []
        made: list[ast.stmt] = []
        for stem, block in zip(("true", "false"), blocks, strict=True):
            functions.append(self.structure.fresh(f"{stem}_{self.count}"))
            made.append(self._function(functions[-1], block, operands, defaults, forms, before))
        call = expression(
            "torch.cond(test, a, b, operands)",
            test=test,
            a=name(functions[0]),
            b=name(functions[1]),
            operands=ast.Tuple(elts=[name(p) for p in operands], ctx=ast.Load()),
        )
        return [*made, *self._results(call, list(forms), filled)]

    def _results(self, call: ast.expr, outs: list[str], filled: list[str]) -> list[ast.stmt]:
        """Bind what a call returns; a shared tensor that was changed in place is filled."""
        if not outs:
            return [ast.Expr(call)]
        if len(outs) == 1:
            return [_bound(outs[0], call, filled)]
        names = {out: self.structure.fresh(f"{out}_new") if out in filled else out for out in outs}
        left = ast.Tuple(elts=[name(names[out], store=True) for out in outs], ctx=ast.Store())
        made: list[ast.stmt] = [ast.Assign(targets=[left], value=call)]
        return [*made, *(_bound(out, name(names[out]), filled) for out in outs if out in filled)]

    def _function(
        self,
        text: str,
        block: list[ast.stmt],
        operands: list[str],
        defaults: list[str],
        forms: dict[str, Form],
        before: dict[str, set[Kind]],
        *,
        loop: bool = False,
    ) -> ast.stmt:
        self.generated.add(text)
        (function,) = statements(f"def {text}(): pass")
        assert isinstance(function, ast.FunctionDef)
        function.args.args = [ast.arg(arg=p) for p in [*operands, *defaults]]
        function.args.defaults = [name(p) for p in defaults]
        body: list[ast.stmt] = [
            assign(p, expression("a.clone()", a=name(p)))
            for p in sorted(mutated(block))
            if _changed_in_place(p, block, before)
        ]
        body += [
            SpelledSuper(self.first).visit(copy.deepcopy(s)) for s in block if not isinstance(s, ast.Pass)
        ]
        values = [output(name(out), form, _own) for out, form in forms.items()]
        if not values:  # a branch that only checks still gives something
            values = [expression("torch.zeros(())")]
        result = values[0] if len(values) == 1 and not loop else ast.Tuple(elts=values, ctx=ast.Load())
        function.body = [*body, ast.Return(value=result)]
        return function

    # torch.while_loop

    def _while(self, stmt: ast.While, after: set[str]) -> list[ast.stmt]:
        branch = branch_of(stmt)
        assert branch is not None
        body = self._without_logs(stmt.body)
        self._refuse_effects(body, branch)
        before = self.probe.before.get(branch.number, {})
        inside = after | live_before([stmt], after)
        carried = sorted((assigned(body) | {m for m in mutated(body) if m in before}) & inside)
        rounds = self.probe.after.get((branch.number, True), {})
        forms = {}
        for text in carried:
            if text not in before:
                raise RewriteRefused(
                    f"`{text}` is used after the loop on `{branch.test}`, and has no value before it",
                    f"give `{text}` a value of the same type before the loop",
                    branch.place,
                )
            forms[text] = merged(text, before[text], rounds.get(text, before[text]), branch)
            if forms[text].kind not in ("tensor", "number"):
                raise RewriteRefused(
                    f"`{text}`, which the loop on `{branch.test}` carries, is no tensor and no number",
                    "carry tensors only",
                    branch.place,
                )
        outer = self.promoted
        self.promoted = outer | {text for text in carried if forms[text].kind == "number"}
        try:
            test = self._forced(self._loop_test(stmt.test, set(carried)), branch)
            negative = {
                text
                for text in carried
                for kind in before[text] | rounds.get(text, set())
                if kind.kind == "number" and kind.value < 0
            }
            block = [
                IndexByTensor(self.promoted, negative).visit(copy.deepcopy(s))
                for s in self._emitted(body, inside, branch)
            ]
        finally:
            self.promoted = outer
        self.targets.append("torch.while_loop")
        self._note_numbers(forms, branch)
        self.count += 1
        names = [self.structure.fresh(f"{stem}_{self.count}") for stem in ("test", "body")]
        self.generated |= set(names)
        (tested,) = statements(f"def {names[0]}({', '.join(carried)}): pass")
        assert isinstance(tested, ast.FunctionDef)
        tested.body = [ast.Return(value=test)]
        round_ = self._function(names[1], block, carried, [], forms, before, loop=True)
        start = ast.Tuple(elts=[output(name(c), forms[c], _as_it_is) for c in carried], ctx=ast.Load())
        call = expression("torch.while_loop(t, b, start)", t=name(names[0]), b=name(names[1]), start=start)
        filled = [c for c in carried if self._is_filled(c, body, [], branch)]
        if len(carried) == 1:
            call = ast.Subscript(value=call, slice=ast.Constant(0), ctx=ast.Load())
        return [tested, round_, *self._results(call, carried, filled)]

    def _loop_test(self, test: ast.expr, carried: set[str]) -> ast.expr:
        """The test of a loop; its Python parts are tensors too where they read what the loop carries."""
        natures = set()
        for atom in atoms(test):
            nature = self.structure.nature(atom)
            if nature == "static":
                if not loads(atom) & carried:
                    raise RewriteRefused(
                        f"`{ast.unparse(atom)}` in the test of a loop is a Python value that no round "
                        f"changes",
                        "test it with an `if` around the loop",
                        self.source.place(atom),
                    )
                nature = "tensor"
            natures.add(nature)
        return self.predicate(test, "tensor" if natures == {"tensor"} or loads(test) & carried else "symbol")


def _captured(node: FunctionNode) -> set[str]:
    """Names that functions inside `node` read."""
    inner = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.Lambda)) and n is not node]
    return set().union(*map(loads, inner)) if inner else set()


def _root(target: ast.expr) -> str | None:
    """The variable that a target is, or is part of; the text of an attribute."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return next((root for one in target.elts if (root := _root(one)) is not None), None)
    if isinstance(target, ast.Starred):
        return _root(target.value)
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ast.unparse(target)


def _changed_in_place(text: str, stmts: Sequence[ast.stmt], before: dict[str, set[Kind]]) -> bool:
    """Whether a tensor from before the block is changed, not only a new one under the same name."""
    if not any(kind.kind == "tensor" for kind in before.get(text, set())):
        return False
    for stmt in stmts:
        if text in mutated(stmt):
            return True
        if isinstance(stmt, ast.Assign) and text in plain_targets(stmt):
            return False
    return False


def _bound(out: str, value: ast.expr, filled: list[str]) -> ast.stmt:
    return ast.Expr(expression("a.copy_(b)", a=name(out), b=value)) if out in filled else assign(out, value)


def _chosen(form: Form, test: ast.expr, a: ast.expr, b: ast.expr) -> ast.expr:
    """`a` where the test is true, `b` elsewhere; ONNX Runtime (1.32) has no ``Where`` of booleans."""
    if form.dtype != "torch.bool":
        return expression("torch.where(test, a, b)", test=test, a=a, b=b)
    fixed_a, fixed_b = (getattr(side, "value", None) for side in (a, b))
    if form.kind == "number":
        a, b = (as_tensor(side, form.dtype) for side in (a, b))
    if fixed_a is True:
        return expression("torch.logical_or(test, b)", test=test, b=b)
    if fixed_b is False:
        return expression("torch.logical_and(test, a)", test=test, a=a)
    both = "torch.logical_or(torch.logical_and(t, a), torch.logical_and(torch.logical_not(t), b))"
    return expression(both, t=test, a=a, b=b)


def _own(value: ast.expr, form: Form) -> ast.expr:
    """A tensor of its own: `torch.cond` refuses results that share memory, or differ in strides."""
    text = "a.clone()" if form.contiguous else "a.clone(memory_format=torch.contiguous_format)"
    return expression(text, a=value)


def _as_it_is(value: ast.expr, form: Form) -> ast.expr:
    return value


def _substituted(node: ast.expr, names: dict[str, ast.expr]) -> ast.expr:
    class Visitor(ast.NodeTransformer):
        def visit_Name(self, found: ast.Name) -> ast.expr:
            return copy.deepcopy(names[found.id]) if found.id in names else found

    made: ast.expr = Visitor().visit(copy.deepcopy(node))
    return made


def _text(node: ast.expr) -> str:
    """A message as text: an f-string keeps its braces, as the values in it need not be known."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            shown = part.value if isinstance(part, ast.FormattedValue) else part
            parts.append(
                str(shown.value) if isinstance(shown, ast.Constant) else "{" + ast.unparse(shown) + "}"
            )
        return "".join(parts)
    return ast.unparse(node)


def _message(node: ast.Raise, branch: Branch) -> str:
    if isinstance(node.exc, ast.Call) and node.exc.args:
        return _text(node.exc.args[0])
    return f"{branch.test} at {branch.place}"
