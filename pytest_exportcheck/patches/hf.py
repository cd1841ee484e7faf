"""``hf``: the patches that `transformers.exporters` itself applies.

The one module that touches its internals (``exporters.utils``, ``exporter_dynamo``, ``exporter_onnx``;
checked on transformers 5.24, they move between versions).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import PatchError
from .none import NoPatches

__all__ = ["HfPatches"]


def _internals(*names: str) -> list[Any]:
    from importlib import import_module

    modules = ["utils", "exporter_dynamo", "exporter_onnx"]
    found = []
    for name in names:
        for module in modules:
            value = getattr(import_module(f"transformers.exporters.{module}"), name, None)
            if value is not None:
                found.append(value)
                break
        else:
            import transformers

            raise PatchError(
                f"patch mode hf: transformers {transformers.__version__} "
                f"has no transformers.exporters name {name!r}; "
                "the mode is written for transformers 5.24"
            )
    return found


class HfPatches(NoPatches):
    """The ``dynamo`` registry of transformers.exporters; for ONNX its ``onnx`` registry and fixes too.

    It traces sliding-window layers as full caches, so calls are observed with it active.
    """

    name = "hf"
    observed_under_itself = True

    @contextlib.contextmanager
    def apply(self, model: torch.nn.Module, target: str) -> Iterator[None]:
        """Apply both registries in the order transformers uses (onnx outside dynamo)."""
        try:
            apply_patches, reset_model_state = _internals("apply_patches", "reset_model_state")
        except ImportError as error:
            raise PatchError(
                f"patch mode hf needs transformers with transformers.exporters: {error}"
            ) from error
        with contextlib.ExitStack() as stack:
            if target == "onnx":
                _internals("_ONNX_TRANSLATION_TABLE")  # importing the module fills the registry
                stack.enter_context(apply_patches("onnx"))
            stack.enter_context(apply_patches("dynamo"))
            if target != "eager":
                stack.enter_context(reset_model_state(model))
            yield

    def before_convert(self, program: torch.export.ExportedProgram) -> dict[Any, Any] | None:
        """The fixes of FX nodes, in place, and the translation table."""
        apply_fixes, table = _internals("apply_fx_node_fixes", "_ONNX_TRANSLATION_TABLE")
        apply_fixes("onnx", program.graph_module)
        return dict(table)

    def after_convert(self, onnx_program: Any) -> None:
        """The fixes of the ONNX graph, in place."""
        (apply_fixes,) = _internals("apply_onnx_ir_fixes")
        apply_fixes(onnx_program)
