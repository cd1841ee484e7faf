"""Recording what a model is called with, and inferring shapes, symbols and export arguments from it."""

from __future__ import annotations

from .dynamic import dynamic_shapes_for, symbol_label
from .infer import infer_shapes
from .observer import (
    InferenceError,
    InputCandidate,
    InputObserver,
    InputObserverInfo,
    ObserverWarning,
    RecordedCall,
)
from .resize import ExportExample, choose_example, other_sizes, resize_arguments, sizes_from_spec
from .shapes import ConstantLeaf, GraphShapes, TensorLeaf
from .signature import CallSignature

__all__ = [
    "CallSignature",
    "ConstantLeaf",
    "ExportExample",
    "GraphShapes",
    "InferenceError",
    "InputCandidate",
    "InputObserver",
    "InputObserverInfo",
    "ObserverWarning",
    "RecordedCall",
    "TensorLeaf",
    "choose_example",
    "dynamic_shapes_for",
    "infer_shapes",
    "other_sizes",
    "resize_arguments",
    "sizes_from_spec",
    "symbol_label",
]
