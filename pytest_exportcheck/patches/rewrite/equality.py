"""Call a function again with recorded arguments, and compare what two functions did."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree

from ...plurals import counted
from ..operators import forget_captures
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
_CONSTANTS = (torch.dtype, torch.device, torch.Size, slice, range, frozenset, set)
_DEPTH = 12


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


def replay(function: FunctionType, call: Call, *, both: bool = False) -> Outcome:
    """Call a function with copies of recorded arguments; modules are as they were afterwards.

    `both`: as `plain_control_flow` takes it.
    """
    values = copy_arguments(dict(call.values))
    args, kwargs = _arguments(function, values)
    parts = module_parts(list(values.values()))
    with restored(parts), torch.random.fork_rng(devices=[]), torch.no_grad(), plain_control_flow(both=both):
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


def difference(a: Any, b: Any, path: str = "result", depth: int = 0) -> str | None:
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
        return difference(a, b.item(), path, depth)
    if a is b or (isinstance(a, torch.nn.Module) and type(a) is type(b)):
        return None  # modules: `Outcome.state`
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} became {type(b).__name__}"
    if isinstance(a, (bool, int, float, complex, str, bytes, type(None), *_CONSTANTS)):
        return None if a == b or (a != a and b != b) else f"{path}: {a!r} became {b!r}"
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} became {list(b)}"
        return _first(difference(a[key], b[key], f"{path}.{key}", depth + 1) for key in a)
    if isinstance(a, (tuple, list)):
        if len(a) != len(b):
            return f"{path}: {counted(len(a), 'item')} became {len(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return _first(difference(x, y, f"{path}[{i}]", depth + 1) for i, (x, y) in pairs)
    plain = hasattr(a, "__dict__") and not callable(a) and type(a).__module__ != "builtins"
    if plain and not getattr(type(a), "__slots__", ()) and depth < _DEPTH:
        return difference(vars(a), vars(b), path, depth + 1)
    return f"{path}: a {type(a).__name__}, of which nobody can tell whether it is equal"


def _first(found: Iterator[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def outcomes_differ(a: Outcome, b: Outcome) -> str | None:
    """How the second of two calls differs: result, changed arguments, attributes, or an error of one only."""
    if a.error is not None and b.error is not None:
        # A check raises RuntimeError where the original raises anything.
        if isinstance(b.error, (type(a.error), RuntimeError)):
            return None
        return f"{type(a.error).__name__} became {type(b.error).__name__}: {b.error}"
    if a.error is not None or b.error is not None:
        error = a.error or b.error
        who = "original" if a.error is not None else "rewritten function"
        return f"the {who} alone raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    found = difference(a.result, b.result) or difference(a.values, b.values, "argument")
    return found or difference(a.state, b.state, "attribute")


@contextlib.contextmanager
def plain_control_flow(*, both: bool = False) -> Iterator[None]:
    """Outside of captures `torch.cond`, `torch.while_loop` and scans run as Python.

    Eager would compile each of them, for every shape anew.

    Parameters
    ----------
    both:
        The branch that is not taken runs too, on copies, before the other one: that is what a capture
        does, so an effect of a branch on anything but tensors shows.
    """
    operators: Any = torch._higher_order_ops
    real_cond, real_while_loop, real_scan = torch.cond, torch.while_loop, operators.scan

    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
        if torch.compiler.is_compiling():
            forget_captures(real_cond)
            return real_cond(pred, true_fn, false_fn, tuple(operands))
        taken, other = (true_fn, false_fn) if bool(pred) else (false_fn, true_fn)
        if both:
            _aside(other, operands)
        return taken(*operands)

    def while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Sequence[Any]) -> Any:
        if torch.compiler.is_compiling():
            forget_captures(real_while_loop)
            return real_while_loop(cond_fn, body_fn, carried_inputs)  # type: ignore[no-untyped-call]
        carried = tuple(carried_inputs)
        if both:
            _aside(body_fn, carried)
        while bool(cond_fn(*carried)):
            carried = tuple(body_fn(*carried))
        return carried

    def scan(combine_fn: Any, init: Any, xs: Any) -> Any:
        if torch.compiler.is_compiling():
            forget_captures(real_scan)
            return real_scan(combine_fn, init, xs)
        return _scan(combine_fn, init, xs)

    torch.cond, torch.while_loop, operators.scan = cond, while_loop, scan
    try:
        yield
    finally:
        torch.cond, torch.while_loop, operators.scan = real_cond, real_while_loop, real_scan


def _scan(combine_fn: Any, init: Any, xs: Any) -> Any:
    """What the operator computes; it takes an axis of no elements too, which the operator does not."""
    lengths = {x.shape[0] for x in _pytree.tree_leaves(xs)}
    if len(lengths) != 1:
        raise RuntimeError(f"a scan over axes of different lengths, {sorted(lengths)}")
    carried, found = init, []
    for index in range(lengths.pop()):
        carried, given = combine_fn(carried, _pytree.tree_map(operator.itemgetter(index), xs))
        if [_meta(x) for x in _pytree.tree_leaves(carried)] != [_meta(x) for x in _pytree.tree_leaves(init)]:
            raise RuntimeError("what a scan carries changes its shape or dtype")
        found.append(given)
    if found:
        return carried, _pytree.tree_map(lambda *rows: torch.stack(rows), *found)
    given = ()
    with contextlib.suppress(Exception):  # a round that nobody asked for
        zeros = _pytree.tree_map(lambda x: x.new_zeros(tuple(x.shape[1:])), xs)
        _, given = combine_fn(copy_arguments(init), zeros)
    return carried, _pytree.tree_map(lambda y: y.new_empty((0, *y.shape)), given)


def _meta(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _aside(function: Any, operands: Sequence[Any]) -> None:
    """Call a branch that is not taken; its values may be none that it can take."""
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        function(*copy_arguments(tuple(operands)))
