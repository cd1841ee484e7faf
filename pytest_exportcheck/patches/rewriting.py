"""Where rewritten methods come from: the package `patches.rewrite`, which is found when it is there."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import PatchError
from .patch import Patch

__all__ = ["has_rewriting", "rewrite_package", "rewritten"]


_NAME = f"{__package__}.rewrite"


def has_rewriting() -> bool:
    """Whether this installation can rewrite methods."""
    return find_spec(_NAME) is not None


def rewrite_package() -> Any:
    """`patches.rewrite`; `PatchError` where this installation has none."""
    if not has_rewriting():
        raise PatchError("this version of pytest-exportcheck cannot rewrite methods (no patches.rewrite)")
    return import_module(_NAME)


def rewritten(model: Any) -> list[Patch]:
    """The rewritten methods of the classes of `model`, as patches: ``patches.rewrite.patches_for(model)``."""
    found: list[Patch] = rewrite_package().patches_for(model)
    return found
