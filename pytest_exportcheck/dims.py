"""One dimension of a tensor: a size, or a sum of symbols (``past + seq``). Text in, text out, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DimExpr", "parse_dim"]

_TERM = re.compile(r"\s*([+-]?)\s*([A-Za-z_]\w*|\d+)\s*")


@dataclass(frozen=True)
class DimExpr:
    """``sum of terms + offset``; each term is ``(symbol, +1 or -1)``."""

    terms: tuple[tuple[str, int], ...]
    offset: int = 0

    @classmethod
    def symbol(cls, name: str) -> DimExpr:
        """The expression of one symbol."""
        return cls(((name, 1),))

    @property
    def names(self) -> tuple[str, ...]:
        """Symbols in the expression."""
        return tuple(name for name, _ in self.terms)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The size for given symbol sizes; `KeyError` for a symbol without one."""
        return sum(sign * sizes[name] for name, sign in self.terms) + self.offset

    def __str__(self) -> str:
        text = ""
        for name, sign in self.terms:
            text += (" + " if sign > 0 else " - ") + name if text else ("" if sign > 0 else "-") + name
        if self.offset or not text:
            text += f" {'+' if self.offset > 0 else '-'} {abs(self.offset)}" if text else str(self.offset)
        return text


def parse_dim(text: str) -> int | DimExpr:
    """Parse ``4``, ``batch``, ``past + seq`` or ``seq - 1``.

    Raises
    ------
    ValueError
        `text` is none of these.
    """
    position, terms, offset = 0, [], 0
    while position < len(text) or not position:
        match = _TERM.match(text, position)
        if match is None or not match.group(0) or (position and not match.group(1)):
            raise ValueError(
                f"not a dimension: {text!r} (expected a size, a name, or a sum such as 'past + seq')"
            )
        sign = -1 if match.group(1) == "-" else 1
        if match.group(2).isdigit():
            offset += sign * int(match.group(2))
        else:
            terms.append((match.group(2), sign))
        position = match.end()
    return DimExpr(tuple(terms), offset) if terms else offset
