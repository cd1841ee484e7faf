"""What a patch mode is: a named, reversible set of changes around observation and export."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["PatchMode"]


@runtime_checkable
class PatchMode(Protocol):
    """A patch mode.

    Attributes
    ----------
    name:
        As in the spec's matrix and on the command line.
    observed_under_itself:
        Whether the mode changes what an input means, so that calls must be observed with it active.

    A mode may also have ``prepared(observed) -> PatchMode``: called at the stage ``patch`` with the graph and
    its calls (`observed.Observed`), it returns the mode that the case goes on with.
    """

    name: str
    observed_under_itself: bool

    def apply(self, model: torch.nn.Module, target: str) -> AbstractContextManager[Any]:
        """Context manager in which the changes are active; everything is restored on exit, also after errors.

        Parameters
        ----------
        target:
            ``eager`` while observing; while exporting the exporter's `target`: ``torch``, ``onnx`` (an
            ExportedProgram on its way to ONNX) or ``torchscript``.

        The block may be given an `engine.Activity`, from which the record says which patches were called.
        """
        ...

    def before_convert(self, program: torch.export.ExportedProgram) -> dict[Any, Any] | None:
        """Fix the captured graph in place before it is converted; returns a translation table or ``None``."""
        ...

    def after_convert(self, onnx_program: Any) -> None:
        """Fix the converted ONNX program in place."""
        ...
