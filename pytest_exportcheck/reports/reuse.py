"""What was not made again: programs that are those of another patch mode, conversions of earlier runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plurals import counted
from .read import case_key, case_name

__all__ = ["cache_lines", "reuse_lines", "reuse_text"]


def reuse_text(record: Mapping[str, Any]) -> str:
    """``same graph as none``, ``capture: cached``, ``conversion: cached``; ``""`` if everything was made."""
    texts = [f"same graph as {record['same_graph_as']}"] if record.get("same_graph_as") else []
    texts += ["capture: cached"] if record.get("capture") == "cached" else []
    texts += ["conversion: cached"] if record.get("conversion") == "cached" else []
    return ", ".join(texts)


def reuse_lines(records: Sequence[Mapping[str, Any]], every_case: bool) -> Iterator[str]:
    """One line for each kind of reuse with the number of its cases, or one for each case."""
    found: dict[str, list[str]] = {}
    for record in records:
        if text := reuse_text(record):
            found.setdefault(text, []).append(case_name(case_key(record)))
    for text, names in found.items():
        if every_case:
            yield from (f"{text}: {name}" for name in names)
        else:
            yield f"{text}: {counted(len(names), 'case')}"


def cache_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the cache, each thing once."""
    notes = [str(note) for record in records for note in record.get("cache_notes") or ()]
    yield from (f"exportcheck cache: {note}" for note in dict.fromkeys(notes))
