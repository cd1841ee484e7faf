"""Is this file a spec? Answered without YAML, since it is asked of every YAML file in a test tree."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["SHAPES_FOLDER", "is_spec_file"]

#: Folder of the goldens (accepted dynamic shapes). They are YAML too, but never specs.
SHAPES_FOLDER = "__shapes__"

#: A long licence header may stand in front of the first key.
_HEAD = 16 * 1024

_KEY = re.compile(rb"""^(?:\xef\xbb\xbf)?["']?exportcheck["']?[ \t]*:(?=[ \t\r\n]|\Z)""", re.MULTILINE)


def is_spec_file(path: Path) -> bool:
    """Whether `path` is a YAML file with a top-level ``exportcheck:`` line near its beginning.

    False for whatever cannot be read: only `load_spec`, called on a file that somebody named, tells why.
    """
    path = Path(path)
    if path.suffix.lower() not in (".yaml", ".yml") or SHAPES_FOLDER in path.parts[:-1]:
        return False
    try:
        if not path.is_file():  # a FIFO would block
            return False
        with path.open("rb") as stream:
            return _KEY.search(stream.read(_HEAD)) is not None
    except OSError:
        return False
