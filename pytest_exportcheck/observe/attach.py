"""A method of one module replaced for a while, without the copies of the module noticing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["attached", "has_forward_hooks", "without_forward_hooks"]

_MISSING = object()


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether something of the module's own runs around its ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextlib.contextmanager
def without_forward_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block nothing of the module's own runs around its ``forward``; submodules keep theirs."""
    held = vars(module)
    before = {name: held[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    held.update({name: type(hooks)() for name, hooks in before.items()})
    try:
        yield
    finally:
        held.update(before)


def _put(held: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            held.pop(name, None)
        else:
            held[name] = value


@contextlib.contextmanager
def attached(target: torch.nn.Module, attribute: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block ``target.attribute`` is `function`; afterwards everything is as it was.

    A copy of the module made inside the block, by `copy`, `pickle`, what is built on them (`torch.save`,
    quantization), or `torch.nn.DataParallel`, has the original: an attribute of the instance would travel
    with it, and `function` calls the module that it was made for. The class is left alone, since code asks
    for it; of the instance, the copying methods are replaced for as long.
    """
    held = vars(target)
    # Restored by deletion where there was none: left on the instance, it would shadow every later patch of
    # the class.
    before: dict[str, Any] = {}

    @contextlib.contextmanager
    def original() -> Iterator[None]:
        ours = {name: held.get(name, _MISSING) for name in before}
        _put(held, before)
        try:
            yield
        finally:
            _put(held, ours)

    def reduce(protocol: Any) -> Any:
        with original():
            made = target.__reduce_ex__(protocol)
            if not isinstance(made, tuple) or len(made) < 3:
                return made
            # The state may be the attributes themselves, to which ours come back.
            func, args, state, *rest = made
            if isinstance(state, tuple):
                state = tuple(dict(part) if part is held else part for part in state)
            return (func, args, dict(state) if state is held else state, *rest)

    def deepcopy(memo: dict[int, Any]) -> Any:
        with original():
            return target.__deepcopy__(memo)  # type: ignore[operator]

    def replicate() -> torch.nn.Module:
        with original():
            return target._replicate_for_data_parallel()  # type: ignore[no-any-return, no-untyped-call]

    ours: dict[str, Any] = {
        attribute: function,
        "__reduce_ex__": reduce,
        "_replicate_for_data_parallel": replicate,
    }
    if hasattr(type(target), "__deepcopy__"):
        ours["__deepcopy__"] = deepcopy
    before.update({name: held.get(name, _MISSING) for name in ours})
    _put(held, ours)
    try:
        yield
    finally:
        _put(held, before)
