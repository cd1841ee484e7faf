"""Which inputs a call writes to in place, told by their version counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..pytrees import flatten_with_paths

__all__ = ["WriteWatch", "in_place", "tensor_leaves"]


def in_place(path: str) -> str:
    """The path under which what is in an input after a call is compared."""
    return f"{path} (in place)"


def tensor_leaves(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Path -> tensor, without those of inference mode, which have no version counter."""
    return {
        path: leaf
        for name, value in arguments.items()
        for path, leaf in flatten_with_paths(value, name)
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    }


class WriteWatch:
    """Made before a call that gets `arguments` themselves.

    Attributes
    ----------
    leaves:
        Path -> tensor.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.leaves = tensor_leaves(arguments)
        self._versions = {path: leaf._version for path, leaf in self.leaves.items()}

    def written(self) -> dict[str, torch.Tensor]:
        """Path -> the tensor, for those that were written to since."""
        return {p: leaf.detach() for p, leaf in self.leaves.items() if leaf._version != self._versions[p]}
