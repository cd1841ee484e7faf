"""What a record says of the cause of its failure, for the pages that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["causes", "culprits", "error_profile", "first_node", "guilty_line", "left_over", "rungs"]

#: What the pages show by itself; other tools may add more.
_SHOWN = frozenset(
    (
        *("verdict", "guilty", "stage", "message", "rungs", "ladder", "node", "line", "nodes", "profile"),
        *("pieces", "culprits", "causes", "reproduction", "notes", "seconds", "process_s"),
    )
)


def guilty_line(record: Mapping[str, Any]) -> str | None:
    """The one line that names the guilty step; ``None`` if there is no diagnosis."""
    found = _of(record)
    line = found.get("guilty") or found.get("verdict")
    return str(line) if line else None


def rungs(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The steps that were compared with eager, in their order."""
    found = _of(record)
    steps = found.get("rungs") or _part(found, "ladder").get("rungs") or ()
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list | tuple) else []


def error_profile(record: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(node, error of its value, error of its own), in the order of the graph."""
    found = _of(record)
    profile = found.get("profile") or _part(found, "nodes").get("profile") or ()
    return [(str(entry[0]), entry[1], entry[2]) for entry in profile if len(entry) == 3]


def first_node(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first node whose value is wrong, with ``kind`` (``jump`` or ``drift``) and how far was looked."""
    nodes = _part(_of(record), "nodes")
    first = _part(nodes, "first")
    if not first:
        return None
    return {**{key: nodes.get(key) for key in ("kind", "kernel", "compared", "nodes", "note")}, **first}


def culprits(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The smallest submodules that fail."""
    found = _of(record)
    named = found.get("culprits") or _part(found, "pieces").get("culprits") or ()
    return [each for each in named if isinstance(each, dict)] if isinstance(named, list | tuple) else []


def causes(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Known causes that the failure looks like: of its diagnosis, else of its message."""
    found = _of(record).get("causes") or record.get("causes") or ()
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list | tuple) else []


def left_over(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a diagnosis has beside what the pages show: of another tool, or of a later version."""
    return {key: item for key, item in _of(record).items() if key not in _SHOWN and item not in (None, "")}


def _of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return _part(record, "diagnosis")


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = whole.get(key)
    return found if isinstance(found, dict) else {}
