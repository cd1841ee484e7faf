"""Why a run lacks a case that another one has, as far as its report tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Filter", "merged_selection"]

#: Options with which files are not even collected, so that nobody knows of their cases.
_OF_FILES = ("--lf", "--ignore", "--ignore-glob")
_CASE = ("spec", "exporter", "patch_mode", "device", "dtype", "graph")


class Filter:
    """What the run of an environment left out.

    Of a report without a selection (an older one) all that is known is that cases may be missing.
    """

    def __init__(self, environment: Mapping[str, Any]) -> None:
        selection = environment.get("selection")
        self._selection: Mapping[str, Any] = selection if isinstance(selection, Mapping) else {}
        self._rest = (self._selection or {"unfinished": environment.get("left_out")}).get("unfinished")
        self._deselected = {_case(each) for each in self._selection.get("deselected") or ()}

    def why(self, record: Mapping[str, Any]) -> str | None:
        """Why the case of `record`, of another run, was not run; ``None`` if no filter left it out."""
        options = self._selection.get("options") or []
        if _case(record) in self._deselected:
            return f"deselected by {', '.join(options)}" if options else "deselected"
        file = str(record.get("nodeid") or record["spec"]).partition("::")[0]
        paths = self._selection.get("paths") or ["."]
        if not any(_holds(path, file) for path in paths):
            return f"not among {', '.join(paths)}"
        of_files = [option for option in options if option.split()[0] in _OF_FILES]
        return of_files[0] if of_files else self._rest


def _case(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(field) for field in _CASE)


def _holds(path: str, file: str) -> bool:
    """Whether a run of `path` runs every test of `file`: of a node id it runs that one alone."""
    if "::" in path:
        return False
    return path in (".", file) or file.startswith(f"{path.rstrip('/')}/")


def merged_selection(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The selection of shards together; ``None`` where one has none.

    What each of the others ran is deselected in a shard. It counts as left out where every shard left it out
    and was told to by its user: else a shard is missing, and what it should have run is lost.
    """
    selections = [environment.get("selection") for environment in environments]
    if not all(isinstance(selection, Mapping) for selection in selections):
        return None
    known: list[Mapping[str, Any]] = [selection for selection in selections if selection is not None]
    first, *others = ({_case(case): case for case in each.get("deselected") or ()} for each in known)
    everywhere = [case for key, case in first.items() if all(key in other for other in others)]
    reasons = [selection["unfinished"] for selection in known if selection.get("unfinished")]
    return {
        "paths": _union(known, "paths"),
        "options": _union(known, "options"),
        "deselected": everywhere if all(selection.get("options") for selection in known) else [],
        "unfinished": "; ".join(dict.fromkeys(reasons)) or None,
    }


def _union(selections: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    return list(dict.fromkeys(each for selection in selections for each in selection.get(field) or ()))
