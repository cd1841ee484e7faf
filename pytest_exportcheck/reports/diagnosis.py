"""What a record says of the cause of its failure, for the pages that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["error_profile", "guilty_line", "rungs"]


def guilty_line(record: Mapping[str, Any]) -> str | None:
    """The one line that names the guilty step; ``None`` if there is no diagnosis."""
    found = _of(record)
    line = found.get("guilty") or found.get("verdict")
    return str(line) if line else None


def rungs(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The steps that were compared with eager, in their order."""
    found = _of(record)
    steps = found.get("rungs") or (found.get("ladder") or {}).get("rungs") or ()
    return [step for step in steps if isinstance(step, dict)]


def error_profile(record: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(node, error of its value, error of its own), in the order of the graph."""
    found = _of(record)
    profile = found.get("profile") or (found.get("nodes") or {}).get("profile") or ()
    return [(str(entry[0]), entry[1], entry[2]) for entry in profile if len(entry) == 3]


def _of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("diagnosis")
    return found if isinstance(found, dict) else {}
