"""A digest of a captured program: two captures with the same one convert alike and run alike.

Nodes, constants, weights, guards, symbols, and what the capture decided by sizes; not the lines of source
that nodes come from, which no number depends on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..observe import GraphShapes
from .guards import CaptureWatch, size_facts

_FILE_MODULE = re.compile(r"\b_exportcheck_(\w+)_[0-9a-f]{12}\.")

__all__ = [
    "draws_random_numbers",
    "fingerprint",
    "graph_digest",
    "program_dims",
    "program_lines",
    "tensors_of",
    "version_of",
    "weights_digest",
]


def fingerprint(program: torch.export.ExportedProgram, watch: CaptureWatch, shapes: GraphShapes) -> str:
    """Hexadecimal digest; an object that has no text but its address makes it unlike any other."""
    parts = graph_digest(program, watch, shapes) + weights_digest(program)
    return hashlib.sha256(parts.encode()).hexdigest()


def graph_digest(program: torch.export.ExportedProgram, watch: CaptureWatch, shapes: GraphShapes) -> str:
    """The same of everything but the values of weights and buffers."""
    digest = hashlib.sha256()
    for line in _lines(program, watch, shapes):
        # A file next to a spec is imported under a name with a digest of its path.
        text = _FILE_MODULE.sub(r"\1.", line)
        digest.update(text.encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()


def weights_digest(program: torch.export.ExportedProgram) -> str:
    """The same of the values of weights, buffers and constants."""
    digest = hashlib.sha256()
    for name, tensor in tensors_of(program).items():
        digest.update(f"{name} {_described(tensor)}\n".encode())
        if tensor.numel():
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def tensors_of(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Name -> weight, buffer or constant, those that only a subgraph has included; sorted."""
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    for path, module in program.graph_module.named_modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "get_attr":
                held[f"{path}:{node.target}"] = _attribute(module, str(node.target))
    return {name: value for name, value in sorted(held.items()) if isinstance(value, torch.Tensor)}


def program_dims(program: torch.export.ExportedProgram, paths: Sequence[str]) -> dict[str, list[Any]]:
    """The dims of the inputs of an ExportedProgram; `paths` in the order of its user inputs."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    dims = {}
    for path, name in zip(paths, program.graph_signature.user_inputs, strict=False):
        value = nodes[str(name)].meta.get("val") if str(name) in nodes else None
        if isinstance(value, torch.Tensor):
            # A size that froze may still be a SymInt, of a constant.
            dims[path] = [int(text) if (text := str(size)).isdigit() else size for size in value.shape]
    return dims


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to in place."""
    return -1 if tensor.is_inference() else tensor._version


def draws_random_numbers(program: torch.export.ExportedProgram) -> bool:
    """Whether two runs of it may differ."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _drops_nothing(node)
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


def _drops_nothing(node: torch.fx.Node) -> bool:
    """Whether a dropout, or attention with one, is switched off."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in ("dropout_p", "p", "train"):
            given = node.args[position] if position < len(node.args) else argument.default_value
            if node.kwargs.get(argument.name, given) in (0, False):
                return True
    return False


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def program_lines(program: torch.export.ExportedProgram, inner: bool = True) -> Iterator[str]:
    """Nodes, constants, signature, tree specs and limits of symbols; values of tensors and guards aside.

    Parameters
    ----------
    inner:
        Also what is known of the sizes of inner nodes, which a conversion reads and a run does not.
    """
    for path, module in program.graph_module.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        yield f"graph {path}"
        for node in module.graph.nodes:
            target = node.target if isinstance(node.target, str) else _name(node.target)
            value = _meta(node.meta.get("val")) if inner or node.op == "placeholder" else ""
            # Its modules are in the notes of the ONNX model.
            owners = [tuple(map(str, owner)) for owner in (node.meta.get("nn_module_stack") or {}).values()]
            yield f"{node.op} {node.name} {target} {node.args!r} {node.kwargs!r} {value} {owners}"
    for name, value in sorted(program.constants.items()):
        # A tensor is among the weights.
        yield f"constant {name} {_described(value) if isinstance(value, torch.Tensor) else repr(value)}"
    yield repr(program.graph_signature)
    yield f"{program.call_spec.in_spec} {program.call_spec.out_spec}"
    yield str(sorted((str(symbol), str(limits)) for symbol, limits in program.range_constraints.items()))


def _lines(program: torch.export.ExportedProgram, watch: CaptureWatch, shapes: GraphShapes) -> Iterator[str]:
    yield from program_lines(program)
    yield from size_facts(program)
    # torch 2.13: the guards as Python text. Elsewhere, the comparisons below have to do.
    yield str(getattr(program, "_guards_code", ""))
    # In order: it decides which sizes are tried where there are too many. Lines of source decide nothing.
    for label, comparisons in watch.decided(shapes).items():
        yield f"{label} {[(each.text, each.value, each.code, bool(each.place)) for each in comparisons]}"
    yield str(list(watch.frozen()))


def _name(target: Any) -> str:
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return f"{name} {target}"


def _described(value: torch.Tensor) -> str:
    layout = [str(size) for size in value.shape], [str(step) for step in value.stride()]
    return f"{value.dtype} {layout} {value.device}"


def _meta(value: Any) -> str:
    """What is known of the value of a node."""
    if isinstance(value, torch.Tensor):
        return _described(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_meta, value))}]"
    return str(value)


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
