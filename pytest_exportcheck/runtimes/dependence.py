"""Which inputs of an ONNX graph its outputs depend on: by their values, not by their sizes alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["inputs_by_output"]

#: Operator -> how many of its first inputs it reads the values of; any other operator reads all of them.
_READS = {
    "Shape": 0,
    "Size": 0,
    "EyeLike": 0,
    "RandomNormalLike": 0,
    "RandomUniformLike": 0,
    "CastLike": 1,
}


def inputs_by_output(model: Any) -> list[frozenset[str]]:
    """Of each output of a ``ModelProto``, the names of the inputs that it depends on.

    What cannot be told apart counts as a dependence: an operator is thought to use whatever it is given,
    and a loop every value that it carries.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    search = _Search(functions)
    graph = model.graph
    inputs = {value.name for value in graph.input}
    makers = _makers(graph.node)
    known: dict[str, list[str]] = {}
    return [frozenset(search.free(makers, [value.name], known) & inputs) for value in graph.output]


def _makers(nodes: Collection[Any]) -> dict[str, Any]:
    return {name: node for node in nodes for name in node.output if name}


class _Search:
    """From outputs back to what they are made of."""

    def __init__(self, functions: dict[tuple[str, str], Any]) -> None:
        self._functions = functions
        #: Positions of the inputs of a function that its outputs depend on.
        self._known: dict[tuple[str, str], frozenset[int]] = {}

    def outside(self, nodes: Collection[Any], outputs: Collection[str]) -> set[str]:
        """Names that `outputs` depend on and none of `nodes` makes."""
        return self.free(_makers(nodes), outputs, {})

    def free(self, makers: dict[str, Any], outputs: Collection[str], known: dict[str, list[str]]) -> set[str]:
        """The same, of nodes by what they make; `known` is filled with what each name is made of."""
        seen: set[str] = set()
        waiting = list(outputs)
        free = set()
        while waiting:
            name = waiting.pop()
            if name in seen or not name:
                continue
            seen.add(name)
            if name in makers:
                if name not in known:
                    known[name] = list(self._read_by(makers[name]))
                waiting.extend(known[name])
            else:
                free.add(name)
        return free

    def _read_by(self, node: Any) -> Iterator[str]:
        function = self._functions.get((node.domain, node.op_type))
        if function is not None:
            needed = self._inputs_of(function)
            yield from (name for position, name in enumerate(node.input) if position in needed)
        elif node.domain in ("", "ai.onnx") and node.op_type in _READS:
            yield from node.input[: _READS[node.op_type]]
        else:
            yield from node.input
        for attribute in node.attribute:
            # An attribute that is no graph has an empty one.
            for graph in (attribute.g, *attribute.graphs):
                names = self.outside(graph.node, [value.name for value in graph.output])
                own = (*graph.input, *graph.initializer)
                yield from names - {value.name for value in own}

    def _inputs_of(self, function: Any) -> frozenset[int]:
        key = (function.domain, function.name)
        if key not in self._known:
            names = self.outside(function.node, function.output)
            self._known[key] = frozenset(k for k, name in enumerate(function.input) if name in names)
        return self._known[key]
