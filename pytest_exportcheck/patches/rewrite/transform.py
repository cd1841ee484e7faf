"""Rewrite one function: observe it, structure it, emit it, prove it."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from .emit import Emitter
from .locate import locate
from .probe import Call, Probe
from .prove import explored, prove
from .source import (
    FunctionNode,
    FunctionSource,
    compile_function,
    exchanged,
    plain_function,
    read_source,
    target_name,
)
from .structure import FIRST_BRANCH, Structurer
from .tests_in import atoms, branch_of, number_tests, with_probes
from .text import rewritten_text, unified_diff
from .values import BranchProof, Proof, RewriteRefused, RewrittenMethod, Site

__all__ = ["Run", "method_of", "parsed", "record_calls", "rewrite_function", "transform_method", "twin"]

_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

#: Runs the model on every observed call, in eager.
Run = Callable[[], object]


def record_calls(function: FunctionType, run: Run, limit: int = 8) -> list[Call]:
    """The calls that `run` makes of `function`: the first `limit`."""
    probe = Probe(limit=limit)
    source = read_source(function)
    watched = compile_function(source, with_probes(source.node))
    with exchanged(function, watched), probe.active(function):
        run()
    return probe.calls


def rewrite_function(function: FunctionType, run: Run, site: Site | None = None) -> RewrittenMethod:
    """Rewrite the tests of `function` that depend on tensors; the function itself is left as it is.

    Parameters
    ----------
    function:
        A plain function, see `plain_function`.
    run:
        Calls it, as part of its model or directly, with real arguments.
    site:
        Where an export stopped: a test there depends on a tensor even where eager sees a Python number.

    Raises
    ------
    RewriteRefused
        What cannot be rewritten, or a result that differs.
    """
    source = read_source(function)
    number_tests(source.node)
    place = source.place(source.node)
    if function.__code__.co_flags & _NOT_PLAIN:
        raise RewriteRefused(
            f"{target_name(function)} is a generator or a coroutine", "return a list instead", place
        )
    calls = record_calls(function, run)
    if not calls:
        raise RewriteRefused(
            f"no observed call runs {target_name(function)}", "observe a call that runs it", place
        )

    seen = Probe(limit=0, once=_loops(source.node))
    parts = {
        test.number: [getattr(atom, "number", -1) for atom in atoms(test)]
        for node in ast.walk(source.node)
        if (test := getattr(node, "test", None)) is not None and hasattr(test, "number")
    }

    def on_tensors(number: int) -> bool:
        return any(
            kind.kind == "tensor" for part in parts.get(number, ()) for kind in seen.atoms.get(part, ())
        )

    explored(compile_function(source, with_probes(source.node)), calls, seen, on_tensors)
    structure = Structurer(source, seen, site.place if site is not None else None)
    structured = structure.function(source.node)
    branches = [branch for node in ast.walk(structured) if (branch := branch_of(node)) is not None]
    kinds = Probe(limit=0, once=_loops(structured))
    watched = compile_function(source, with_probes(copy.deepcopy(structured)))
    explored(watched, calls, kinds, lambda number: number >= FIRST_BRANCH)

    emitter = Emitter(source, structure, kinds)
    emitted = emitter.function(structured)
    if not emitter.targets:
        raise RewriteRefused(
            f"no test in {target_name(function)} depends on a tensor",
            "the value is asked for by an operation on this line: compute it with tensors",
            source.line_of(site.place) if site is not None else place,
        )
    text = rewritten_text(source, emitted)
    made = compile_function(source, parsed(text), text)
    asking = Emitter(source, structure, kinds, probed=True).function(structured)
    forced = compile_function(source, parsed(ast.unparse(ast.fix_missing_locations(asking))))
    proof = prove(
        twin(function),
        made,
        branches,
        calls,
        watched=watched,
        forced=forced,
        new_probe=lambda: Probe(limit=0, once=_loops(structured)),
    )
    missed = [one for one in proof.branches if isinstance(one, BranchProof) and not one.proven]
    if missed:
        raise RewriteRefused(
            f"the rewriting of `{missed[0].test}` is not proven where it is {missed[0].outcome} "
            f"({missed[0].how.removeprefix('not reached: ')})",
            "observe a call that takes this branch",
            missed[0].place,
            details=[str(branch) for branch in proof.branches],
        )
    return method_of(source, made, text, emitter.targets, proof, emitter.notes)


def method_of(
    source: FunctionSource,
    made: FunctionType,
    text: str,
    targets: Sequence[str],
    proof: Proof,
    notes: Sequence[str],
) -> RewrittenMethod:
    """A proven rewriting of the function of `source`: `made`, compiled from `text`."""
    target = target_name(source.function)
    return RewrittenMethod(
        target=target,
        original=source.function,
        func=made,
        code=text,
        dump=unified_diff(source, text, target),
        targets=tuple(targets),
        proof=proof,
        notes=tuple(notes),
    )


def parsed(text: str) -> FunctionNode:
    """The tree of the source of one function."""
    node = ast.parse(text).body[0]
    assert isinstance(node, FunctionNode)
    return node


def _loops(tree: ast.AST) -> set[int]:
    """Numbers of the tests of loops: a forced outcome holds for the first round."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            branch = branch_of(node)
            found.add(branch.number if branch is not None else getattr(node.test, "number", -1))
            found.update(getattr(atom, "number", -1) for atom in atoms(node.test))
    return found


def twin(function: FunctionType) -> FunctionType:
    """A function of its own with the same code, which `exchanged` does not reach."""
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def transform_method(
    func: Any,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    *,
    error: BaseException | None = None,
) -> RewrittenMethod:
    """Rewrite one function or method.

    Parameters
    ----------
    func:
        A function, a method of a class or of an object; decorators are looked through.
    calls:
        ``(args, kwargs)`` of real calls, ``self`` included where `func` is not bound.
    error:
        The exception of the export, where there is one.

    Raises
    ------
    RewriteRefused
        As `rewrite_function`.
    """

    def run() -> None:
        for args, kwargs in calls:
            func(*args, **kwargs)

    return rewrite_function(plain_function(func), run, locate(error) if error is not None else None)
