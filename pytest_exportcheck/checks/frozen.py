"""Axes that are dynamic in the calls and became constants in the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..observe import GraphShapes, TensorLeaf

__all__ = ["frozen_axes", "frozen_in_onnx", "frozen_in_program"]

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


def _frozen(shapes: GraphShapes, dims: Mapping[str, Sequence[Any]], reasons: Reasons) -> list[str]:
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


def frozen_in_program(
    program: torch.export.ExportedProgram, paths: Sequence[str], shapes: GraphShapes, reasons: Reasons
) -> list[str]:
    """One line per axis that the signature of an ExportedProgram fixes."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    dims = {}
    for path, name in zip(paths, program.graph_signature.user_inputs, strict=False):
        value = nodes[str(name)].meta.get("val") if str(name) in nodes else None
        if isinstance(value, torch.Tensor):
            # A size that froze may still be a SymInt, of a constant.
            dims[path] = [int(text) if (text := str(size)).isdigit() else size for size in value.shape]
    return _frozen(shapes, dims, reasons)


def frozen_in_onnx(
    dims_by_name: Mapping[str, Sequence[Any]],
    input_names: Mapping[str, str],
    shapes: GraphShapes,
    reasons: Reasons,
) -> list[str]:
    """One line per axis that the inputs of an ONNX model fix."""
    dims = {path: dims_by_name[name] for path, name in input_names.items() if name in dims_by_name}
    return _frozen(shapes, dims, reasons)
