"""A digest of a captured program: two captures with the same one convert alike and run alike.

Nodes, constants, weights, guards, and what the capture decided by sizes; not where nodes come from (stack
traces, module names), which no number depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..observe import GraphShapes
from .guards import CaptureWatch

__all__ = ["fingerprint"]


def fingerprint(program: torch.export.ExportedProgram, watch: CaptureWatch, shapes: GraphShapes) -> str:
    """Hexadecimal digest; an object that has no text but its address makes it unlike any other."""
    digest = hashlib.sha256()
    for line in _lines(program, watch, shapes):
        digest.update(line.encode("utf-8", "backslashreplace") + b"\n")
    for name, tensor in _tensors(program):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}\n".encode())
        if tensor.numel():
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _lines(program: torch.export.ExportedProgram, watch: CaptureWatch, shapes: GraphShapes) -> Iterator[str]:
    for path, module in program.graph_module.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        yield f"graph {path}"
        for node in module.graph.nodes:
            target = node.target if isinstance(node.target, str) else _name(node.target)
            value = _meta(node.meta.get("val"))
            yield f"{node.op} {node.name} {target} {node.args!r} {node.kwargs!r} {value}"
    yield repr(program.graph_signature)
    yield f"{program.call_spec.in_spec} {program.call_spec.out_spec}"
    yield str(sorted((str(symbol), str(limits)) for symbol, limits in program.range_constraints.items()))
    # torch 2.13: the guards as Python text. Elsewhere, the comparisons below have to do.
    yield str(getattr(program, "_guards_code", ""))
    yield str(sorted(map(str, watch.comparisons(shapes))))
    yield str(watch.frozen())


def _name(target: Any) -> str:
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return f"{name} {target}"


def _meta(value: Any) -> str:
    """What is known of the value of a node."""
    if isinstance(value, torch.Tensor):
        layout = [str(size) for size in value.shape], [str(step) for step in value.stride()]
        return f"{value.dtype} {layout} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_meta, value))}]"
    return str(value)


def _tensors(program: torch.export.ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    held: Mapping[str, Any] = {**program.state_dict, **program.constants}
    for name, value in sorted(held.items()):
        if isinstance(value, torch.Tensor):
            yield name, value


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
