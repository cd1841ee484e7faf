"""What a run was asked for: paths, options that narrow them, and the cases that these left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .filepaths import relative_text

__all__ = ["NARROWING", "Selection"]

#: Options of pytest that leave tests of the given paths out -> how they are written.
NARROWING = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "lf": "--lf",
    "stepwise": "--sw",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "exportcheck_exporter": "--exporter",
    "exportcheck_patch_mode": "--patch-mode",
    "exportcheck_device": "--export-device",
    "exportcheck_dtype": "--export-dtype",
}


class Selection:
    """Kept by the controller; the cases come from the tests that were deselected, in whichever process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._deselected: dict[tuple[Any, ...], dict[str, Any]] = {}

    def leave_out(self, cases: Iterable[Mapping[str, Any]]) -> None:
        """Note cases, as `case_fields` gives them, that were collected and are not run."""
        for case in cases:
            self._deselected.setdefault(tuple(case.values()), dict(case))

    def facts(self, unfinished: str | None) -> dict[str, Any]:
        """For the environment of a report."""
        here, root = self._config.invocation_params.dir, self._config.rootpath
        paths = []
        for argument in self._config.args:
            path, separator, rest = argument.partition("::")
            paths.append(relative_text(Path(here, path), root) + separator + rest)
        return {
            "paths": paths,
            "options": [
                f"{shown} {_text(value)}".rstrip()
                for option, shown in NARROWING.items()
                if (value := self._config.getoption(option, None))
            ],
            "deselected": [self._deselected[key] for key in sorted(self._deselected, key=str)],
            "unfinished": unfinished,
        }


def _text(value: Any) -> str:
    if value is True:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else f"{value}"
