"""Inputs that a program does not have: those that eager does not read either, or values that were baked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ConvertError
from ..observe.observation import GraphObservation
from ..pytrees import clone_tree, flatten_with_paths
from .compare import Tolerances, compare_leaves

__all__ = ["refuse_baked_inputs"]


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values that are valid where those of `tensor` are: zeros, ones for a tensor of zeros."""
    return torch.zeros_like(tensor) if tensor.ne(0).any() else torch.ones_like(tensor)


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
        changed: dict[str, Any] = {}
        for name, value in arguments.items():
            leaves, spec = _pytree.tree_flatten(value)
            paths = [each for each, _ in flatten_with_paths(value, name)]
            new = [_other(leaf) if each == path else leaf for each, leaf in zip(paths, leaves, strict=True)]
            changed[name] = _pytree.tree_unflatten(new, spec)
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
