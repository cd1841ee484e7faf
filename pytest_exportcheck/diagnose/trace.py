"""Running a model with every submodule watched: which was called where, with what, and what it returned."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees import clone_tree, register_flattening_functions
from ..pytrees.string_type import string_type
from .pieces import ModelDiagnoseOutput
from .subject import _as_call

__all__ = ["trace_execution_piece_by_piece", "trace_forward_execution"]

#: Whole calls kept of one call site.
_MOST_CALLS = 8


@dataclass
class _Call:
    """One call of one module inside one call of its caller."""

    module: torch.nn.Module
    place: tuple[int, int]  # code object and bytecode offset of the call: where it stands in the source
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None
    inner: list[_Call] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.inner = []

    def shapes(self) -> tuple[Any, ...]:
        """What one graph would be made of: structure, shapes and constants."""
        leaves, spec = _pytree.tree_flatten((self.args, self.kwargs))
        return (
            str(spec),
            tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves),
        )


#: The names of frames between a caller and `forward`: `torch.nn.Module.__call__` and what it runs.
_MODULE_FILE = torch.nn.modules.module.__file__


def _place(module: torch.nn.Module) -> tuple[int, int]:
    """Where the running call of `module` stands in the source."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename in (_MODULE_FILE, __file__) or _is_of(frame, module)
    ):
        frame = frame.f_back
    # A line is not enough: `f(x, f(y))` are two calls.
    return (id(frame.f_code), frame.f_lasti) if frame is not None else (0, 0)


def _is_of(frame: FrameType, module: torch.nn.Module) -> bool:
    """Whether the frame is a method of `module` itself, such as a `__call__` of its own."""
    names = frame.f_code.co_varnames[:1]
    return bool(names) and frame.f_locals.get(names[0]) is module


class _Watch:
    """Replaces the methods and collects the calls as a tree."""

    def __init__(self, model: torch.nn.Module, methods: Mapping[Any, str], verbose: int) -> None:
        self.model = model
        self.methods = methods
        self.verbose = verbose
        self.roots: list[_Call] = []
        self._stack: list[_Call] = []
        self._had: list[tuple[torch.nn.Module, str, Any]] = []

    def method_of(self, module: torch.nn.Module, name: str) -> str:
        for key in (name, type(module), type(module).__name__):
            if key in self.methods:
                return self.methods[key]
        return "forward"

    def __enter__(self) -> _Watch:
        try:
            for name, module in self.model.named_modules():
                method = self.method_of(module, name)
                if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                    self._replace(module, method, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _replace(self, module: torch.nn.Module, method: str, name: str) -> None:
        original = getattr(module, method, None)
        if not callable(original):
            raise ValueError(f"{name or 'the model'} ({type(module).__name__}) has no method {method!r}")
        self._had.append((module, method, vars(module).get(method)))
        setattr(module, method, self._watched(module, original, name))

    def __exit__(self, *_: object) -> None:
        for module, method, had in self._had:
            if had is None:
                # Left on the instance it would shadow every later patch of the class.
                vars(module).pop(method, None)
            else:
                setattr(module, method, had)
        self._had.clear()

    def _watched(
        self, module: torch.nn.Module, original: Callable[..., Any], name: str
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._print(f"> {string_type((args, kwargs), with_shape=True)}", module, name)
            call = _Call(module, _place(module), *clone_tree((args, kwargs)))
            self._stack.append(call)
            try:
                outputs = original(*args, **kwargs)
            finally:
                self._stack.pop()
            # A call that raised is none: it is only kept here, whole.
            call.outputs = clone_tree(outputs)
            (self._stack[-1].inner if self._stack else self.roots).append(call)
            self._print(f"< {string_type(outputs, with_shape=True)}", module, name)
            return outputs

        return watched

    def _print(self, text: str, module: torch.nn.Module, name: str) -> None:
        if self.verbose > len(self._stack):
            indent = "  " * len(self._stack)
            print(f"[trace] {indent}{name or '__main__'}:{type(module).__name__} {text}")


def _sites(callers: Sequence[_Call]) -> list[list[_Call]]:
    """The calls inside several calls of one piece, put together by call site.

    One site: the same module called from the same place. A place that is passed several times in one run (a
    loop) is one site where every pass has the same shapes, or where the number of passes differs from run to
    run; else each pass is a site of its own, since merging different uses of a module would make axes look
    dynamic that are not.
    """
    by_place: dict[tuple[int, tuple[int, int]], list[list[_Call]]] = {}
    for caller in callers:
        here: dict[tuple[int, tuple[int, int]], list[_Call]] = {}
        for call in caller.inner:
            here.setdefault((id(call.module), call.place), []).append(call)
        for key, calls in here.items():
            by_place.setdefault(key, []).append(calls)
    sites = []
    for runs in by_place.values():
        counts = {len(calls) for calls in runs}
        alike = all(len({call.shapes() for call in calls}) == 1 for calls in runs)
        if len(counts) > 1 or alike:
            sites.append([call for calls in runs for call in calls])
        else:
            sites.extend([calls[k] for calls in runs] for k in range(counts.pop()))
    order = {id(call): k for caller in reversed(callers) for k, call in enumerate(caller.inner)}
    return sorted(sites, key=lambda calls: order[id(calls[0])])


def _informative(calls: Sequence[_Call]) -> list[_Call]:
    """The calls that are kept: those with new shapes first, in their order."""
    first: dict[Any, _Call] = {}
    for call in calls:
        first.setdefault(call.shapes(), call)
    kept = [call for call in calls if first[call.shapes()] is call][:_MOST_CALLS]
    rest = [call for call in calls if all(call is not known for known in kept)]
    chosen = {id(call) for call in [*kept, *rest[: max(_MOST_CALLS - len(kept), 0)]]}
    return [call for call in calls if id(call) in chosen]


def _named(module: torch.nn.Module, parent: torch.nn.Module, root: torch.nn.Module) -> str:
    """``layers[0].mlp``: the path from the caller, or from the model where the caller does not own it."""
    for owner in (parent, root):
        for name, found in owner.named_modules():
            if found is module and name:
                return re.sub(r"\.?\b(\d+)\b", r"[\1]", name)
    return "__main__"


def _grow(diag: ModelDiagnoseOutput, callers: Sequence[_Call], watch: _Watch) -> None:
    names = dict(watch.model.named_modules())
    paths = {id(module): name for name, module in names.items()}
    taken: dict[str, int] = {}
    for calls in _sites(callers):
        module = calls[0].module
        name = _named(module, diag.model, watch.model)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
        path = paths.get(id(module), "")
        child = ModelDiagnoseOutput(
            diag, name, module, diag.level + 1, watch.method_of(module, path), path=path
        )
        _fill(child, calls)
        diag.add_child(child)
        _grow(child, calls, watch)


def _fill(diag: ModelDiagnoseOutput, calls: Sequence[_Call]) -> None:
    diag.n_calls = len(calls)
    for call in _informative(calls):
        diag.add_inputs(call.args, call.kwargs)
        diag.add_outputs(call.outputs)


@contextlib.contextmanager
def trace_forward_execution(
    model: torch.nn.Module, verbose: int = 0, traced_method: Mapping[Any, str] | None = None
) -> Iterator[ModelDiagnoseOutput]:
    """Inside the block the calls of `model` and of every submodule are recorded; complete at its end.

    Parameters
    ----------
    verbose:
        Levels of submodules whose calls are printed.
    traced_method:
        Path of a submodule (empty for the model), class, or class name -> the method that is watched instead
        of ``forward``.

    Yields
    ------
    ModelDiagnoseOutput
        The model; its inputs, outputs and children are there when the block is left.
    """
    watch = _Watch(model, dict(traced_method or {}), verbose)
    diag = ModelDiagnoseOutput(None, "__main__", model, 0, watch.method_of(model, ""))
    with register_flattening_functions(None):
        with watch:
            yield diag
        calls = [call for call in watch.roots if call.module is model]
        _fill(diag, calls)
        _grow(diag, calls, watch)


def trace_execution_piece_by_piece(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    verbose: int = 0,
    traced_method: Mapping[Any, str] | None = None,
) -> ModelDiagnoseOutput:
    """Run `model` on several sets of inputs and record what every submodule was called with.

    Parameters
    ----------
    inputs:
        Each ``(args, kwargs)``, a tuple of positions or a dict of names. Sizes that differ between the sets
        become dynamic axes.
    verbose, traced_method:
        As for `trace_forward_execution`.

    Raises
    ------
    ValueError
        There are no inputs.
    TypeError
        A set of inputs is of another form.
    """
    if not inputs:
        raise ValueError("inputs is empty: nothing would be traced")
    calls = [_as_call(given) for given in inputs]
    with trace_forward_execution(model, verbose, traced_method) as diag, torch.no_grad():
        method = getattr(model, diag.method_name)
        for args, kwargs in calls:
            args, kwargs = clone_tree((args, kwargs))
            if diag.method_name == "forward":
                model(*args, **kwargs)
            else:
                method(*args, **kwargs)
    if verbose:
        print(diag.pretty_text())
    return diag
