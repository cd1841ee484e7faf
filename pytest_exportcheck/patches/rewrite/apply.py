"""Rewrite what stops an export, and put rewritten functions in place for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ...pytrees.registration import register_flattening_functions
from .locate import is_data_dependent, locate
from .probe import copy_arguments
from .equality import difference, module_parts, plain_control_flow, restored
from .source import exchanged, read_source
from .text import unified_diff
from .transform import rewrite_function
from .values import Export, Proof, RewriteRefused, RewrittenMethod, Rewriting

__all__ = [
    "dump",
    "rewrite_for_export",
    "rewrite_until_exported",
    "rewritten_in_place",
    "torch_export_rewrite",
]

#: Where rewritings are written to: a folder, or what is called with each of them.
Dump = str | Path | Callable[[RewrittenMethod], None]
Calls = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]


@contextlib.contextmanager
def rewritten_in_place(methods: Sequence[RewrittenMethod]) -> Iterator[None]:
    """While active, the originals run the rewritten code, under every name that they have."""
    with contextlib.ExitStack() as stack:
        for method in methods:
            for one in _twins(method.original):
                stack.enter_context(exchanged(one, method.func))
        yield


def _twins(function: FunctionType) -> list[FunctionType]:
    """The functions made from the same ``def``: a decorator or a factory makes one for each use."""
    found = [
        one
        for one in gc.get_referrers(function.__code__)
        if isinstance(one, FunctionType) and one.__code__ is function.__code__
    ]
    return found or [function]


def _run(model: Any, calls: Calls) -> list[Any]:
    """Results of the model on copies of the calls, each with the same random numbers."""
    found = []
    for args, kwargs in calls:
        args, kwargs = copy_arguments((tuple(args), dict(kwargs)))
        with (
            restored(module_parts(model)),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            plain_control_flow(),
        ):
            torch.manual_seed(0)
            found.append((copy_arguments(model(*args, **kwargs)), args, kwargs))
    return found


def rewrite_until_exported(model: Any, calls: Calls, export: Export, *, limit: int = 10) -> Rewriting:
    """Export; rewrite the branch that stopped it; and again, until it exports or a branch is refused.

    Parameters
    ----------
    model:
        A module or a function; it is called with `calls` in eager.
    calls:
        Observed ``(args, kwargs)``; they say what the values at a branch are, and are the first proof.
    export:
        Exports the model; called while the rewritten functions are in place.
    limit:
        How many functions are rewritten at most.

    Returns
    -------
    The rewritten methods. `Rewriting.refused` says why it still does not export, with the last error; an error
    that is no data-dependent branch is left to the caller in `Rewriting.error` in the same way.
    """
    found: dict[int, tuple[FunctionType, RewrittenMethod]] = {}
    with register_flattening_functions():
        reference = _run(model, calls)
        for _ in range(limit + 1):
            methods = tuple(method for _, method in found.values())
            with rewritten_in_place(methods):
                if methods:
                    _refuse_change(reference, model, calls, methods)
                try:
                    export()
                    return Rewriting(methods)
                except Exception as raised:
                    error = raised
                try:
                    site = locate(error)
                    if len(found) == limit:
                        raise RewriteRefused(
                            f"{limit} functions were rewritten, and one more stops the export",
                            "raise `limit`",
                            site.place,
                        )
                    method = rewrite_function(site.function, lambda: _run(model, calls), site)
                except RewriteRefused as refused:
                    return Rewriting(methods, refused, error)
            earlier = found.get(id(site.function))
            if earlier is not None:
                if method.code == earlier[1].code:
                    refused = RewriteRefused(
                        "the export stops at a branch that was rewritten already",
                        "rewrite it by hand",
                        site.place,
                    )
                    return Rewriting(methods, refused, error)
                method = _merged(earlier[1], method)
            found[id(site.function)] = (site.function, method)
    raise AssertionError("unreachable")


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


def _refuse_change(
    reference: list[Any], model: Any, calls: Calls, methods: Sequence[RewrittenMethod]
) -> None:
    got = _run(model, calls)
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
        The exception of an export that failed already: its branch is rewritten first, without exporting again.
    calls:
        More observed ``(args, kwargs)``: the more branches they take, the fewer have to be forced.
    export:
        Exports the model; `torch.export.export` with `dynamic_shapes`, non-strict, when it is not given.
    """
    all_calls = [(tuple(args), dict(kwargs or {})), *calls]

    def default() -> Any:
        return torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )

    first = [error] if error is not None else []

    def exported() -> Any:
        if first:
            raise first.pop()
        return (export or default)()

    return rewrite_until_exported(model, all_calls, exported, limit=limit)


@contextlib.contextmanager
def torch_export_rewrite(
    rewrite: Any = None,
    dump_rewriting: Dump | None = None,
    verbose: int = 0,
    *,
    calls: Calls = (),
    dynamic_shapes: Any = None,
) -> Iterator[Rewriting]:
    """Apply rewritings while active; everything is as before on exit, also after an error.

    Parameters
    ----------
    rewrite:
        A `Rewriting`, a list of `RewrittenMethod`; or what is to be rewritten: a module, with `calls`.
    dump_rewriting:
        A folder, for one ``.diff`` and one ``.py`` file each, or a callable that takes each `RewrittenMethod`.
    verbose:
        1 prints the rewritten methods, 2 their diffs too.
    calls, dynamic_shapes:
        For a module: observed calls, the first of which is exported.

    Raises
    ------
    RewriteRefused
        A branch of the module cannot be rewritten.
    """
    if rewrite is None:
        rewriting = Rewriting(())
    elif isinstance(rewrite, Rewriting):
        rewriting = rewrite
    elif isinstance(rewrite, RewrittenMethod):
        rewriting = Rewriting((rewrite,))
    elif isinstance(rewrite, torch.nn.Module):
        if not calls:
            raise RewriteRefused(
                f"to rewrite {type(rewrite).__name__} the values at its branches must be known",
                "give `calls=[(args, kwargs), ...]`, or the result of rewrite_for_export",
            )
        args, kwargs = calls[0]
        rewriting = rewrite_for_export(rewrite, args, kwargs, calls=calls[1:], dynamic_shapes=dynamic_shapes)
    else:
        rewriting = Rewriting(tuple(rewrite))
    if rewriting.refused is not None and is_data_dependent(rewriting.error or rewriting.refused):
        raise rewriting.refused
    for method in rewriting.methods:
        dump(method, dump_rewriting)
        if verbose:
            print(f"rewritten: {method.target} ({', '.join(method.targets)})")
        if verbose > 1:
            print(method.dump)
    with rewritten_in_place(rewriting.methods):
        yield rewriting


def dump(method: RewrittenMethod, where: Dump | None) -> None:
    """Write one rewriting: a folder gets ``TARGET.diff`` and ``TARGET.py``."""
    if where is None:
        return
    if callable(where):
        where(method)
        return
    folder = Path(where)
    folder.mkdir(parents=True, exist_ok=True)
    stem = method.target.replace("<", "").replace(">", "")
    (folder / f"{stem}.diff").write_text(method.dump, encoding="utf-8")
    (folder / f"{stem}.py").write_text(method.code, encoding="utf-8")
