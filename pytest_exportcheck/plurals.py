"""Numbers of things, in words."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 case``, ``2 cases``; of a noun that takes no ``s`` its plural is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
