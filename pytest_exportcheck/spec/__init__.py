"""What to check: YAML -> `ModelSpec`; the model, its inputs and calls built from it.

Reading a spec needs yaml and pydantic, building from it torch and transformers. Each name below is resolved
on first use, so that neither is imported before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import importer
from .discover import SHAPES_FOLDER, is_spec_file, mistyped_key

_PUBLIC = {
    "ModelSpec": "model",
    "ObservedTarget": "target_paths",
    "load_spec": "load",
    "parse_spec": "load",
    "CallSpec": "values",
    "Previous": "values",
    "TensorSpec": "tensors",
    "TensorSyntaxError": "tensors",
    "parse_tensor": "tensors",
    "missing_requirements": "requirements",
    "build_model": "build",
    "CallPlan": "plans",
    "build_calls": "plans",
    "resolve_tensor": "fill",
}

__all__ = [
    "SHAPES_FOLDER",
    "CallPlan",
    "CallSpec",
    "ModelSpec",
    "ObservedTarget",
    "Previous",
    "TensorSpec",
    "TensorSyntaxError",
    "build_calls",
    "build_model",
    "is_spec_file",
    "load_spec",
    "missing_requirements",
    "mistyped_key",
    "parse_spec",
    "parse_tensor",
    "resolve_tensor",
]

if TYPE_CHECKING:
    from .build import build_model
    from .fill import resolve_tensor
    from .load import load_spec, parse_spec
    from .model import ModelSpec
    from .plans import CallPlan, build_calls
    from .requirements import missing_requirements
    from .target_paths import ObservedTarget
    from .tensors import TensorSpec, TensorSyntaxError, parse_tensor
    from .values import CallSpec, Previous


__getattr__ = importer(__name__, _PUBLIC)
