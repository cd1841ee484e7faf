"""Rewrite what stops an export, and put rewritten functions in place for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from ...pytrees.registration import register_flattening_functions
from ..stop_if_static import FrozenAt, frozen_axes
from .equality import difference, module_parts, plain_control_flow, restored
from .locate import is_data_dependent, locate, where_frozen
from .loop_function import rewrite_loop
from .probe import copy_arguments
from .source import exchanged, read_source
from .text import unified_diff
from .transform import rewrite_function
from .values import Export, Proof, RewriteRefused, Rewriting, RewrittenMethod, Site

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
    with register_flattening_functions():
        reference = _results(run, model)
        for count in range(limit + 1):
            methods = tuple(method for _, method in found.values())
            with rewritten_in_place(methods):
                if methods:
                    _refuse_change(reference, _results(run, model), methods)
                try:
                    with restored(module_parts(model)), frozen_axes() as frozen:
                        export()
                    return Rewriting(methods)
                except Exception as raised:
                    error = raised
                on_data = is_data_dependent(error)
                try:
                    site = locate(error) if on_data else None
                    if count == limit:
                        raise RewriteRefused(
                            f"{limit} branches were rewritten, and one more stops the export",
                            "raise `limit`",
                            site.place if site is not None else None,
                        )
                    if site is not None:
                        method = rewrite_function(site.function, lambda: _results(run, model), site)
                    else:
                        site, found_method = _first_loop(frozen, lambda: _results(run, model))
                        if site is None or found_method is None:
                            return Rewriting(methods, None, error)
                        method = found_method
                    earlier = found.get(id(site.function))
                    if earlier is not None and method.code == earlier[1].code:
                        raise RewriteRefused(
                            "the export stops at a branch that was rewritten already",
                            "rewrite it by hand",
                            site.place,
                        )
                except RewriteRefused as refused:
                    return Rewriting(methods, refused, error)
            if earlier is not None:
                method = _merged(earlier[1], method)
            found[id(site.function)] = (site.function, method)
    raise AssertionError("unreachable")


def _first_loop(
    frozen: Sequence[FrozenAt], run: Callable[[], Any]
) -> tuple[Site | None, RewrittenMethod | None]:
    """The first loop that made a dynamic axis a constant, rewritten."""
    for one in frozen:
        site = where_frozen(one)
        method = rewrite_loop(site.function, run, site) if site is not None else None
        if method is not None:
            return site, method
    return None, None


def _merged(first: RewrittenMethod, second: RewrittenMethod) -> RewrittenMethod:
    """Two rewritings of one function, one after the other."""
    proof = Proof(first.proof.branches + second.proof.branches, first.proof.runs + second.proof.runs)
    return RewrittenMethod(
        target=first.target,
        original=first.original,
        func=second.func,
        code=second.code,
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
            f"with {names} rewritten the model computes something else: {found}", "rewrite by hand"
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
