"""Rewrite the loop of one function that fixes the size of a dynamic axis: find, observe, emit, prove."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree

from .equality import outcomes_differ, replay
from .folds import changed, unconditional
from .iteration import comprehension_as_loop
from .names import FreeNames, assigned, loads, own_nodes
from .probe import PROBE, Call, Probe
from .scan import LOOP, ROUND, ScanEmitter
from .source import FunctionNode, FunctionSource, compile_function, read_source, target_name
from .tests_in import statements, with_probes
from .text import rewritten_text
from .transform import Run, method_of, parsed, record_calls, twin
from .values import LoopProof, Place, Proof, RewriteRefused, RewrittenMethod, Site

__all__ = ["loop_at", "rewrite_loop"]

#: Lengths of axes that are tried beside the observed ones; the long ones for loops over blocks.
_LENGTHS = (0, 1, 2, 3, 5, 8)
_LONG = (65, 130)


def loop_at(source: FunctionSource, place: Place) -> ast.For | ast.ListComp | None:
    """The loop whose head stands at `place`, or runs over a variable that gets its value there."""
    line = place.line - source.first_line + 1
    loops = [n for n in own_nodes(source.node.body) if isinstance(n, (ast.For, ast.ListComp))]
    heads = [(_head(loop), loop) for loop in loops]
    at = [(head, loop) for head, loop in heads if head.lineno <= line <= (head.end_lineno or 0)]
    if place.column >= 0 and len(at) > 1:
        column = place.column - source.indent
        at = [(h, one) for h, one in at if h.col_offset <= column < (h.end_col_offset or 0)] or at
    if at:
        return at[-1][1]
    bound: set[str] = set()
    for node in own_nodes(source.node.body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= line <= (node.end_lineno or 0):
            bound |= assigned(node)
    return next((loop for head, loop in heads if loads(head) & bound and head.lineno > line), None)


def _head(loop: ast.For | ast.ListComp) -> ast.expr:
    return loop.iter if isinstance(loop, ast.For) else loop.generators[0].iter


def rewrite_loop(function: FunctionType, run: Run, site: Site) -> RewrittenMethod | None:
    """Rewrite the loop at `site` as a scan; `None` if there is no loop.

    Parameters
    ----------
    run:
        Calls the function, as part of its model, with real arguments.

    Raises
    ------
    RewriteRefused
        What cannot be rewritten, or a result that differs.
    """
    if site.code is not function.__code__:
        return None
    try:
        source = read_source(function)
    except RewriteRefused:
        return None
    loop = loop_at(source, site.place)
    if loop is None:
        return None
    at = source.place(_head(loop))
    if isinstance(loop, ast.ListComp):
        node, loop = _as_statement(source, loop)
    else:
        node = _with_values_inlined(source, loop, site.place)
        loop = next(n for n in own_nodes(node.body) if isinstance(n, ast.For) and getattr(n, "marked", False))
    calls = record_calls(function, run)
    watched = compile_function(source, with_probes(_reporting(node, loop)))
    seen = Probe(limit=0)
    for call in calls:
        with seen.active(watched):
            got = replay(watched, call)
        if got.error is not None:
            raise RewriteRefused(
                f"{target_name(function)} raises {type(got.error).__name__} when a recorded call is "
                f"repeated: {got.error}",
                "it depends on more than its arguments: rewrite this function by hand",
                at,
            )
    if LOOP not in seen.before:
        raise RewriteRefused("no observed call runs the loop", "observe a call that runs it", at)
    emitter = ScanEmitter(source, node, loop, seen)
    text = rewritten_text(source, emitter.function())
    made = compile_function(source, parsed(text), text)
    proof = _proven(twin(function), made, watched, calls, at, emitter.text)
    if not proof.proven:
        raise RewriteRefused(
            f"the scan for `{emitter.text}` is proven for one number of rounds only ({proof})",
            "observe calls of two lengths",
            at,
        )
    notes = list(emitter.notes)
    if 0 in (*proof.observed, *proof.made):
        notes.append(f"{at}: no program runs a scan over an axis of no elements, which the original takes")
    return method_of(source, made, text, ("scan",), Proof((proof,), len(calls) + len(proof.made)), notes)


# The loop as a statement of its own


def _as_statement(source: FunctionSource, found: ast.ListComp) -> tuple[FunctionNode, ast.For]:
    """The function with a comprehension as a loop."""

    def refuse(what: str) -> RewriteRefused:
        return RewriteRefused(
            f"the list comprehension `{ast.unparse(found)}`, over a dynamic axis, {what}",
            "write it as a loop that appends to a list",
            source.place(found),
        )

    if len(found.generators) != 1 or found.generators[0].ifs or found.generators[0].is_async:
        raise refuse("has more than one loop, or a test")
    fresh = FreeNames(source.node)
    loops: list[ast.For] = []

    def block(stmts: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for stmt in stmts:
            if not any(n is found for n in own_nodes(stmt)):
                made.append(stmt)
            elif hasattr(stmt, "body"):
                parts = ("body", "orelse", "finalbody")
                changes = {part: block(inner) for part in parts if (inner := getattr(stmt, part, None))}
                made.append(changed(stmt, **changes))
            else:
                parents = [
                    n for n in [stmt, *unconditional(stmt)] if not isinstance(n, (ast.IfExp, ast.BoolOp))
                ]
                if not any(child is found for n in parents for child in ast.iter_child_nodes(n)):
                    raise refuse("is only sometimes computed")
                new, loop = comprehension_as_loop(stmt, found, fresh)
                loops.append(loop)
                made += new
        return made

    node = changed(source.node, body=block(source.node.body))
    if not loops:
        raise refuse("stands in the head of another statement")
    return node, loops[0]


def _with_values_inlined(source: FunctionSource, loop: ast.For, place: Place) -> FunctionNode:
    """The function with what the loop runs over in its head: ``rows = x.unbind(1)`` before it is gone.

    The loop is `marked`, since it may be another object.
    """
    line = place.line - source.first_line + 1
    loop.marked = True  # type: ignore[attr-defined]
    if loop.iter.lineno <= line <= (loop.iter.end_lineno or 0):
        return source.node
    stmts = [
        n
        for n in own_nodes(source.node.body)
        if isinstance(n, ast.Assign) and n.lineno <= line <= (n.end_lineno or 0)
    ]
    target = stmts[0].targets[0] if len(stmts) == 1 and len(stmts[0].targets) == 1 else None
    text = target.id if isinstance(target, ast.Name) else ""
    if sum(isinstance(n, ast.Name) and n.id == text for n in ast.walk(source.node)) != 2:
        raise RewriteRefused(
            f"the loop `for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}` runs over a value that "
            "fixes the size of a dynamic axis where it is made",
            "put the value into the head of the loop",
            place,
        )

    stmt = stmts[0]

    class Inlining(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(stmt.value) if node.id == text else node

    new = changed(loop, iter=Inlining().visit(copy.deepcopy(loop.iter)))

    def block(body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for one in body:
            if one is loop:
                made.append(new)
            elif one is not stmt and any(n is loop or n is stmt for n in own_nodes(one)):
                parts = ("body", "orelse", "finalbody")
                changes = {part: block(inner) for part in parts if (inner := getattr(one, part, None))}
                made.append(changed(one, **changes))
            elif one is not stmt:
                made.append(one)
        return made

    loop.marked = False  # type: ignore[attr-defined]
    new.marked = True
    return changed(source.node, body=block(source.node.body))  # type: ignore[no-any-return]


def _reporting(node: FunctionNode, loop: ast.For) -> FunctionNode:
    """A copy in which a probe is told of the loop and its rounds."""
    loop.reports = True  # type: ignore[attr-defined]

    class Reports(ast.NodeTransformer):
        def visit_For(self, found: ast.For) -> object:
            self.generic_visit(found)
            if not getattr(found, "reports", False):
                return found
            before = statements(f"{PROBE}.decide({LOOP}, True, locals())")
            first = statements(f"{PROBE}.decide({ROUND}, True)")
            last = statements(f"{PROBE}.leave({LOOP}, True, locals())")
            after = statements(f"{PROBE}.leave({LOOP}, False, locals())")
            found.body = [*first, *found.body, *last]
            return [*before, found, *after]

    made = copy.deepcopy(node)
    loop.reports = False  # type: ignore[attr-defined]
    reported: FunctionNode = Reports().visit(made)
    return ast.fix_missing_locations(reported)


# The proof


def _rounds(watched: FunctionType, call: Call) -> int | None:
    """How many rounds the loop has in a call; `None` where that is not one number."""
    probe = Probe(limit=0)
    with probe.active(watched):
        replay(watched, call)
    runs = probe.outcomes.get(LOOP, {}).get(True, 0)
    rounds = probe.outcomes.get(ROUND, {}).get(True, 0)
    return rounds // runs if runs and rounds % runs == 0 else None


def _axes(calls: Sequence[Call]) -> list[tuple[int, list[tuple[Any, int]]]]:
    """The axes of the arguments that are equally long in every call: (length in the first, [(path, axis)]).

    The axis of a number is -1.
    """
    groups: dict[tuple[int | None, ...], list[tuple[Any, int]]] = {}
    sizes: list[dict[tuple[Any, int], int]] = []
    for call in calls:
        here: dict[tuple[Any, int], int] = {}
        for path, leaf in _pytree.tree_flatten_with_path(dict(call.values))[0]:
            if isinstance(leaf, torch.Tensor):
                here |= {(path, axis): size for axis, size in enumerate(leaf.shape)}
            elif type(leaf) is int:
                here[path, -1] = leaf
        sizes.append(here)
    for key, size in sizes[0].items() if sizes else ():
        groups.setdefault((size, *(one.get(key) for one in sizes[1:])), []).append(key)
    return [(key[0] or 0, group) for key, group in groups.items() if any(axis >= 0 for _, axis in group)]


def _resized(call: Call, axes: Sequence[tuple[Any, int]], length: int) -> Call:
    leaves, spec = _pytree.tree_flatten_with_path(dict(call.values))
    made = []
    for path, leaf in leaves:
        for found, axis in axes:
            if found == path and axis < 0:
                leaf = length
            elif found == path:
                leaf = leaf.index_select(axis, torch.arange(length, device=leaf.device) % leaf.shape[axis])
        made.append(leaf)
    return Call(_pytree.tree_unflatten(made, spec))


def _proven(
    original: FunctionType,
    rewritten: FunctionType,
    watched: FunctionType,
    calls: Sequence[Call],
    place: Place,
    text: str,
) -> LoopProof:
    """Compare on every observed call, and on calls of other lengths that the original takes."""

    def compare(call: Call, what: str) -> bool:
        reference = replay(original, call)
        if reference.error is not None:
            return False
        found = outcomes_differ(reference, replay(rewritten, call))
        if found is not None:
            raise RewriteRefused(
                f"the rewritten {target_name(original)} differs from the original ({what}): {found}",
                "rewrite this loop by hand, with torch._higher_order_ops.scan",
                place,
            )
        return True

    rounds = [_rounds(watched, call) for call in calls]
    for position, call in enumerate(calls):
        compare(call, f"observed call {position}")
    made: set[int] = set()
    raising: set[int] = set()
    for size, axes in _axes(calls):
        for length in (*_LENGTHS, size + 1, *_LONG):
            if size:
                resized = _resized(calls[0], axes, length)
                count = _rounds(watched, resized)
                if count is not None and count not in (*rounds, *made):
                    (made if compare(resized, f"{count} rounds") else raising).add(count)
    observed = sorted({count for count in rounds if count is not None})
    return LoopProof(place, text, tuple(observed), tuple(sorted(made)), tuple(sorted(raising - made)))
