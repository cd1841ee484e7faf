"""What is written at the end of a run, also of an interrupted one, and the comparison with an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .goldens import write_atomically
from .reports.compare import Comparison, compare
from .reports.json_report import environment, report_data, write_data
from .reports.markdown import markdown
from .reports.read import Report, ReportError, read_report
from .reports.record import DEVICE_NAME

if TYPE_CHECKING:
    from .options import Options

__all__ = ["RunReports"]

#: What GitHub takes of one step; more and it shows nothing.
_STEP_SUMMARY_BYTES = 1024 * 1024


class RunReports:
    """Made before the run, so that a baseline that cannot be read ends it at once.

    Attributes
    ----------
    written:
        What was written -> its path, in order.
    comparison:
        With the baseline, once the run has ended.
    """

    def __init__(self, options: Options, arguments: Sequence[str]) -> None:
        self._options = options
        self._arguments = arguments
        self._began = time.time()
        self._gpus: set[str] = set()
        self._seeds: set[int] = set()
        self.written: dict[str, Path] = {}
        self.comparison: Comparison | None = None
        self._baseline = _baseline(options.baseline)

    def note(self, record: dict[str, Any]) -> None:
        """Take out of a record what is said once for the whole run."""
        name = record.pop(DEVICE_NAME, None)
        if name is not None:
            self._gpus.add(name)
        if "seed" in record:
            self._seeds.add(record["seed"])

    def write(
        self,
        records: Sequence[Mapping[str, Any]],
        exit_status: int,
        left_out: str | None,
        selection: Mapping[str, Any],
        errors: list[str],
    ) -> None:
        """Write what was asked for; what could not be done is added to `errors`, the rest is done."""
        options = self._options
        data = report_data({**self._environment(exit_status, left_out), "selection": selection}, records)
        if self._baseline is not None:
            report = Report("this run", data["environment"], data["cases"])
            self.comparison = compare(self._baseline, report)
            if (moved := self.comparison.moved()) is not None:
                errors.append(
                    f"--baseline {self._baseline.name} has {moved[0]}, this run has {moved[1]}, and they "
                    "have no case in common: specs are named from pytest's rootdir, see --rootdir "
                    "(paths behind a space move it: write --exportcheck-report=PATH)"
                )
            elif not self.comparison.compared and not selection.get("unfinished"):
                errors.append(
                    f"--baseline {self._baseline.name} has no case in common with this run: "
                    "nothing was compared"
                )

        def attempt(what: str, path: Path | None, write: Callable[[Path], None]) -> None:
            if path is None:
                return
            try:
                write(path)
            except Exception as error:
                # One that fails must not cost the others.
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                errors.append(f"{what} {path} not written: {reason}")
            else:
                self.written[what] = path

        attempt("report", options.report, lambda path: write_data(path, data))
        attempt(
            "markdown",
            options.markdown,
            lambda path: write_atomically(path, markdown(records, errors, left_out=left_out)),
        )
        if records and options.step_summary is not None:
            attempt(
                "step summary",
                options.step_summary,
                lambda path: _append_summary(path, records, errors, left_out),
            )
            self.written.pop("step summary", None)
        attempt("html", options.html, lambda path: _write_html(path, data))

    def _environment(self, exit_status: int, left_out: str | None) -> dict[str, Any]:
        options = self._options
        began = datetime.fromtimestamp(self._began, timezone.utc)
        return {
            **environment(self._arguments),
            "gpus": sorted(self._gpus),
            "seeds": sorted(self._seeds),
            "options": {
                "update": options.update,
                "exporters": list(options.exporters),
                "patch_modes": list(options.patch_modes),
                "devices": list(options.devices),
                "dtypes": list(options.dtypes),
                "require_devices": list(options.require_devices),
                "share": options.share,
                "cache": options.cache is not None,
                "confirm": options.confirm,
                "isolate": options.isolate,
                "stage_limit": options.stage_limit,
            },
            "started": began.isoformat(timespec="seconds"),
            "seconds": round(time.time() - self._began, 3),
            "exit_status": int(exit_status),
            "left_out": left_out,
        }


def _baseline(path: Path | None) -> Report | None:
    if path is None:
        return None
    try:
        return read_report(path)
    except ReportError as error:
        raise pytest.UsageError(f"--baseline: {error}") from None


def _append_summary(
    path: Path, records: Sequence[Mapping[str, Any]], notes: Sequence[str], left_out: str | None
) -> None:
    with open(path, "ab") as file:
        file.write(markdown(records, notes, _STEP_SUMMARY_BYTES - file.tell(), left_out).encode())


def _write_html(path: Path, data: Mapping[str, Any]) -> None:
    from .reports.html import html_page

    write_atomically(path, html_page(data))
