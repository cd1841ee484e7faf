"""Which patch modes exist, by name: the façade of `pytest_exportcheck.registry` for this room."""

from __future__ import annotations

from ..registry import PATCH_MODES, load_patch_mode, patch_mode_names, register_patch_mode

__all__ = ["PATCH_MODES", "load_patch_mode", "patch_mode_names", "register", "register_patch_mode"]

register = register_patch_mode
