"""Outputs of an ONNX graph that are indices of what an operator chooses: of equal values, any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Choice", "chosen_outputs"]

#: Operator -> which of its outputs holds indices into its first input.
_CHOOSES = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}

#: What leaves indices what they are, and what leaves values what they are.
_MOVES = {"Cast", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
_SAME = {"Identity"}


@dataclass(frozen=True)
class Choice:
    """Where indices come from.

    Attributes
    ----------
    operator:
        ``TopK`` also stands for a sort.
    values:
        Name of the input or output of the graph that it chooses from; ``""``: it is neither.
    """

    operator: str
    values: str = ""


def chosen_outputs(graph: Any) -> dict[str, Choice]:
    """Name of each output of a ``GraphProto`` that is chosen indices, moved about at most -> their origin."""
    made = {name: node for node in graph.node for name in node.output if name}
    outputs = [value.name for value in graph.output]
    known = {_origin(name, made, _SAME): name for name in (*(v.name for v in graph.input), *outputs)}
    found = {}
    for output in outputs:
        name = _origin(output, made, _MOVES)
        node = made.get(name)
        index = None if node is None else _CHOOSES.get(node.op_type)
        if node is not None and index is not None and list(node.output).index(name) == index:
            found[output] = Choice(node.op_type, known.get(_origin(node.input[0], made, _SAME), ""))
    return found


def _origin(name: str, made: Mapping[str, Any], through: set[str]) -> str:
    """The value that `name` is made of by the operators `through` alone."""
    while name in made and made[name].op_type in through:
        name = made[name].input[0]
    return name
