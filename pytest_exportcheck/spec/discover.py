"""Is this file a spec, or meant to be one? Without YAML: it is asked of every YAML file in a test tree."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["SHAPES_FOLDER", "is_spec_file", "mistyped_key"]

#: Folder of the goldens (accepted dynamic shapes). They are YAML too, but never specs.
SHAPES_FOLDER = "__shapes__"

#: A long licence header may stand in front of the first key.
_HEAD = 16 * 1024

_KEY = re.compile(rb"""^(?:\xef\xbb\xbf)?["']?exportcheck["']?[ \t]*:(?=[ \t\r\n]|\Z)""", re.MULTILINE)

#: The first line that says something, if it begins with a key.
_FIRST_KEY = re.compile(rb"""(?:\xef\xbb\xbf)?(?:(?:[#%].*|---.*|[ \t]*)\r?\n)*["']?([\w -]+?)["']?[ \t]*:""")


def is_spec_file(path: Path) -> bool:
    """Whether `path` is a YAML file with a top-level ``exportcheck:`` line near its beginning.

    False for whatever cannot be read: only `load_spec`, called on a file that somebody named, tells why.
    """
    return _KEY.search(_head(path)) is not None


def mistyped_key(path: Path) -> str | None:
    """The first key of a YAML file that is no spec, if it looks like ``exportcheck`` (``exportchek: 1``)."""
    head = _head(path)
    first = _FIRST_KEY.match(head)
    if first is None or _KEY.search(head):
        return None
    key = first[1].decode("utf-8", "replace")
    from .names import is_typo

    return key if is_typo(key, ["exportcheck"]) else None


def _head(path: Path) -> bytes:
    """The beginning of a YAML file that may be a spec, empty if it is none or cannot be read."""
    path = Path(path)
    if path.suffix.lower() not in (".yaml", ".yml") or SHAPES_FOLDER in path.parts[:-1]:
        return b""
    try:
        if not path.is_file():  # a FIFO would block
            return b""
        with path.open("rb") as stream:
            return stream.read(_HEAD)
    except OSError:
        return b""
