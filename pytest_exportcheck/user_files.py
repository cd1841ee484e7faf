"""Files of the user's as modules: their private names, and what people are shown instead.

A file that a spec names is imported under a name with a digest of its path, so that the ``factory.py`` of two
specs are two modules. Nobody wrote that name: messages, diffs, goldens and reports name the file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

__all__ = ["module_name_of", "with_user_files"]

_PREFIX, _DIGITS = "_exportcheck_", 12

#: The name of a file may have hyphens and dots in it.
_NAME = re.compile(
    rf"{_PREFIX}((?:(?!{_PREFIX})[^\s'\"`/:])+?)_[0-9a-f]{{{_DIGITS}}}(?![0-9a-zA-Z_])([.:](?=\w))?"
)


def module_name_of(path: Path) -> str:
    """The name under which the file at `path` is imported."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:_DIGITS]
    return f"{_PREFIX}{path.stem}_{digest}"


def with_user_files(text: str) -> str:
    """`text` with files in the place of their modules: ``net.py``, ``net.py:Net.forward``."""
    return _NAME.sub(_shown, text) if _PREFIX in text else text


def _shown(match: re.Match[str]) -> str:
    return f"{match[1]}.py{':' if match[2] else ''}"
