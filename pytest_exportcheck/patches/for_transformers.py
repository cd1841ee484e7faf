"""Our patches of transformers, of every reason."""

from __future__ import annotations

import sys
from typing import Any

from .ours.data_tests import data_test_patches
from .ours.experts import experts_patches
from .ours.funnel import funnel_patches
from .ours.rope import rope_patches
from .ours.scans import scan_patches
from .ours.sliding_window import sliding_window_patches
from .ours.states import state_patches
from .ours.vision import vision_patches
from .patch import LOADED, Patch

__all__ = ["transformers_patches"]

_SOURCES = (
    rope_patches,
    experts_patches,
    sliding_window_patches,
    vision_patches,
    data_test_patches,
    state_patches,
    funnel_patches,
    scan_patches,
)


def transformers_patches(model: Any, target: str) -> list[Patch]:
    """The patches for `model`; none for a model of a process that has not imported transformers."""
    if model is not None and model is not LOADED and "transformers" not in sys.modules:
        return []
    return [patch for source in _SOURCES for patch in source(model, target)]
