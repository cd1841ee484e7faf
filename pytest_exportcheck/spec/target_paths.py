"""How `observe.target` names what is observed: ``model.vision_tower``, ``encoder:encode``, ``:encode``."""

from __future__ import annotations

import re

__all__ = ["is_target", "split_target"]

_TARGET = re.compile(r"([^\s.:]+(\.[^\s.:]+)*)?(:[A-Za-z_][A-Za-z0-9_]*)?\Z")


def is_target(text: str) -> bool:
    """Whether `text` is the path of a submodule, with or without a method."""
    return bool(text) and _TARGET.match(text) is not None


def split_target(text: str) -> tuple[str, str]:
    """(path of the submodule, ``""`` for the model itself; method)."""
    path, _, method = text.partition(":")
    return path, method or "forward"
