"""What a patch mode may know of the graph that it is applied to, for modes that are made for one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Observed"]


@dataclass(frozen=True, eq=False)
class Observed:
    """A graph with its observed calls.

    Attributes
    ----------
    module:
        What is exported: the model, or a submodule.
    run:
        Runs every observed call in eager on copies of its arguments; the results, in order.
    export:
        `torch.export.export` of the graph, non-strict, with its dynamic shapes.
    target:
        The exporter's target: ``torch``, ``onnx``, ``torchscript``.
    """

    module: torch.nn.Module
    run: Callable[[], list[Any]]
    export: Callable[[], Any]
    target: str
