"""How many cases and shapes checks ended how: counted alike in a run, of merged shards, of an old report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..plurals import counted
from .matrix import cell_text, counts, is_case

__all__ = ["cases_text", "is_absent", "shapes_text"]


def is_absent(record: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong but that no shapes were accepted yet."""
    return not is_case(record) and record["verdict"] == "fail shapes" and record.get("golden_exists") is False


def cases_text(records: Sequence[Mapping[str, Any]]) -> str:
    """``3 cases: 2 pass, 1 FAIL``; empty without a case."""
    cases = [record for record in records if is_case(record)]
    return f"{counted(len(cases), 'case')}: {counts(cases)}" if cases else ""


def shapes_text(records: Sequence[Mapping[str, Any]], obsolete: int = 0) -> str:
    """``shapes: 11 ok, 1 missing``; empty without a shapes check."""
    found = Counter(_outcome(record) for record in records if not is_case(record))
    if obsolete:
        found["obsolete"] = obsolete
    order = ("ok", "updated", "missing", "FAIL")
    kinds = [*(kind for kind in order if kind in found), *(kind for kind in found if kind not in order)]
    return f"shapes: {', '.join(f'{found[kind]} {kind}' for kind in kinds)}" if found else ""


def _outcome(record: Mapping[str, Any]) -> str:
    verdict = str(record["verdict"].split()[0])
    if verdict == "pass":
        return "updated" if (record.get("golden") or {}).get("changed") else "ok"
    return "missing" if is_absent(record) else cell_text(verdict)
