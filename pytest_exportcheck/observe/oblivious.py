"""Dynamic axes of size 0 or 1: inputs and nested dynamic shapes, side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..plurals import counted

__all__ = ["needs_backed_size_oblivious"]


def needs_backed_size_oblivious(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    names: Sequence[str] = (),
    constants: Collection[str] = (),
) -> bool:
    """As `InputCandidate.needs_backed_size_oblivious`.

    Parameters
    ----------
    names:
        Of `args`, where they are known; otherwise the names of `dynamic_shapes` that are not in `kwargs` are
        theirs, in order.
    constants:
        Names of arguments that are not among `args` and `kwargs`.
    """
    if not dynamic_shapes:
        return False
    found = False
    for tensor, shape in _inputs(args, kwargs, dynamic_shapes, names, constants):
        dims = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
        for axis, dim in dims:
            if not isinstance(axis, int) or not -tensor.dim() <= axis < tensor.dim():
                axes = counted(tensor.dim(), "axis", "axes")
                raise RuntimeError(f"dynamic_shapes has axis {axis!r} for a tensor of {axes}")
            # To the end: what does not fit is to be said, wherever it is.
            found |= _is_dynamic(dim) and tensor.shape[axis] in (0, 1)
    return found


def _inputs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shapes: Any,
    names: Sequence[str],
    constants: Collection[str],
) -> Iterator[tuple[torch.Tensor, Any]]:
    """(tensor, its dynamic shape) of every tensor that has one."""
    if not isinstance(shapes, Mapping):
        values = [*args, *kwargs.values()]
        entries = list(shapes)
        if len(entries) > len(values):
            # The ``None`` of a constant, which is not among the inputs.
            entries = [entry for entry in entries if entry is not None]
        yield from _children(values, entries, "the inputs")
        return
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = {n: s for n, s in shapes.items() if n not in named and n not in constants}
    left = [value for place, value in enumerate(args) if place >= len(names) or names[place] not in shapes]
    if len(rest) > len(left):
        rest = {name: shape for name, shape in rest.items() if shape is not None}
    for name, shape in shapes.items():
        if name in named:
            yield from _pairs(named[name], shape, str(name))
        elif name not in rest:
            continue
        elif left and _is_variadic(left, shape):
            taken, left = left[: len(shape)], left[len(shape) :]
            yield from _children(taken, list(shape), str(name))
        elif left:
            yield from _pairs(left.pop(0), shape, str(name))
        elif isinstance(shape, Mapping) and set(shape) <= set(kwargs):
            # What ``**kwargs`` caught, under its name.
            for key, inner in shape.items():
                yield from _pairs(kwargs[key], inner, str(key))
        elif shape:
            raise RuntimeError(
                f"dynamic_shapes has {counted(len(shapes), 'entry', 'entries')}, more than "
                f"the {counted(len(named), 'input')}: no {name!r}"
            )


def _is_variadic(values: Sequence[Any], shape: Any) -> bool:
    """Whether a shape is that of ``*args``: that of one tensor, axis by axis, holds no other shapes."""
    return (
        isinstance(shape, (tuple, list))
        and isinstance(values[0], torch.Tensor)
        and (any(isinstance(item, (Mapping, tuple, list)) for item in shape) or not shape)
    )


def _pairs(value: Any, shape: Any, path: str) -> Iterator[tuple[torch.Tensor, Any]]:
    if shape is None:
        return
    if not isinstance(shape, (Mapping, list, tuple)):
        raise TypeError(f"no dynamic shape for {path}: {shape!r} ({type(shape).__name__})")
    if isinstance(value, torch.Tensor):
        yield value, shape
    elif isinstance(value, Mapping) and isinstance(shape, Mapping):
        unknown = [key for key in shape if key not in value and shape[key]]
        if unknown:
            raise RuntimeError(f"dynamic_shapes has {path}.{unknown[0]}, which is not among the inputs")
        for key, inner in shape.items():
            if key in value:
                yield from _pairs(value[key], inner, f"{path}.{key}")
    elif not shape:
        return
    elif type(value) in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value):
        children = _pytree.tree_flatten(value, is_leaf=lambda child: child is not value)[0]
        yield from _children(children, list(shape.values() if isinstance(shape, Mapping) else shape), path)
    else:
        raise RuntimeError(f"dynamic_shapes has a shape for {path}, which is a {type(value).__name__}")


def _children(values: Sequence[Any], shapes: Sequence[Any], path: str) -> Iterator[tuple[torch.Tensor, Any]]:
    if len(shapes) > len(values):
        entries = counted(len(shapes), "entry", "entries")
        raise RuntimeError(f"dynamic_shapes has {entries}, more than the {len(values)} of {path}")
    for place, (value, shape) in enumerate(zip(values, shapes, strict=False)):
        yield from _pairs(value, shape, f"{path}.{place}")


def _is_dynamic(dim: Any) -> bool:
    if isinstance(dim, (str, torch.export.Dim)):
        return True
    hints = (torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO)
    return any(type(dim) is type(hint) and dim.type == hint.type for hint in hints)
