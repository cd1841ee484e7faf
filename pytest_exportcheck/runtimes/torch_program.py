"""Run an ExportedProgram in torch, or any callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..pytrees import clone_tree, flatten_with_paths

__all__ = ["CallableSession", "TorchSession"]


class CallableSession:
    """A program that is simply called with the keyword arguments."""

    description = "the exported callable"

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self.facts: dict[str, Any] = {}

    def run(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Outputs with their paths."""
        return self.run_in_place(clone_tree(dict(arguments)))

    def run_in_place(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The same on `arguments` themselves, which the program may write into."""
        with torch.no_grad():
            return flatten_with_paths(self._program(**arguments))


class TorchSession(CallableSession):
    """An ExportedProgram as a module; its guards are checked on every call."""

    description = "the ExportedProgram"

    def __init__(self, program: torch.export.ExportedProgram, output_paths: list[str]) -> None:
        super().__init__(program.module())
        self.facts = {"nodes": len(program.graph.nodes)}
