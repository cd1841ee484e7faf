"""What a model decides by sizes, for a program whose exporter has no symbols to read comparisons in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from ..noise import quietly
from ..observe import GraphShapes
from ..observe.targets import Target
from .base import dynamic_arguments, flat_forward, plain_copy

__all__ = ["see_comparisons"]


def see_comparisons(target: Target, arguments: Mapping[str, Any], shapes: GraphShapes) -> None:
    """Capture a copy of the target for the `CaptureWatch` that is active, and drop what was captured.

    A refusal is no matter, nor what torch prints of it: what was compared before it was seen.
    """
    with contextlib.suppress(Exception), quietly(), torch.no_grad():
        # Weights are shared; what a trace leaves in attributes and buffers stays in the copy.
        module = plain_copy(target.module, {id(each): each for each in target.module.parameters()})
        oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with oblivious, flat_forward(module, target.method, target.signature, arguments) as kwargs:
            torch.export.export(
                module,
                (),
                kwargs=kwargs,
                dynamic_shapes=dynamic_arguments(kwargs, shapes),
                strict=False,
            )
