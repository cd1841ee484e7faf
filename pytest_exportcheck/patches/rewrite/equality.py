"""Call a function again with recorded arguments, and compare what two functions did."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree

from .probe import Call, copy_arguments

__all__ = [
    "Outcome",
    "difference",
    "module_parts",
    "outcomes_differ",
    "plain_control_flow",
    "replay",
    "restored",
]

_PLAIN = {"_parameters", "_modules", "_buffers"}


@dataclass(frozen=True)
class Outcome:
    """What one call of a function gave.

    Attributes
    ----------
    values:
        The arguments afterwards.
    state:
        Attributes and buffers of the modules among the arguments afterwards.
    error:
        What it raised; `result` is then `None`.
    """

    result: Any
    values: Mapping[str, Any]
    state: Mapping[str, Any]
    error: Exception | None = None


def _arguments(function: FunctionType, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += values[parameter.name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(values[parameter.name])
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = values[parameter.name]
        else:
            args.append(values[parameter.name])
    return args, kwargs


def module_parts(values: Any) -> dict[str, torch.nn.Module]:
    """Every module that `values` reach, by a path."""
    leaves = [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.nn.Module)]
    return {f"{i}.{path}": part for i, leaf in enumerate(leaves) for path, part in leaf.named_modules()}


@contextlib.contextmanager
def restored(parts: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Put attributes and buffers of modules back."""
    saved = []
    for part in parts.values():
        attributes = {key: value for key, value in vars(part).items() if key not in _PLAIN}
        tensors = [t for t in [*attributes.values(), *part._buffers.values()] if isinstance(t, torch.Tensor)]
        saved.append((part, attributes, dict(part._buffers), [(t, t.detach().clone()) for t in tensors]))
    try:
        yield
    finally:
        for part, attributes, buffers, copies in saved:
            for key in [key for key in vars(part) if key not in _PLAIN and key not in attributes]:
                del part.__dict__[key]
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
            for tensor, copy in copies:
                if not _equal(tensor, copy):
                    tensor.detach().copy_(copy)


def _state(parts: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, part in parts.items():
        for key, value in [*vars(part).items(), *part._buffers.items()]:
            if isinstance(value, torch.Tensor):
                found[f"{path}.{key}"] = value.detach().clone()
            elif isinstance(value, (bool, int, float, str)):
                found[f"{path}.{key}"] = value
    return found


def replay(function: FunctionType, call: Call) -> Outcome:
    """Call a function with copies of recorded arguments; modules are as they were afterwards."""
    values = copy_arguments(dict(call.values))
    args, kwargs = _arguments(function, values)
    parts = module_parts(list(values.values()))
    with restored(parts), torch.random.fork_rng(devices=[]), torch.no_grad(), plain_control_flow():
        torch.manual_seed(0)
        try:
            return Outcome(copy_arguments(function(*args, **kwargs)), values, _state(parts))
        except Exception as raised:
            return Outcome(None, values, _state(parts), raised)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    return bool((a.isnan() & b.isnan() | (a == b)).all()) if a.is_floating_point() else False


def difference(a: Any, b: Any, path: str = "result") -> str | None:
    """How `b` differs from `a`, value by value (NaN equals NaN); `None` where it does not.

    A tensor of shape [] equals the Python number it holds.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if _equal(a, b):
            return None
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{path}: {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
        return f"{path}: values differ by up to {(a.double() - b.double()).abs().max().item():.3g}"
    if isinstance(b, torch.Tensor) and isinstance(a, (bool, int, float)) and b.shape == ():
        return difference(a, b.item(), path)
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} became {type(b).__name__}"
    if isinstance(a, torch.nn.Module):
        return None
    if isinstance(a, (bool, int, float, str, type(None))):
        return None if a == b or (a != a and b != b) else f"{path}: {a!r} became {b!r}"
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} became {list(b)}"
        return _first(difference(a[key], b[key], f"{path}.{key}") for key in a)
    if isinstance(a, (tuple, list)):
        if len(a) != len(b):
            return f"{path}: {len(a)} items became {len(b)}"
        return _first(difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if hasattr(a, "__dict__") and not callable(a):
        kinds = (torch.Tensor, bool, int, float, str, tuple, list)
        left, right = ({k: v for k, v in vars(one).items() if isinstance(v, kinds)} for one in (a, b))
        return difference(left, right, path)
    return None


def _first(found: Iterator[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def outcomes_differ(a: Outcome, b: Outcome) -> str | None:
    """How the second of two calls differs: result, changed arguments, attributes, or an error of one only."""
    if a.error is not None and b.error is not None:
        return None
    if a.error is not None or b.error is not None:
        error = a.error or b.error
        who = "original" if a.error is not None else "rewritten function"
        return f"the {who} alone raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    found = difference(a.result, b.result) or difference(a.values, b.values, "argument")
    return found or difference(a.state, b.state, "attribute")


@contextlib.contextmanager
def plain_control_flow() -> Iterator[None]:
    """`torch.cond` and `torch.while_loop` run as Python: eager would compile each, for every shape anew."""

    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
        return true_fn(*operands) if bool(pred) else false_fn(*operands)

    def while_loop(cond_fn: Any, body_fn: Any, carried: Sequence[Any]) -> Any:
        carried = tuple(carried)
        while bool(cond_fn(*carried)):
            carried = tuple(body_fn(*carried))
        return carried

    saved = torch.cond, torch.while_loop
    torch.cond, torch.while_loop = cond, while_loop  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cond, torch.while_loop = saved
