"""Axes that are dynamic in the calls and became constants in the program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ExportCheckError
from ..exporters.fingerprint import program_dims
from ..observe import GraphShapes, TensorLeaf
from ..plurals import counted

__all__ = [
    "Dims",
    "dims_text",
    "frozen_axes",
    "frozen_in_program",
    "lead_with_axes",
    "onnx_dims",
    "program_dims",
]

#: How torch begins where axes that should be dynamic are not; what it lists below, and how it names an axis.
_VIOLATED = "Constraints violated"
_BULLET = re.compile(r"\s*- (.*)")
_AXIS = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")

#: Path of an input -> a size, or a symbol, for each axis.
Dims = Mapping[str, Sequence[Any]]

#: (path, axis) -> the comparison of sizes that made it a constant, and where it stands in the model's code.
Reasons = Mapping[tuple[str, int], str]


def frozen_axes(shapes: GraphShapes, reasons: Reasons) -> list[str]:
    """One line per dynamic axis that a capture, which was refused for it, took for a constant."""
    found = []
    for (path, axis), reason in reasons.items():
        leaf = shapes.leaves.get(path)
        dim = leaf.dynamic.get(axis) if isinstance(leaf, TensorLeaf) else None
        if dim is not None:
            found.append(f"axis {axis} of {path} ({dim}) became a constant: {reason}")
    return found


def lead_with_axes(failure: ExportCheckError, frozen: Sequence[str]) -> None:
    """Let a refusal begin with which axis became what, in our words, and put torch's sentence below.

    Parameters
    ----------
    frozen:
        What `frozen_axes` says; where it says nothing, torch's own explanation is written in our names.
    """
    what, found, said = failure.message.partition(_VIOLATED)
    who, _, kind = what.removesuffix(": ").rpartition(": ")
    if not found or not who:
        failure.details[:0] = frozen
        return
    bullets = (match[1] for match in map(_BULLET.fullmatch, failure.details) if match is not None)
    lines = list(frozen) or [_AXIS.sub(r"\1.shape[\2]", text).rstrip(".") for text in bullets][:1]
    if not lines:
        return
    more = f" (and {counted(len(lines) - 1, 'more axis', 'more axes')})" if len(lines) > 1 else ""
    failure.message = f"{who}: {lines[0]}{more}"
    failure.details[:0] = [*lines[1:], f"{kind}: {found}{said}"]


def frozen_in_program(dims: Dims, shapes: GraphShapes, reasons: Reasons) -> list[str]:
    """One line per axis that the inputs of a program fix, and that is dynamic in the calls."""
    found = []
    for path, sizes in dims.items():
        leaf = shapes.leaves.get(path)
        if not isinstance(leaf, TensorLeaf):
            continue
        for axis, dim in leaf.dynamic.items():
            if axis < len(sizes) and isinstance(sizes[axis], int):
                found.append(
                    f"axis {axis} of {path} ({dim}) is dynamic in the calls, "
                    f"the program fixes it to {sizes[axis]}"
                    + (f": {reasons[path, axis]}" if (path, axis) in reasons else "")
                )
    return found


def onnx_dims(dims_by_name: Mapping[str, Sequence[Any]], input_names: Mapping[str, str]) -> Dims:
    """The dims of the inputs of an ONNX model, by the paths of `input_names`."""
    return {path: dims_by_name[name] for path, name in input_names.items() if name in dims_by_name}


def dims_text(dims: Dims) -> dict[str, str]:
    """For the record: ``[batch, 4]``, with ``?`` for an axis that the program says nothing of."""
    return {
        path: f"[{', '.join('?' if size is None else str(size) for size in sizes)}]"
        for path, sizes in dims.items()
    }
