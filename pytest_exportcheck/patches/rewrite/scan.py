"""A Python loop over a dynamic axis as a scan: ``torch._higher_order_ops.scan``, ONNX ``Scan``.

``for`` fixes the size of the axis that it runs over in a graph. In a scan the variables that one round hands
to the next are carried, the slices of the round come from the operator, and lists that grow by one value a
round are its outputs, which ``torch.stack`` and ``torch.cat`` after the loop find stacked already.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from types import ModuleType

from .folds import SpelledSuper, changed
from .forms import Form, has_number, merged, output
from .iteration import Counter, Iteration, iteration_of
from .loops import IndexByTensor
from .names import (
    FreeNames,
    assigned,
    captured,
    contains,
    in_place,
    live_before,
    loads,
    mutated,
    own_nodes,
    plain_targets,
    root_name,
)
from .out_of_place import out_of_place
from .probe import Kind, Probe
from .scan_lists import Grown, Stacked, appended
from .scan_reads import Hoisted, HoistReads
from .source import FunctionNode, FunctionSource
from .tests_in import Branch, assign, expression, name, statements
from .values import RewriteRefused

__all__ = ["LOOP", "ROUND", "ScanEmitter"]

#: The numbers under which a probe notes the loop and its rounds.
LOOP, ROUND = 0, 1

_FORBIDDEN = (ast.Await, ast.Delete, ast.Global, ast.Import, ast.ImportFrom, ast.Nonlocal, ast.Yield)


class ScanEmitter:
    """Emits one function in which one loop is a scan.

    Parameters
    ----------
    node:
        The function, with `loop` in it.
    probe:
        Ran it: the kinds of the variables before the loop, after each round, and after the loop.
    """

    def __init__(self, source: FunctionSource, node: FunctionNode, loop: ast.For, probe: Probe) -> None:
        self.source = source
        self.node = node
        self.loop = loop
        self.before = probe.before[LOOP]
        self.ends = probe.after.get((LOOP, True), {})
        self.left = probe.after.get((LOOP, False), {})
        self.shared = probe.shared.get(LOOP, set())
        self.fresh = FreeNames(node)
        arguments = [*source.node.args.posonlyargs, *source.node.args.args]
        self.first = arguments[0].arg if arguments else ""
        self.notes: list[str] = []
        self.place = source.place(loop)
        self.text = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
        # Functions of a round end with it: nothing but tensors and numbers leaves one.
        ended = {*ast.walk(loop), node}
        inner = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.Lambda)) and n not in ended]
        self.captured: set[str] = set().union(*map(captured, inner)) if inner else set()

    def function(self) -> FunctionNode:
        """The rewritten function."""
        after = self._after(self.node.body, set())
        assert after is not None
        self._refuse_jumps_and_effects()
        over = iteration_of(self.loop, self.source)
        body, lists = self._appends(self.loop.body)
        made = self._scan(over, body, lists, after)
        found = self._block(self.node.body, made, {one.text: one for one in lists})
        if not isinstance(self.source.function.__globals__.get("torch"), ModuleType):
            found = [ast.Import(names=[ast.alias(name="torch")]), *found]
        return changed(self.node, body=found)  # type: ignore[no-any-return]

    def _refused(self, construct: str, advice: str, at: ast.AST | None = None) -> RewriteRefused:
        place = self.place if at is None or not hasattr(at, "lineno") else self.source.place(at)
        return RewriteRefused(f"{construct} in the loop `{self.text}`, over a dynamic axis", advice, place)

    # Where the loop stands

    def _after(self, stmts: Sequence[ast.stmt], after: set[str]) -> set[str] | None:
        """The names whose values may be read after the loop; `None` if it is not in `stmts`."""
        for position, stmt in enumerate(stmts):
            rest = live_before(stmts[position + 1 :], after) | self.captured
            if stmt is self.loop:
                return rest
            if isinstance(stmt, (ast.For, ast.While)):
                rest = rest | live_before([stmt], rest)
            if isinstance(stmt, (ast.Try, ast.With)):
                rest = rest | assigned(stmt)
            for part in ("body", "orelse", "finalbody"):
                found = self._after(getattr(stmt, part, None) or [], rest)
                if found is not None:
                    return found
        return None

    # What no round may do

    def _refuse_jumps_and_effects(self) -> None:
        body = self.loop.body
        if contains(body, (ast.Break, ast.Continue), loops=False):
            jump = next(n for n in own_nodes(body, loops=False) if isinstance(n, (ast.Break, ast.Continue)))
            raise self._refused(
                f"`{type(jump).__name__.lower()}`",
                "let every round run, and keep the old values with torch.where where it does not count",
                jump,
            )
        for node in own_nodes(body):
            if isinstance(node, ast.Return):
                raise self._refused(
                    "`return`", "keep the result in a variable, and return it after the loop", node
                )
            if isinstance(node, _FORBIDDEN):
                raise self._refused(f"`{type(node).__name__.lower()}`", "move it out of the loop", node)
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
                func = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
                if (
                    not mutated(node)
                    and not func.startswith(("torch._check", "torch._assert"))
                    and not appended(node)
                ):
                    raise self._refused(
                        f"`{ast.unparse(node)}`, which is there for its effect,",
                        "append tensors to a list, and move every other effect out of the loop",
                        node,
                    )
            self._refuse_write(node)

    def _refuse_write(self, node: ast.AST) -> None:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and in_place(node.func.attr):
            targets = [node.func.value]
        for target in [part for one in targets for part in _parts(one)]:
            root = root_name(target)
            if root is None:
                raise self._refused(
                    f"a write to `{ast.unparse(target)}`",
                    "keep it in a variable, and store that after the loop",
                    target,
                )
            kinds = {kind.kind for kind in self.before.get(root, set()) | self.ends.get(root, set())}
            if isinstance(target, ast.Subscript) and not kinds <= {"tensor"}:
                raise self._refused(
                    f"a write into `{root}`, which is no tensor,",
                    "carry tensors: torch.stack what the list holds before the loop, or use one variable "
                    "for each",
                    target,
                )
            changes = root in mutated(node)
            if changes and root in self.shared and "tensor" in kinds and not self._is_new(root):
                raise self._refused(
                    f"a write in place into `{root}`, which something else refers to as well,",
                    f"start with `{root} = {root}.clone()` before the loop, or append the values to a list "
                    "and torch.stack it after the loop",
                    target,
                )

    def _is_new(self, text: str) -> bool:
        """Whether a round binds the name before it changes the tensor."""
        return text not in self.before or text not in live_before(self.loop.body, set())

    # Lists

    def _appends(self, stmts: list[ast.stmt]) -> tuple[list[ast.stmt], list[Grown]]:
        """The body with its appended values in variables, and the lists."""
        made: list[ast.stmt] = []
        lists: list[Grown] = []
        for stmt in stmts:
            found = appended(stmt)
            if found is None:
                made.append(stmt)
                continue
            text, value = found
            variable = self.fresh("value")
            kind, starts = self._kind_of_list(text, stmt)
            first = self.fresh(f"{text}_before") if starts else ""
            lists.append(Grown(text, variable, self.fresh(f"{text}_stacked"), kind, first))
            made.append(assign(variable, value, stmt))
        for node in own_nodes(made):
            inner = appended(node) if isinstance(node, ast.stmt) else None
            if inner is not None:
                raise self._refused(
                    f"`{inner[0]}` grows under a test or in another loop",
                    "append one value a round: stack what belongs to a round first",
                    node,
                )
        texts = [one.text for one in lists]
        if len(set(texts)) < len(texts):
            raise self._refused("a list grows twice a round", "append one value a round, torch.stack([a, b])")
        read = loads(made) & set(texts)
        if read:
            raise self._refused(
                f"`{min(read)}`, a list that grows, is read", "keep what the next round needs in a variable"
            )
        return made, lists

    def _kind_of_list(self, text: str, at: ast.AST) -> tuple[Kind, bool]:
        """What the values of a list are, and whether it has some before the loop."""
        starts = self.before.get(text, set())
        lengths = {len(kind.items) if kind.type == "list" else -1 for kind in starts}
        if len(lengths) != 1 or min(lengths) < 0:
            raise self._refused(
                f"`{text}` is no list of one length before the loop",
                "append to a list of its own, and put both together after the loop with torch.cat",
                at,
            )
        items = {item for kind in self.left.get(text, set()) for _, item in kind.items}
        for kind in self.left.get(text, set()):
            if len({(item.dtype, item.shape) for _, item in kind.items}) > 1:
                raise self._refused(
                    f"the values of `{text}` have several shapes or dtypes",
                    "append tensors of one shape and dtype",
                    at,
                )
        if not items or {item.kind for item in items} != {"tensor"}:
            raise self._refused(
                f"`{text}` gets values that are no tensors",
                "append one tensor a round, and use one list for each",
                at,
            )
        dimensions = {len(item.shape or ()) for item in items}
        if len(dimensions) > 1:
            raise self._refused(
                f"the values of `{text}` have several numbers of dimensions", "append one form", at
            )
        return next(iter(items)), lengths != {0}

    # The scan

    def _scan(
        self, over: Iteration, body: list[ast.stmt], lists: list[Grown], after: set[str]
    ) -> list[ast.stmt]:
        bound = set().union(
            *(plain_targets(ast.Assign(targets=[r.target], value=r.tensor)) for r in over.rows)
        )
        bound |= {one.name for one in over.counters}
        self._refuse_targets_after(bound, after)
        for rows in over.rows:
            if isinstance(rows.tensor, ast.Name):
                kinds = {kind.kind for kind in self.before.get(rows.tensor.id, set())}
                if kinds and kinds != {"tensor"}:
                    raise self._refused(
                        f"`{rows.tensor.id}`, which is no tensor, is run over",
                        "torch.stack it before the loop, or read it by the counter",
                        rows.tensor,
                    )
        carried = self._carried(body, after, bound, {one.text for one in lists})
        tensors = {
            text
            for text in {*self.before, *self.ends}
            if {k.kind for k in self.before.get(text, set()) | self.ends.get(text, set())} == {"tensor"}
        }
        body = out_of_place(body, tensors | {text for text, form in carried.items() if form.kind == "number"})
        fixed = {
            text: len(next(iter(self.before[text])).shape or ())
            for text in tensors - assigned(body) - mutated(body) - bound
            if text in self.before and len({len(kind.shape or ()) for kind in self.before[text]}) == 1
        }
        reads = HoistReads(over.counters, fixed, self.fresh)
        body = [reads.visit(copy.deepcopy(stmt)) for stmt in body]
        body = self._by_tensor(body, over.counters)
        return self._written(over, list(reads.found.values()), body, lists, carried)

    def _refuse_targets_after(self, bound: set[str], after: set[str]) -> None:
        late = bound & after
        if late:
            raise self._refused(
                f"`{min(late)}`, which every round binds, is read after the loop",
                "read the last one from the tensor: `x[-1]`",
            )

    def _carried(
        self, body: list[ast.stmt], after: set[str], bound: set[str], lists: set[str]
    ) -> dict[str, Form]:
        """The variables that one round hands to the next, or to what follows, in their forms."""
        inside = after | live_before(body, after)
        names = (assigned(body) | {text for text in mutated(body) if text in self.before}) - bound - lists
        forms: dict[str, Form] = {}
        for text in sorted(names & inside):
            if text not in self.before:
                raise self._refused(
                    f"`{text}` gets its value, and is used after it",
                    f"give `{text}` a value of the same shape and dtype before the loop",
                )
            forms[text] = self._form(text)
        return forms

    def _form(self, text: str) -> Form:
        start, end = self.before[text], self.ends.get(text, self.before[text])
        if len({kind.kind for kind in start}) == 1 and {kind.kind for kind in start} == {"tensor"} == {
            kind.kind for kind in end
        }:
            same = {(k.dtype, k.shape) for k in start} >= {(k.dtype, k.shape) for k in end}
        else:
            same = True
        try:
            form = merged(text, start, end, Branch(LOOP, self.place, self.text, "tensor"))
        except RewriteRefused:
            same, form = False, Form("none")
        if not same or form.kind not in ("tensor", "number", "container"):
            first, later = (" or ".join(sorted(map(str, kinds))[:3]) for kinds in (start, end))
            raise self._refused(
                f"`{text}`, which one round hands to the next, is {first} before and {later} after a round,",
                f"start `{text}` as a tensor of the shape and dtype that it keeps, "
                "with torch.zeros(...) or .to(...)",
            )
        return form

    def _by_tensor(self, body: list[ast.stmt], counters: list[Counter]) -> list[ast.stmt]:
        """The counters that are still read are tensors in a round."""
        names = {one.name for one in counters}
        by_tensor = IndexByTensor(set(names), {one.name for one in counters if one.may_be_negative})
        made = [by_tensor.visit(stmt) for stmt in body]
        for node in own_nodes(made):
            parts: list[ast.AST] = []
            if isinstance(node, (ast.Subscript, ast.JoinedStr)):
                parts = [node.slice] if isinstance(node, ast.Subscript) else [node]
            elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
                parts = [node.test]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                parts = list(node.args)
            elif isinstance(node, ast.For):
                parts = [node.iter]
            for part in parts:
                found = loads(part) & names
                if found:
                    raise self._refused(
                        f"`{ast.unparse(node).splitlines()[0]}` needs the value of the counter "
                        f"`{min(found)}`",
                        "choose with torch.where, index with index_select, or take the first round out of "
                        "the loop",
                        node,
                    )
        return made

    def _written(
        self,
        over: Iteration,
        hoisted: list[Hoisted],
        body: list[ast.stmt],
        lists: list[Grown],
        carried: dict[str, Form],
    ) -> list[ast.stmt]:
        setup: list[ast.stmt] = [assign(one.first, name(one.text)) for one in lists if one.first]
        items: list[ast.expr] = []
        given: list[ast.expr] = []
        head: list[ast.stmt] = []

        def hand_out(target: ast.expr, value: ast.expr, stem: str) -> None:
            if not isinstance(value, ast.Name):
                text = self.fresh(stem)
                setup.append(assign(text, value))
                value = name(text)
            items.append(target)
            given.append(value)

        for rows in over.rows:
            target = copy.deepcopy(rows.target)
            value = _first_axis(copy.deepcopy(rows.tensor), rows.axis)
            if rows.keeps:
                item = self.fresh("item")
                kept = expression(f"a.unsqueeze({rows.axis})", a=name(item))
                head.append(ast.Assign(targets=[target], value=kept))
                target = name(item, store=True)
            hand_out(target, value, "rows")
        for one in hoisted:
            whole: ast.expr = name(one.base)
            if one.counter.stop is not None and not _is_size(one.counter.stop, one.base, one.axis):
                whole = expression(f"a.narrow({one.axis}, 0, n)", a=whole, n=_at_least(one.counter.stop, "0"))
            hand_out(name(one.item, store=True), _first_axis(whole, one.axis), f"{one.base}_rows")
        read = loads(body)
        for counter in over.counters:
            if counter.name in read or not given:
                numbers = _numbers(counter, given[0] if given else None, self._device(carried, given))
                hand_out(name(counter.name, store=True), numbers, f"{counter.name}_numbers")
        texts = list(carried)
        start: list[ast.expr] = [output(name(text), carried[text], _own) for text in texts]
        ends: list[ast.expr] = [output(name(text), carried[text], _own) for text in texts]
        left: list[ast.expr] = [name(text, store=True) for text in texts]
        inner: list[ast.expr] = [name(text, store=True) for text in texts]
        if not texts:  # the operator wants to carry something
            nothing = self.fresh("nothing")
            start, ends = (
                [expression("a.new_zeros(())", a=given[0])],
                [expression("a.clone()", a=name(nothing))],
            )
            left, inner = [name(nothing, store=True)], [name(nothing, store=True)]
        for text in texts:
            if has_number(carried[text]):
                self.notes.append(
                    f"{self.place}: `{text}`, a Python number, is a tensor of shape [] after the loop"
                )
        values: list[ast.expr] = [expression("a.clone()", a=name(one.value)) for one in lists]
        stacked: list[ast.expr] = [name(one.stacked, store=True) for one in lists]
        function_name = self.fresh("one_round")
        (function,) = statements(f"def {function_name}(carried, items): pass")
        assert isinstance(function, ast.FunctionDef)
        parameters = [self.fresh("carried"), self.fresh("items")]
        function.args.args = [ast.arg(arg=text) for text in parameters]
        function.body = [
            ast.Assign(targets=[_tuple(inner, store=True)], value=name(parameters[0])),
            ast.Assign(targets=[_tuple(items, store=True)], value=name(parameters[1])),
            *head,
            *[SpelledSuper(self.first).visit(stmt) for stmt in body if not isinstance(stmt, ast.Pass)],
            ast.Return(value=_tuple([_tuple(ends), _tuple(values)])),
        ]
        call = expression(
            "torch._higher_order_ops.scan(f, init, xs)",
            f=name(function_name),
            init=_tuple(start),
            xs=_tuple(given),
        )
        outs: ast.expr = _tuple(stacked, store=True) if lists else name(self.fresh("unused"), store=True)
        result = ast.Assign(targets=[_tuple([_tuple(left, store=True), outs], store=True)], value=call)
        return [*setup, function, result, *self.loop.orelse]

    def _device(self, carried: dict[str, Form], given: list[ast.expr]) -> ast.expr | None:
        tensors = [name(text) for text, form in carried.items() if form.kind == "tensor"]
        found = [*given, *tensors]
        return expression("a.device", a=found[0]) if found else None

    # The rest of the function

    def _block(self, stmts: list[ast.stmt], made: list[ast.stmt], lists: dict[str, Grown]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for stmt in stmts:
            if stmt is self.loop:
                found += made
            elif not loads(stmt) & set(lists) and not any(n is self.loop for n in own_nodes(stmt)):
                found.append(stmt)
            elif hasattr(stmt, "body") and not isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
                changes = {
                    part: self._block(block, made, lists)
                    for part in ("body", "orelse", "finalbody")
                    if (block := getattr(stmt, part, None))
                }
                heads = [getattr(stmt, part) for part in ("test", "iter") if hasattr(stmt, part)]
                self._refuse_lists(heads, lists)
                found.append(changed(stmt, **changes))
            else:
                stacking = Stacked(lists)
                new = stacking.visit(copy.deepcopy(stmt))
                self._refuse_lists([new], lists)
                found.append(new)
        return found

    def _refuse_lists(self, nodes: Sequence[ast.AST], lists: dict[str, Grown]) -> None:
        for node in nodes:
            read = loads(node) & set(lists)
            if read:
                raise RewriteRefused(
                    f"`{min(read)}`, a list of as many tensors as the loop `{self.text}` has rounds, "
                    "is used as a list",
                    f"use torch.stack({min(read)}) or torch.cat({min(read)}), and index that",
                    self.source.place(node) if hasattr(node, "lineno") else self.place,
                )


def _parts(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return [part for one in target.elts for part in _parts(one)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _first_axis(tensor: ast.expr, axis: int) -> ast.expr:
    return tensor if axis == 0 else expression(f"a.movedim({axis}, 0)", a=tensor)


def _is_size(stop: ast.expr, base: str, axis: int) -> bool:
    sizes = [f"{base}.shape[{axis}]", f"{base}.size({axis})", *([f"len({base})"] if axis == 0 else [])]
    return ast.unparse(stop) in sizes


def _at_least(stop: ast.expr, least: str) -> ast.expr:
    """`stop`, or `least` where it is smaller; the size of an axis is no less than 0."""
    size = (
        isinstance(stop, ast.Subscript)
        and isinstance(stop.value, ast.Attribute)
        and stop.value.attr == "shape"
    )
    return stop if size else expression(f"torch.sym_max(n, {least})", n=stop)


def _numbers(counter: Counter, rows: ast.expr | None, device: ast.expr | None) -> ast.expr:
    if counter.stop is None:
        assert rows is not None
        made = expression("torch.arange(a.shape[0])", a=rows)
    elif counter.from_zero:
        made = expression("torch.arange(b)", b=_at_least(counter.stop, "0"))
    else:
        # A range that would end before it starts has no rounds; torch.arange raises.
        bound = "torch.sym_min(b, a)" if counter.falls else "torch.sym_max(b, a)"
        stop = expression(bound, a=counter.start, b=counter.stop)
        made = expression("torch.arange(a, b, c)", a=counter.start, b=stop, c=counter.step)
    assert isinstance(made, ast.Call)
    if device is not None:
        made.keywords = [ast.keyword(arg="device", value=device)]
    if counter.stop is None and not counter.from_zero:
        return expression("a + b", a=made, b=counter.start)
    return made


def _tuple(elts: Sequence[ast.expr], *, store: bool = False) -> ast.Tuple:
    return ast.Tuple(elts=list(elts), ctx=ast.Store() if store else ast.Load())


def _own(value: ast.expr, form: Form) -> ast.expr:
    """A tensor of its own: what a scan gives back shares no memory with what it was given.

    It lies in memory as it is counted: the operator wants all rounds alike, the first one (which may be given
    an expanded or a transposed tensor) included.
    """
    return expression("a.clone(memory_format=torch.contiguous_format)", a=value)
