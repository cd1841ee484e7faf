"""Which inputs of an ExportedProgram its outputs depend on: by their values, not by their sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

__all__ = ["paths_by_output"]

#: Operators, without namespace and overload, that read but sizes, dtype and device of the first argument.
_ONLY_SIZES = frozenset(
    [
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randint_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    ]
)

#: Operators that call one submodule, or one of two, with the operands that follow it.
_CALLS = ("cond", "wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph")


def paths_by_output(program: torch.export.ExportedProgram, paths: Sequence[str]) -> list[frozenset[str]]:
    """Of each output of the model, those of `paths`, in the order of the user inputs, that it depends on.

    What cannot be told apart counts as a dependence: an operator is thought to use whatever it is given.
    Neither assertions nor what the program writes into inputs and buffers are outputs.
    """
    outputs: Any = program.graph.output_node().args[0]
    wanted = [
        node
        for node, spec in zip(outputs, program.graph_signature.output_specs, strict=True)
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    ]
    by_name = {
        str(name): path
        for path, name in zip(paths, program.graph_signature.user_inputs, strict=False)
        if isinstance(name, str)
    }
    writes = _Writes(program.graph_module)
    known: dict[Any, list[torch.fx.Node]] = {}
    found = []
    for node in wanted:
        start = [node] if isinstance(node, torch.fx.Node) else []
        reached = _reached(program.graph_module, start, writes, known)
        found.append(
            frozenset(
                by_name[each.name] for each in reached if each.op == "placeholder" and each.name in by_name
            )
        )
    return found


def _reached(
    module: torch.fx.GraphModule,
    wanted: Iterable[torch.fx.Node],
    writes: _Writes | None = None,
    known: dict[torch.fx.Node, list[torch.fx.Node]] | None = None,
) -> set[torch.fx.Node]:
    """All nodes that `wanted` are made of; `known` is filled with what each reads."""
    writes = writes or _Writes(module)
    known = {} if known is None else known
    waiting, seen = list(wanted), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in known:
            known[node] = list(_read_by(node, module))
            for writer in writes.into(node):
                known[node] += [writer, *writer.all_input_nodes]
        waiting.extend(known[node])
    return seen


def _operator(node: torch.fx.Node) -> str:
    """``add_`` for ``aten::add_.Tensor``, ``cond`` for an operator of higher order."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def _read_by(node: torch.fx.Node, module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    operator = _operator(node)
    if operator in _ONLY_SIZES and isinstance(node.target, torch._ops.OpOverload):
        first = node.args[0] if node.args else None
        rest = [*node.args[1:], *node.kwargs.values()]
        return [each for each in node.all_input_nodes if each is not first or each in rest]
    bodies = _bodies(node, module)
    if bodies and operator in _CALLS:
        called = _operands_read(node, bodies)
        if called is not None:
            return called
    return node.all_input_nodes


def _bodies(node: torch.fx.Node, module: torch.fx.GraphModule) -> dict[torch.fx.Node, torch.fx.GraphModule]:
    """The submodules that `node` is given."""
    found = {}
    for each in node.all_input_nodes:
        body = getattr(module, str(each.target), None) if each.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            found[each] = body
    return found


def _operands_read(
    node: torch.fx.Node, bodies: dict[torch.fx.Node, torch.fx.GraphModule]
) -> list[torch.fx.Node] | None:
    """The arguments that a branch, or the one submodule, makes something of; ``None``: not known."""
    last = max(position for position, each in enumerate(node.args) if each in bodies)
    rest = node.args[last + 1 :]
    operands: list[Any] = []
    for each in rest:
        operands.extend(each if isinstance(each, (list, tuple)) else [each])
    read = {each for each in node.args[:last] if isinstance(each, torch.fx.Node)}
    for body in bodies.values():
        placeholders = [each for each in body.graph.nodes if each.op == "placeholder"]
        if len(placeholders) != len(operands):
            return None
        reached = _reached(body, body.graph.output_node().all_input_nodes)
        pairs = zip(placeholders, operands, strict=True)
        read |= {given for inside, given in pairs if inside in reached and isinstance(given, torch.fx.Node)}
    return list(read)


class _Writes:
    """Writes in place of a graph: who writes into the memory that a node may share."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        nodes = list(module.graph.nodes)
        writers = [node for node in nodes if _writes(node, module)]
        self._parent: dict[torch.fx.Node, torch.fx.Node] = {}
        self._writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        if not writers:
            return
        for node in nodes:
            if node in writers or _may_share(node):
                for each in node.all_input_nodes:
                    if _holds_tensor(each):
                        self._parent[self._root(each)] = self._root(node)
        for writer in writers:
            self._writers.setdefault(self._root(writer), []).append(writer)

    def _root(self, node: torch.fx.Node) -> torch.fx.Node:
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def into(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Nodes that may write into the memory of `node`."""
        return self._writers.get(self._root(node), []) if self._writers else []


def _writes(node: torch.fx.Node, module: torch.fx.GraphModule) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return any(
        _writes(inside, body) for body in _bodies(node, module).values() for inside in body.graph.nodes
    )


def _may_share(node: torch.fx.Node) -> bool:
    """Whether what `node` returns may lie in the memory of an argument."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if any(argument.alias_info is not None for argument in target._schema.arguments):
        return True
    # Made of other operators, a view among them perhaps: dropout returns its argument.
    name = f"{target._schema.name}.{target._overloadname}".removesuffix(".default")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def _holds_tensor(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
