r"""Text of the path of a leaf, ``cache.layers.0.keys``: keys in, keys out, two leaves never share one.

An index and an integer key are digits, a string key is itself. The rest begins with or holds a backslash:

    a\.b  the key "a.b"      a\\b  the key "a\b"      \1  the key "1"      \e  the key ""
    \:1\.5  the key 1.5, any key that is neither an integer nor a string, by its `repr`
"""

from __future__ import annotations

import ast
import re
from typing import Any

__all__ = ["key_text", "root_of", "split_path", "text_key"]

_NUMBER = re.compile(r"-?[0-9]+")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(".", "\\.")


def key_text(key: Any) -> str:
    """One part of a path: an index, or a key of a mapping."""
    if type(key) is int:
        return str(key)
    if not isinstance(key, str):
        return "\\:" + _escaped(repr(key))
    text = str.__str__(key)
    if not text:
        return "\\e"
    return "\\" + text if _NUMBER.fullmatch(text) else _escaped(text)


def split_path(path: str) -> list[str]:
    """The parts of a path; joined by dots they are the path again, whatever it holds."""
    parts = [""]
    rest = iter(path)
    for char in rest:
        if char == ".":
            parts.append("")
        else:
            parts[-1] += char + (next(rest, "") if char == "\\" else "")
    return parts


def root_of(path: str) -> str:
    """The first part of a path: the name of an argument."""
    return split_path(path)[0] if "\\" in path else path.partition(".")[0]


def text_key(part: str) -> Any:
    """The inverse of `key_text`; the text itself for a key whose `repr` is no literal."""
    if _NUMBER.fullmatch(part):
        return int(part)
    if part == "\\e":
        return ""
    if part.startswith("\\:"):
        text = _unescaped(part[2:])
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return _unescaped(part)


def _unescaped(part: str) -> str:
    return re.sub(r"\\(.?)", r"\1", part, flags=re.DOTALL)
