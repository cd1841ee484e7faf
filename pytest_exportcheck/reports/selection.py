"""Why a run lacks a case that another one has, as far as its report tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Filter", "Shards", "merged_selection"]

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


class Shards:
    """Runs of parts, together.

    Parameters
    ----------
    environments:
        By the name of the report.
    ran:
        Records of all cases that one of them ran.
    """

    def __init__(
        self, environments: Mapping[str, Mapping[str, Any]], ran: Iterable[Mapping[str, Any]]
    ) -> None:
        self._environments = environments
        self._ran = {_case(record) for record in ran}

    def left_out(self) -> str | None:
        """Why cases may be missing from all together; ``None``: every one ran.

        What one shard leaves out, another may have run: only what nobody ran is missing.
        """
        reasons = {name: self._missing(environment) for name, environment in self._environments.items()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason) or None

    def _missing(self, environment: Mapping[str, Any]) -> str | None:
        reason = environment.get("left_out")
        selection = environment.get("selection")
        if not reason or not isinstance(selection, Mapping):
            # Of an older report it is not known which cases were deselected: those of the others, mostly.
            return None if not reason or reason.endswith(" deselected") else str(reason)
        if selection.get("unfinished") or not _is_chosen(reason):
            return str(reason)
        if not {_case(each) for each in selection.get("deselected") or ()} <= self._ran:
            return str(reason)
        files = {path.partition("::")[0] for path in selection.get("paths") or ()}
        if _knows_all(environment) or all(map(self._is_collected, files)):
            return None
        return str(reason)

    def _is_collected(self, file: str) -> bool:
        """Whether a shard collected the folder of `file`, and so knows of every case there."""
        return any(
            _holds(path, file)
            for environment in self._environments.values()
            if _knows_all(environment)
            for path in environment["selection"].get("paths") or ["."]
            if path != file
        )

    def selection(self) -> dict[str, Any] | None:
        """The selection of all together: of a full run there is nothing that was narrowed."""
        found = merged_selection(list(self._environments.values()))
        whole = self.left_out() is None and found is not None and not found["deselected"]
        return {**found, "options": []} if found is not None and whole else found


#: What a user chose on the command line; beside it are runs that ended early, and errors.
_CHOSEN = re.compile(
    r"-k|-m|--(?:deselect|lf|sw|ignore|ignore-glob|exporter|patch-mode|export-device|export-dtype)|"
    r"\d+ deselected|an axis is restricted|a node id on the command line|a file is named, and not its folder"
)


def _is_chosen(reason: str) -> bool:
    return _CHOSEN.fullmatch(reason) is not None


def _knows_all(environment: Mapping[str, Any]) -> bool:
    """Whether every case below its paths was collected, be it run or deselected."""
    selection = environment.get("selection")
    if not isinstance(selection, Mapping) or selection.get("unfinished"):
        return False
    if any(str(option).split()[0] in _OF_FILES for option in selection.get("options") or ()):
        return False
    named = ("a node id on the command line", "a file is named, and not its folder")
    paths = [str(path) for path in selection.get("paths") or ()]
    files = any("::" in path or path.endswith((".yaml", ".yml", ".py")) for path in paths)
    return environment.get("left_out") not in named and not files


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
