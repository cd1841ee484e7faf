"""The nested ``dynamic_shapes`` that `torch.export.export` and `torch.onnx.export` take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from ..dims import DimExpr
from ..pytrees.paths import render_path
from .shapes import GraphShapes, TensorLeaf

__all__ = ["dynamic_shapes_for", "symbol_label"]


def symbol_label(dim: DimExpr) -> str:
    """An identifier for a dimension, as ONNX names it: ``past_plus_seq`` for ``past + seq``."""
    return re.sub(r"\W+", "_", str(dim).replace("+", "plus").replace("-", "minus"))


def dynamic_shapes_for(
    value: Any,
    shapes: GraphShapes,
    path: str,
    leaf: Callable[[DimExpr], Any] = lambda dim: torch.export.Dim.DYNAMIC,
) -> Any:
    """Dynamic shapes of one argument, in the containers torch.export expects for it.

    A tensor gives ``{axis: leaf(expression)}`` for its dynamic axes, a constant ``None``; dicts, lists and
    tuples keep their type; a class registered as a pytree node gives the list of its children.
    """
    found = shapes.leaves.get(path)
    if isinstance(found, TensorLeaf):
        return {axis: leaf(dim) for axis, dim in found.dynamic.items()}
    if isinstance(value, torch.Tensor):
        return {}
    kind = type(value)
    if kind not in _pytree.SUPPORTED_NODES and not _pytree.is_namedtuple_instance(value):
        return None
    pairs, spec = _pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    children = [dynamic_shapes_for(child, shapes, render_path(keys, path), leaf) for keys, child in pairs]
    if kind in _pytree.BUILTIN_TYPES or _pytree.is_namedtuple_instance(value):
        return _pytree.tree_unflatten(children, spec)
    return children
