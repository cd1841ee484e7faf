"""A failure of a spec that every case of it has: shown in full once, in the process that shows it.

The process of a case says what the failure is and how it reads in short; the controller, which alone sees the
reports of all workers, decides which are shown so. The record of each case has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprEntry

from .reports.record import plain_text
from .user_files import with_user_files

__all__ = ["Repeated", "note_repeatable"]

#: Attribute of a report: plain builtins, as everything that travels on one.
_ATTRIBUTE = "exportcheck_repeatable"


def note_repeatable(report: pytest.TestReport, key: str, lines: Sequence[str]) -> None:
    """Say that `report` may be shown in short.

    Parameters
    ----------
    key:
        Equal for equal failures.
    lines:
        What is shown in short, without the place of the failure in full.
    """
    shown = [plain_text(with_user_files(text)) for whole in lines for text in (whole.splitlines() or [""])]
    note = {"key": plain_text(key), "lines": shown}
    setattr(report, _ATTRIBUTE, note)


class Repeated:
    """Registered in the controller only."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Before whoever keeps or writes the text.
        note: dict[str, Any] | None = getattr(report, _ATTRIBUTE, None)
        if note is None:
            return
        first = self._told.setdefault(note["key"], report.nodeid)
        if first != report.nodeid:
            _shorten(report, [note["lines"][0], f"  as above: {first}", *note["lines"][1:]])


def _shorten(report: pytest.TestReport, lines: Sequence[str]) -> None:
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    # There are none with --tb=line.
    if entries and isinstance(entries[-1], ReprEntry):
        entries[-1].lines = [f"E   {line}".rstrip() for line in lines]
