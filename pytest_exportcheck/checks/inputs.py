"""Inputs that a program does not have: those that eager does not read either, or values that were baked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ConvertError
from ..observe.observation import GraphObservation
from ..pytrees import clone_tree, flatten_with_paths
from .compare import Tolerances, compare_leaves

__all__ = ["refuse_baked_inputs"]


def _others(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other values that may be valid where those of `tensor` are: zeros or ones, one more, another order."""
    made = [torch.zeros_like(tensor) if tensor.ne(0).any() else torch.ones_like(tensor)]
    if tensor.dtype is not torch.bool and not tensor.is_quantized:
        made += [tensor + 1, tensor - 1]
    if tensor.dim() and not tensor.is_quantized:
        made.append(tensor.flatten().flip(0).reshape(tensor.shape))
    yield from made


def refuse_baked_inputs(graph: GraphObservation, absent: Sequence[str], tolerances: Tolerances) -> None:
    """See whether eager reads the inputs at the paths `absent`, which a program has not.

    Raises
    ------
    ConvertError
        Other values there change what eager returns: the program has the values of the example inside.
    """
    arguments = graph.example.arguments
    expected = flatten_with_paths(clone_tree(graph.eager(arguments)))
    for path in absent:
        for changed in _changed(arguments, path):
            try:
                got = flatten_with_paths(graph.eager(changed))
            except Exception:
                # Values that eager refuses: it reads them, which says nothing of the results.
                continue
            if not all(result.ok for result in compare_leaves(expected, got, tolerances)):
                raise ConvertError(
                    f"the program has no input for {path}, and eager's outputs depend on it: "
                    "its values were baked into the program"
                )


def _changed(arguments: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """`arguments` with other values in the tensor at `path`."""
    found = {name: _pytree.tree_flatten(value) for name, value in arguments.items()}
    for name, (leaves, spec) in found.items():
        paths = [each for each, _ in flatten_with_paths(arguments[name], name)]
        if path in paths:
            at = paths.index(path)
            for other in _others(leaves[at]):
                yield {
                    **arguments,
                    name: _pytree.tree_unflatten([*leaves[:at], other, *leaves[at + 1 :]], spec),
                }
