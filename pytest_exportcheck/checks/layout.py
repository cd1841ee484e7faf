"""How inputs lie in memory: what a trace was told of the example, and a call is otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..pytrees.cloning import is_wrapper
from ..pytrees.strides import lies_as

__all__ = ["lies_otherwise"]

#: So many inputs a message lists.
_MOST = 3


def lies_otherwise(inputs: Mapping[str, Any], example: Mapping[str, Any]) -> list[str]:
    """For the details of a failure: inputs (path -> leaf) that do not lie as those of the example."""
    found = []
    for path, leaf in inputs.items():
        other = example.get(path)
        if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if is_wrapper(leaf) or leaf.is_quantized or leaf.is_nested or lies_as(leaf, other):
            continue
        found.append(f"`{path}` (strides {_strides(leaf)}, of the example {_strides(other)})")
    if not found:
        return []
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return [
        f"other than in the example lie in memory {', '.join(found[:_MOST])}{more}: a trace keeps what the "
        "model was told of that (is_contiguous, stride, view)"
    ]


def _strides(tensor: torch.Tensor) -> str:
    return f"{tensor.stride()} of {tuple(tensor.shape)}" if tensor.layout is torch.strided else "none"
