"""Rewrite what stops an export, and put rewritten functions in place for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch

from ...pytrees.registration import register_flattening_functions
from ..stop_if_static import FrozenAt, frozen_axes
from .equality import difference, module_parts, plain_control_flow, restored
from .locate import functions_of, is_data_dependent, iterates, locate, where_frozen
from .loop_function import rewrite_loop
from .probe import copy_arguments
from .source import exchanged, read_source
from .text import unified_diff
from .transform import rewrite_function
from .values import Export, Place, Proof, RewriteRefused, Rewriting, RewrittenMethod, Site

__all__ = ["rewrite_for_export", "rewrite_until_exported", "rewritten_in_place"]

Calls = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]


@contextlib.contextmanager
def rewritten_in_place(methods: Sequence[RewrittenMethod]) -> Iterator[None]:
    """While active, the originals run the rewritten code, under every name that they have.

    In eager `torch.cond` and `torch.while_loop` run as Python meanwhile.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_control_flow())
        for method in methods:
            for one in _twins(method.original):
                stack.enter_context(exchanged(one, method.func))
        yield


def _twins(function: FunctionType) -> list[FunctionType]:
    """The functions made from the same ``def``: a decorator or a factory makes one for each use."""
    gc.unfreeze()
    found = [
        one
        for one in gc.get_referrers(function.__code__)
        if type(one) is FunctionType and one.__code__ is function.__code__
    ]
    return found or [function]


def _results(run: Callable[[], Any], model: Any) -> Any:
    """What `run` gives; the modules of `model` are as they were afterwards."""
    with (
        restored(module_parts(model)),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        plain_control_flow(),
    ):
        torch.manual_seed(0)
        return copy_arguments(run())


def rewrite_until_exported(
    model: Any, run: Callable[[], Any], export: Export, *, limit: int = 10
) -> Rewriting:
    """Export; rewrite the branch that stopped it; and again, until it exports or a branch is refused.

    Parameters
    ----------
    model:
        A module, whose attributes and buffers are put back after each run, or a function.
    run:
        Runs every observed call in eager, and returns the results. The values at a branch are what they
        are in these calls, which are the first proof too.
    export:
        Exports the model; called while the rewritten functions are in place.
    limit:
        How many times a function is rewritten at most.

    Returns
    -------
    The rewritten methods. `Rewriting.refused` says why it still does not export; an error that is no
    data-dependent branch is left to the caller: it is `Rewriting.error`, and `refused` is `None`.
    """
    found: dict[int, tuple[FunctionType, RewrittenMethod]] = {}
    exported: tuple[RewrittenMethod, ...] | None = None  # with which it exported, sizes baked in
    tried: set[Place] = set()

    def again() -> Any:
        return _results(run, model)

    with register_flattening_functions():
        reference = _results(run, model)
        for count in range(limit + 1):
            methods = tuple(method for _, method in found.values())
            error: Exception | None = None
            with rewritten_in_place(methods):
                try:
                    if methods:
                        _refuse_change(reference, _results(run, model), methods)
                    with restored(module_parts(model)), frozen_axes() as frozen:
                        program = export()
                    if exported is not None and isinstance(program, torch.export.ExportedProgram):
                        # torch 2.13 captures scans that it cannot decompose: for those sizes stay baked in.
                        program.run_decompositions()
                except Exception as raised:
                    error = raised
                if error is not None and exported is not None:
                    return Rewriting(exported)
                if isinstance(error, RewriteRefused):
                    raise error
                try:
                    site = locate(error) if error is not None and is_data_dependent(error) else None
                    if site is not None and count < limit:
                        method: RewrittenMethod | None = rewrite_function(site.function, again, site)
                    elif site is None and count < limit:
                        site, method = _first_loop(frozen, again, tried, exports=error is None)
                    if site is not None and count == limit:
                        raise RewriteRefused(
                            f"{limit} branches were rewritten, and one more stops the export",
                            "raise `limit`",
                            site.place,
                        )
                    if site is None or method is None:
                        return Rewriting(methods, None, error)
                    earlier = found.get(id(site.function))
                    if earlier is not None and method.code == earlier[1].code:
                        raise RewriteRefused(
                            "the export stops at a branch that was rewritten already",
                            "rewrite it by hand",
                            site.place,
                        )
                except RewriteRefused as refused:
                    return Rewriting(methods, refused, error)
            if error is None:
                exported = methods
            if earlier is not None:
                method = _merged(earlier[1], method)
            found[id(site.function)] = (site.function, method)
    raise AssertionError("unreachable")


def _first_loop(
    frozen: Sequence[FrozenAt], run: Callable[[], Any], tried: set[Place], *, exports: bool
) -> tuple[Site | None, RewrittenMethod | None]:
    """The first loop whose number of rounds was baked in, rewritten.

    Parameters
    ----------
    tried:
        Places that were looked at before; filled.
    exports:
        The model exports as it is: a loop that cannot be rewritten stays. Otherwise the first one that makes
        a dynamic axis a constant is refused.
    """
    refusal: RewriteRefused | None = None
    places: dict[tuple[Place, CodeType], bool] = {}
    for one in frozen:
        where = where_frozen(one)
        if where is not None:
            places[where] = one.axis or places.get(where, False)
    for (place, code), axis in places.items():
        if not iterates(code) or (exports and place in tried):
            continue  # Most are calls of operators, in code that torch made.
        functions = functions_of(code)
        if not functions:
            continue
        tried.add(place)
        site = Site(place, *functions[0])
        try:
            method = rewrite_loop(site.function, run, site)
        except RewriteRefused as refused:
            if axis and not exports and refusal is None:
                refusal = refused
            continue
        if method is not None:
            return site, method
    if refusal is not None:
        raise refusal
    return None, None


def _merged(first: RewrittenMethod, second: RewrittenMethod) -> RewrittenMethod:
    """Two rewritings of one function, one after the other."""
    proof = Proof(first.proof.branches + second.proof.branches, first.proof.runs + second.proof.runs)
    return replace(
        second,
        dump=unified_diff(read_source(first.original), second.code, first.target),
        targets=first.targets + second.targets,
        proof=proof,
        notes=first.notes + second.notes,
    )


def _refuse_change(reference: Any, got: Any, methods: Sequence[RewrittenMethod]) -> None:
    found = difference(reference, got, "calls")
    if found is not None:
        names = ", ".join(method.target for method in methods)
        raise RewriteRefused(
            f"with {names} rewritten the model computes something else: {found}",
            "rewrite by hand",
            details=[line for method in methods for line in method.dump.splitlines()],
        )


def rewrite_for_export(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    error: BaseException | None = None,
    *,
    calls: Calls = (),
    dynamic_shapes: Any = None,
    export: Export | None = None,
    limit: int = 10,
) -> Rewriting:
    """Rewrite what stops ``torch.export.export(model, args, kwargs)``.

    Parameters
    ----------
    error:
        The exception of an export that failed already: its branch is rewritten first, without exporting
        again.
    calls:
        More observed ``(args, kwargs)``: the more branches they take, the fewer have to be forced.
    export:
        Exports the model; `torch.export.export` with `dynamic_shapes`, non-strict, when it is not given.
    """
    all_calls = [(tuple(args), dict(kwargs or {})), *calls]

    def run() -> list[Any]:
        found = []
        for args, kwargs in all_calls:
            args, kwargs = copy_arguments((tuple(args), dict(kwargs)))
            found.append((copy_arguments(model(*args, **kwargs)), args, kwargs))
        return found

    def default() -> Any:
        return torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )

    first = [error] if error is not None else []

    def exported() -> Any:
        if first:
            raise first.pop()
        return (export or default)()

    return rewrite_until_exported(model, run, exported, limit=limit)
