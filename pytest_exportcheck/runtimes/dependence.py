"""Which inputs of an ONNX graph its outputs depend on: by their values, not by their sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

__all__ = ["inputs_of_outputs"]

#: Operator -> how many of its first inputs it reads the values of; any other operator reads all of them.
_READS = {
    "Shape": 0,
    "Size": 0,
    "EyeLike": 0,
    "RandomNormalLike": 0,
    "RandomUniformLike": 0,
    "CastLike": 1,
}


def inputs_of_outputs(model: Any, wanted: Callable[[int], bool] = lambda position: True) -> frozenset[str]:
    """Names of the inputs of a ``ModelProto`` on which an output depends.

    What cannot be told apart counts as a dependence: an operator is thought to use whatever it is given,
    and a loop every value that it carries.

    Parameters
    ----------
    wanted:
        Of the position of an output: whether it counts.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    graph = model.graph
    outputs = [value.name for position, value in enumerate(graph.output) if wanted(position)]
    free = _Search(functions).outside(graph.node, outputs)
    return frozenset(free & {value.name for value in graph.input})


class _Search:
    """From outputs back to what they are made of."""

    def __init__(self, functions: dict[tuple[str, str], Any]) -> None:
        self._functions = functions
        #: Positions of the inputs of a function that its outputs depend on.
        self._known: dict[tuple[str, str], frozenset[int]] = {}

    def outside(self, nodes: Collection[Any], outputs: Collection[str]) -> set[str]:
        """Names that `outputs` depend on and none of `nodes` makes."""
        makers = {name: node for node in nodes for name in node.output if name}
        seen: set[str] = set()
        waiting = list(outputs)
        free = set()
        while waiting:
            name = waiting.pop()
            if name in seen or not name:
                continue
            seen.add(name)
            if name in makers:
                waiting.extend(self._read_by(makers[name]))
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
