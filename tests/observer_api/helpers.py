"""Calls of a function under an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_exportcheck import InputObserver

__all__ = ["DYNAMIC", "call", "f", "module", "observe", "shapes_of"]

DYNAMIC = torch.export.Dim.DYNAMIC

Call = tuple[tuple[Any, ...], dict[str, Any]]


def f(*shape: int) -> torch.Tensor:
    """Random floats."""
    return torch.rand(shape)


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def module(function: Callable[..., Any]) -> torch.nn.Module:
    """A module whose ``forward`` has the signature of `function`."""
    made: torch.nn.Module = type("Net", (torch.nn.Module,), {"forward": staticmethod(function)})()
    return made


def observe(
    function: Callable[..., Any] | torch.nn.Module,
    *calls: Call,
    value_if_missing: Mapping[Any, Any] | None = None,
    **options: Any,
) -> InputObserver:
    observer = InputObserver(value_if_missing)
    model = function if isinstance(function, torch.nn.Module) else module(function)
    with observer(model, **{"store_n_calls": max(len(calls), 1), **options}):
        for args, kwargs in calls:
            model(*args, **kwargs)
    return observer


def shapes_of(value: Any) -> Any:
    """`value` with the shape of each tensor in its place."""
    return torch.utils._pytree.tree_map(
        lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, value
    )
