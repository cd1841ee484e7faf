"""``hf``: the patches that `transformers.exporters` itself applies.

The one module that touches its internals (``exporters.utils``, ``exporter_dynamo``, ``exporter_onnx``;
checked on transformers 5.20 and 5.24, they move between versions).
"""

from __future__ import annotations

import contextlib
import inspect
import re
from types import ModuleType
from typing import Any

import torch

from ..errors import PatchError
from ..lazy import large_imports
from .modes import PatchList
from .patch import Patch, module_loaded

__all__ = ["HfPatches"]


def _internals(*names: str) -> list[Any]:
    from importlib import import_module

    modules = ["utils", "exporter_dynamo", "exporter_onnx"]
    found = []
    for name in names:
        for module in modules:
            with large_imports():
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


def _registered(backend: str) -> list[Patch]:
    (registry,) = _internals("_PATCHES")
    if not registry.get(backend):
        # A mode without its patches would pass for one with them.
        raise PatchError(f"patch mode hf: transformers.exporters has no patches for {backend!r}")
    found = []
    for owner, attribute, factory in registry[backend]:
        text = inspect.getdoc(factory) or ""
        link = re.search(r"https?://[^\s)]+[^\s).,;`]", text)
        # A dotted path in transformers 5.24, the module or class itself in 5.20.
        place, owner = (owner, None) if isinstance(owner, str) else (_dotted(owner), owner)
        target = f"{place}.{attribute}"
        found.append(
            Patch(
                target,
                factory,
                why=text.partition("\n")[0],
                link=link.group(0) if link else "",
                wraps=True,
                # Their registry lists the places where a function is imported by name, and passes over
                # targets that are absent.
                everywhere=False,
                optional=True,
                name=f"{backend}:{target}",
                owner=owner,
            )
        )
    return found


def _dotted(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    raise PatchError(
        f"patch mode hf: transformers.exporters registers a patch of {owner!r}, neither a path, a module "
        "nor a class; the mode is written for transformers 5.20 to 5.24"
    )


def _hf_patches(model: torch.nn.Module | None, target: str) -> list[Patch]:
    try:
        # The registries are filled when these modules are imported.
        (reset,) = _internals("reset_model_state")
        if target == "onnx":
            _internals("_ONNX_TRANSLATION_TABLE")
    except ImportError as error:
        raise PatchError(f"patch mode hf needs transformers with transformers.exporters: {error}") from error
    # Their order: onnx outside dynamo.
    patches = [*(_registered("onnx") if target == "onnx" else []), *_registered("dynamo")]
    if model is not None:
        patches = [patch for patch in patches if module_loaded(patch.target)]
    if target != "eager":
        patches.append(
            Patch(
                "state that the model keeps between calls",
                scope=reset if model is not None else lambda model: contextlib.nullcontext(),
                why="transformers.exporters clears it while it exports",
                name="reset_model_state",
            )
        )
    return patches


class HfPatches(PatchList):
    """The ``dynamo`` registry of transformers.exporters; for ONNX its ``onnx`` registry and fixes too.

    It traces sliding-window layers as full caches, so calls are observed with it active.
    """

    def __init__(self) -> None:
        super().__init__("hf", [_hf_patches], observed_under_itself=True)

    def before_convert(self, program: torch.export.ExportedProgram) -> dict[Any, Any] | None:
        """The fixes of FX nodes, in place, and the translation table."""
        apply_fixes, table = _internals("apply_fx_node_fixes", "_ONNX_TRANSLATION_TABLE")
        apply_fixes("onnx", program.graph_module)
        return dict(table)

    def after_convert(self, onnx_program: Any) -> None:
        """The fixes of the ONNX graph, in place."""
        (apply_fixes,) = _internals("apply_onnx_ir_fixes")
        apply_fixes(onnx_program)
