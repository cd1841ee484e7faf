"""Sizes that were not judged, for eager refuses them or no memory holds them: somebody should know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["memory_lines", "refusal_lines"]


def refusal_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per spec and graph: how many sizes eager refuses, and the first refusal.

    Cases of several exporters try much the same sizes: each is counted once.
    """
    for name, refusals in _by_spec(records, "refused_by_eager"):
        yield f"{name}: eager refuses {_count(refusals)}, not judged: {refusals[0]}"


def memory_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per spec and graph: for how many sizes there was no memory, and the first of them."""
    for name, short in _by_spec(records, "no_memory"):
        yield f"no memory: {name}: {_count(short)}, not judged: {short[0]}"


def _by_spec(records: Sequence[Mapping[str, Any]], field: str) -> Iterator[tuple[str, list[str]]]:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        resize = record.get("resize")
        lines = resize.get(field) if isinstance(resize, Mapping) else None
        if lines and isinstance(lines, list):
            key = (str(record["spec"]), str(record.get("graph") or ""))
            found.setdefault(key, {}).update(dict.fromkeys(map(str, lines)))
    for (spec, graph), lines in found.items():
        yield f"{spec}{f' ({graph})' if graph else ''}", list(lines)


def _count(refusals: Sequence[str]) -> str:
    return "a size" if len(refusals) == 1 else f"{len(refusals)} sizes"
