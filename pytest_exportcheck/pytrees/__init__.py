"""Flattening of caches and other classes, paths of leaves, cloning."""

from __future__ import annotations

from .cloning import clone_tree
from .paths import flatten_with_paths, is_constant
from .registration import (
    FlatteningWarning,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

__all__ = [
    "FlatteningWarning",
    "clone_tree",
    "flatten_with_paths",
    "is_constant",
    "register_class_flattening",
    "register_flattening_functions",
    "unregister_class_flattening",
]
