"""Rewritten methods as patches, for the modes ``rewrite`` and ``all`` and for `torch_export_patches`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ..observed import Observed
from ..ours.torch_functions import loops_in_onnx
from ..patch import Patch
from .apply import Calls, rewrite_for_export, rewrite_until_exported, rewritten_in_place
from .transform import transform_method
from .values import RewriteRefused, Rewriting, RewrittenMethod

__all__ = ["Dump", "patches_for"]

#: Where rewritings are written to: a folder, or what is called with each of them.
Dump = str | Path | Callable[[RewrittenMethod], None]

#: What traces branches away by itself and knows neither `torch.cond` nor `torch._assert_async`.
_TRACED = "torchscript"
_OPERATORS = {"torch.where", "tensor operators", "nothing"}


def patches_for(
    what: Any, dump: Dump | None = None, verbose: int = 0, *, calls: Calls = (), dynamic_shapes: Any = None
) -> list[Patch]:
    """The rewritten methods of `what`, each as a patch that exchanges the code of its function.

    Parameters
    ----------
    what:
        * a graph of a spec, with its observed calls (`Observed`);
        * a module: it is exported with the first of `calls`, and what stops the export is rewritten;
        * a function or method, with `calls` of it (``self`` included where it is not bound);
        * a `Rewriting`, a `RewrittenMethod`;
        * a list of these; `None` and `False`: nothing.
    dump:
        A folder, for one ``.diff`` and one ``.py`` file each, or a callable that takes each
        `RewrittenMethod`.
    verbose:
        1 prints the rewritten methods, 2 their diffs too.
    calls:
        Observed ``(args, kwargs)``: what a value at a branch is, is taken from these.
    dynamic_shapes:
        For a module, as `torch.export.export` takes them.

    Raises
    ------
    RewriteRefused
        A branch cannot be rewritten, with its place and the form to write by hand.
    """
    methods = _methods(what, calls, dynamic_shapes)
    for method in methods:
        _dump(method, dump)
        if verbose:
            print(f"rewritten: {method.target} ({', '.join(method.targets)})")
        if verbose > 1:
            print(method.dump)
    loops = any("torch.while_loop" in method.targets for method in methods)
    return [*map(_patch, methods), *([loops_in_onnx()] if loops else [])]


def _methods(what: Any, calls: Calls, dynamic_shapes: Any) -> list[RewrittenMethod]:
    if what is None or what is False:
        return []
    if isinstance(what, RewrittenMethod):
        return [what]
    if isinstance(what, Observed):
        rewriting = rewrite_until_exported(what.module, what.run, what.export)
        return _accepted(rewriting, traced=what.target == _TRACED)
    if isinstance(what, Rewriting):
        return _accepted(what)
    if isinstance(what, (list, tuple, set)):
        return [method for one in what for method in _methods(one, calls, dynamic_shapes)]
    if not calls:
        raise RewriteRefused(
            f"to rewrite {_name(what)} the values at its branches must be known",
            "give `calls=[(args, kwargs), ...]`, or the result of rewrite_for_export",
        )
    if isinstance(what, torch.nn.Module):
        args, kwargs = calls[0]
        found = rewrite_for_export(what, args, kwargs, calls=calls[1:], dynamic_shapes=dynamic_shapes)
        return _accepted(found)
    return [transform_method(getattr(what, "forward", what), calls)]


def _name(what: Any) -> str:
    return str(getattr(what, "__qualname__", type(what).__qualname__))


def _accepted(rewriting: Rewriting, *, traced: bool = False) -> list[RewrittenMethod]:
    if rewriting.refused is not None and not traced:
        raise rewriting.refused
    return list(rewriting.methods)


def _patch(method: RewrittenMethod) -> Patch:
    def scope(model: Any) -> AbstractContextManager[None]:
        return rewritten_in_place([method])

    places = dict.fromkeys(str(branch.place) for branch in method.proof.branches)
    return Patch(
        method.target,
        scope=scope,
        why=f"depends on a tensor at {', '.join(places)}: {', '.join(dict.fromkeys(method.targets))}",
        runtimes=() if _OPERATORS.issuperset(method.targets) else ("torch", "onnx"),
        rewritten=method,
    )


def _dump(method: RewrittenMethod, where: Dump | None) -> None:
    if where is None:
        return
    if callable(where):
        where(method)
        return
    folder = Path(where)
    folder.mkdir(parents=True, exist_ok=True)
    stem = method.target.replace("<", "").replace(">", "")
    proof = "".join(f"# {line}\n" for line in [*str(method.proof).splitlines(), *method.notes])
    (folder / f"{stem}.diff").write_text(method.dump, encoding="utf-8")
    (folder / f"{stem}.py").write_text(f"{proof}{method.code}", encoding="utf-8")
