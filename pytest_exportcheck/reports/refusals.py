"""Sizes that eager refused: nobody is blamed, and somebody should know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["refusal_lines"]


def refusal_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per spec and graph: how many sizes eager refuses, and the first refusal.

    Cases of several exporters try much the same sizes: each is counted once.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        refused = (record.get("resize") or {}).get("refused_by_eager") or []
        if refused:
            key = (str(record["spec"]), str(record.get("graph") or ""))
            found.setdefault(key, {}).update(dict.fromkeys(map(str, refused)))
    for (spec, graph), refusals in found.items():
        first = next(iter(refusals))
        count = "a size" if len(refusals) == 1 else f"{len(refusals)} sizes"
        yield f"{spec}{f' ({graph})' if graph else ''}: eager refuses {count}, not judged: {first}"
