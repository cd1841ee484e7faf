"""What a runtime is, and which one runs a given program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from ..exporters.base import Exported

__all__ = ["Session", "WritesInputs", "open_session"]


class Session(Protocol):
    """A loaded program.

    Attributes
    ----------
    description:
        For messages: ``onnxruntime CPU``.
    facts:
        For the record: providers, node counts, sizes.
    """

    description: str
    facts: dict[str, Any]

    def run(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """(path, value) of the outputs for arguments that hold tensors, by name.

        Raises
        ------
        RunError
            The arguments cannot be fed to the program.
        """
        ...


@runtime_checkable
class WritesInputs(Protocol):
    """A session of a program that can write into its inputs, as the model does."""

    def run_in_place(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Like `Session.run`, on `arguments` themselves: what the program writes is in them afterwards."""
        ...


def open_session(exported: Exported, device: str, output_paths: list[str]) -> Session:
    """Load `exported` into the runtime for its kind of program.

    Raises
    ------
    SessionError
        The runtime refuses the program, or runs it elsewhere than on `device`.
    """
    program = exported.program
    if isinstance(program, torch.export.ExportedProgram):
        from .torch_program import TorchSession

        return TorchSession(program, output_paths)
    from .onnx_runtime import OnnxRuntimeSession, is_onnx

    if is_onnx(program):
        return OnnxRuntimeSession(exported, device)
    if callable(program):
        from .torch_program import CallableSession

        return CallableSession(program)
    from ..errors import SessionError

    raise SessionError(
        f"the exporter returned a {type(program).__name__}: "
        "expected an ExportedProgram, an ONNX model or a callable"
    )
