"""How files are named in messages, records and node ids."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["relative_text"]


def relative_text(path: Path, root: Path) -> str:
    """`path` from `root` on, with forward slashes; ``../`` for what is beside it (not on another drive)."""
    below = os.path.join(root, "")
    if (text := os.fspath(path)).startswith(below) and os.path.normpath(text) == text:
        return text[len(below) :].replace(os.sep, "/")  # Most are, and `relpath` is slow.
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:
        return Path(path).as_posix()
