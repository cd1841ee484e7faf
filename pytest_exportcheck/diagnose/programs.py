"""Running what lies between a model and its ONNX graph: captured and decomposed programs, node by node.

The one module of this room that touches private parts of `torch.onnx` (checked on torch 2.13); where they are
absent the step cannot be told apart, and `decompose` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree

from ..exporters.tables import shared_tables

__all__ = [
    "Interpretation",
    "asserted_at",
    "decompose",
    "decomposition_table",
    "inputs_of",
    "interpret",
    "module_path",
    "source_line",
]


def _registry() -> Any:
    from torch.onnx._internal.exporter import _registration

    with shared_tables():
        return _registration.ONNXRegistry.from_torchlib()


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions that `torch.onnx.export` applies; `ImportError` or `AttributeError` if it moved."""
    from torch.onnx._internal.exporter import _decomp

    implemented = set(_decomp.get_onnx_implemented_overloads(_registry()))
    return dict(_decomp.create_onnx_friendly_decomposition_table(implemented))


def decompose(
    program: torch.export.ExportedProgram, table: Mapping[Any, Any] | None = None
) -> torch.export.ExportedProgram:
    """`program` decomposed as `torch.onnx.export` does it, or with another `table`."""
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with oblivious:
        decomposed: torch.export.ExportedProgram = program.run_decompositions(
            dict(decomposition_table() if table is None else table)
        )
    return decomposed


def inputs_of(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> list[Any]:
    """What the placeholders of `program` stand for: weights, constants and the leaves of `kwargs`.

    Buffers are copied: a captured graph writes into them.
    """
    _, keywords = program.call_spec.in_spec.children()
    names = list(keywords.context or ())
    leaves = iter(_pytree.tree_leaves(((), {name: kwargs[name] for name in names})))
    values: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            values.append(next(leaves))
        elif spec.target in program.state_dict:
            value = program.state_dict[spec.target]
            values.append(value.clone() if spec.kind is InputKind.BUFFER else value)
        else:
            assert spec.target is not None
            values.append(program.constants[spec.target])
    return values


#: Demands that a captured program checks when it runs, and an ONNX model does not.
_ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


class Interpretation(torch.fx.Interpreter):
    """Runs the graph of a program and keeps the value of every node, as far as memory allows.

    Attributes
    ----------
    values:
        Node name -> value.
    """

    def __init__(self, program: torch.export.ExportedProgram, keep: bool = True) -> None:
        super().__init__(program.graph_module)
        self.program = program
        self.keep = keep
        self.values: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """One node; what it returns is kept."""
        value = None if n.target in _ASSERTIONS else super().run_node(n)
        if self.keep:
            self.values[n.name] = value
        return value

    def outputs(self, kwargs: Mapping[str, Any], paths: list[str]) -> list[tuple[str, Any]]:
        """(path, value) of the user outputs for tensor arguments by name."""
        with torch.no_grad():
            flat = self.run(*inputs_of(self.program, kwargs))
        specs = self.program.graph_signature.output_specs
        user = [
            spec.arg.value if isinstance(spec.arg, ConstantArgument) else value
            for spec, value in zip(specs, flat, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        return list(zip(paths, user, strict=True))

    def again(self, node: torch.fx.Node, replaced: Mapping[str, Any]) -> Any:
        """The value of `node` with other values of its inputs, by name; kept values are left alone."""

        def look_up(argument: torch.fx.Node) -> Any:
            return replaced.get(argument.name, self.values.get(argument.name))

        args = torch.fx.map_arg(node.args, look_up)
        kwargs = torch.fx.map_arg(node.kwargs, look_up)
        with torch.no_grad():
            return getattr(self, node.op)(node.target, args, kwargs)


def interpret(
    program: torch.export.ExportedProgram, kwargs: Mapping[str, Any], paths: list[str]
) -> list[tuple[str, Any]]:
    """(path, value) of the outputs of `program`, without its guards and assertions."""
    return Interpretation(program, keep=False).outputs(kwargs, paths)


def module_path(node: torch.fx.Node) -> str:
    """``model.layers.0.self_attn (LlamaAttention)`` from the metadata of a node; empty if there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", str(kind))
    return f"{path or 'the model'} ({name.rpartition('.')[2]})"


def asserted_at(program: torch.export.ExportedProgram, name: str) -> tuple[str, str] | None:
    """(path of a module, line) where the value was made that the node `name` asserts something of.

    torch puts an assertion behind what it is about, wherever in the model it was demanded.
    """
    found = [node for node in program.graph.nodes if node.name == name]
    for node in found:
        line = source_line(node.meta.get("stack_trace"))
        stack = node.meta.get("nn_module_stack") or {}
        if line and stack:
            return list(stack.values())[-1][0], line
        found += [before for before in node.all_input_nodes if before not in found]
    return None


def _frames(trace: str) -> Iterator[tuple[str, str, str]]:
    lines = trace.splitlines()
    for index, line in enumerate(lines):
        text = line.strip()
        if text.startswith('File "'):
            file, _, rest = text[6:].partition('", line ')
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            yield file, rest.partition(",")[0], "" if code.startswith('File "') else code


def source_line(trace: str | None) -> str:
    """``modeling_llama.py:230: attn = ...`` of a stack trace in metadata: the last frame outside of torch."""
    frames = list(_frames(trace or ""))
    own = [frame for frame in frames if "/torch/" not in frame[0].replace("\\", "/")]
    if not frames:
        return ""
    file, line, code = (own or frames)[-1]
    return f"{file}:{line}" + (f": {code}" if code else "")
