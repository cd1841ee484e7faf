"""``none``: nothing is changed (flattening of caches is registered, as always)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["NoPatches"]


class NoPatches:
    """No patch at all. A base for modes that only need `apply`."""

    name = "none"
    observed_under_itself = False

    @contextlib.contextmanager
    def apply(self, model: torch.nn.Module, target: str) -> Iterator[Any]:
        """Nothing to apply."""
        yield

    def before_convert(self, program: torch.export.ExportedProgram) -> dict[Any, Any] | None:
        """Nothing to fix."""
        return None

    def after_convert(self, onnx_program: Any) -> None:
        """Nothing to fix."""
