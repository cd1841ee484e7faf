"""The controller's side: collects the records, writes goldens and reports once, shows the matrix.

Registered in the process that the user started, with or without xdist. Records and golden proposals arrive on
test reports, the only thing of a worker that survives its death.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .failures import from_here
from .filepaths import relative_text
from .goldens import Proposals, obsolete_goldens
from .plurals import counted
from .reports.ablation import ablation_lines
from .reports.comparison import as_text
from .reports.diagnoses import diagnosis_lines
from .reports.json_report import package_versions
from .reports.matrix import Matrix, is_case
from .reports.record import case_fields, sort_key
from .reports.refusals import memory_lines, refusal_lines
from .reports.reuse import cache_lines, reuse_lines
from .reports.rounding import rounding_lines
from .reports.slowest import slowest_lines
from .reports.terminal import matrix_lines
from .reports.totals import cases_text, shapes_text
from .run_reports import RunReports
from .selection import NARROWING, Selection

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Controller"]

_DURATIONS = "exportcheck/durations"
_MAXFAIL = "-x/--maxfail"
_FILE = "a file is named, and not its folder"
_HEADER_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")


class Controller:
    """Registered in the controller only.

    Attributes
    ----------
    records:
        One per test about a case, as it arrived.
    proposals:
        The golden files that cells want changed.
    partial:
        Why the run is not a full one, ``None`` if it is.
    written, pruned, obsolete:
        Golden files, relative to the root directory.
    errors:
        What could not be done at the end; makes the run fail.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._config = session.config
        self.records: list[dict[str, Any]] = []
        self.proposals = Proposals()
        self.partial: str | None = _partial_selection(session.config)
        self.written: list[str] = []
        self.pruned: list[str] = []
        self.obsolete: list[str] = []
        self.errors: list[str] = []
        self._seconds: dict[str, list[float]] = {}
        self._reports = RunReports(session.options, session.config.invocation_params.args)
        self.selection = Selection(session.config)
        self._announced = False
        self._planned = 0
        self._interrupted = False
        # For the terminal: a named file has all its cases, and an interruption is in the totals.
        self._missing: str | None = None
        self._red_by_baseline = False
        if session.options.prune and self.partial:
            raise pytest.UsageError(
                f"--prune-shapes needs a full run, and this one is partial: {self.partial}"
            )

    # Collecting.

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        if items:
            self.note_partial(f"{len(items)} deselected")
            planned = filter(None, map(self._session.case_of, items))
            self.selection.leave_out(case_fields(each.case) for each in planned)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note_partial("collection errors")

    def note_partial(self, why: str) -> None:
        """Something was left out, so nothing can be said of what was not seen."""
        self.partial = self.partial or why

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spec_path = report.nodeid.split("::")[0]
        if spec_path.endswith((".yaml", ".yml")):
            seconds = self._seconds.setdefault(spec_path, [0.0, 0])
            seconds[0] += report.duration
            seconds[1] += report.when == "call"
        record: dict[str, Any] | None = getattr(report, "exportcheck", None)
        if record is None:
            return
        golden = record.get("golden")
        if golden:
            self.proposals.add(golden, f"{record['spec']}[{record['device']}-{record['dtype']}]")
        self._reports.note(record)
        self.records.append(record)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, object] | None:
        golden = (getattr(report, "exportcheck", None) or {}).get("golden")
        if golden and golden["changed"] and report.passed:
            return "golden updated", "U", ("GOLDEN UPDATED", {"yellow": True})
        return None

    # Before the run.

    def pytest_report_header(self) -> str | None:
        if not self._session.options.flag:
            return None
        versions = ", ".join(f"{name} {found}" for name, found in package_versions(_HEADER_PACKAGES).items())
        chosen = getattr(self._config.option, "exportcheck_chosen_dist", None)
        dist = f"; --dist {chosen} (one worker per spec; your own --dist wins)" if chosen else ""
        isolated = "; a process for each case (--isolate)" if self._session.options.isolate else ""
        return f"exportcheck: {versions}{dist}{isolated}"

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str | None:
        cases = [planned.case for item in items if (planned := self._session.case_of(item))]
        if not cases:
            return None
        exports = [case for case in cases if case.exporter is not None]
        axes = [
            ", ".join(dict.fromkeys(str(getattr(case, axis)) for case in exports))
            for axis in ("exporter", "patch_mode", "device")
        ]
        shown = f" ({' x '.join(axes)})" if exports else ""
        specs = len({case.spec for case in cases})
        return f"exportcheck: {counted(specs, 'spec')}, {counted(len(exports), 'case')}{shown}"

    def announce_collection(self, nodeids: Sequence[str]) -> None:
        """What `pytest_report_collectionfinish` says, under xdist, where the items are in the workers."""
        ours = [nodeid for nodeid in nodeids if nodeid.split("::")[0].endswith((".yaml", ".yml"))]
        cases = [nodeid for nodeid in ours if "::test_export[" in nodeid]
        self._planned = max(self._planned, len(cases))
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if self._announced or not ours or terminal is None or self._config.getoption("verbose") < 0:
            return
        self._announced = True
        specs = {nodeid.split("::")[0] for nodeid in ours}
        terminal.write_line(f"exportcheck: {counted(len(specs), 'spec')}, {counted(len(cases), 'case')}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        # Not earlier: a collection that is interrupted knows some of the cases only.
        found = [planned.case for item in session.items if (planned := self._session.case_of(item))]
        self._planned = max(self._planned, sum(case.exporter is not None for case in found))

    # The end.

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._config.getoption("collectonly"):
            return
        options = self._session.options
        self.records.sort(key=sort_key)
        interrupted = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self._interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if options.update:
            self.written, errors = self.proposals.write(self._config.rootpath)
            self.errors += errors
        if options.flag and not interrupted:
            self._find_obsolete(session)
        if not interrupted:
            self._remember_durations()
        left_out, unfinished = self._left_out(session, exitstatus)
        self._missing = None if left_out == _FILE or self._interrupted else left_out
        self._reports.write(self.records, exitstatus, left_out, self.selection.facts(unfinished), self.errors)
        comparison = self._reports.comparison
        worse = comparison is not None and comparison.worse
        # Worse than the baseline is worse than "no tests ran", which it may well be because of.
        if (self.errors or worse) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._red_by_baseline = worse and not self.errors

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # After pytest's own last line, which counts passed tests only.
        comparison = self._reports.comparison
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if self._red_by_baseline and comparison is not None and terminal is not None:
            worse = counted(len({change.case for change in comparison.of("worse")}), "case")
            terminal.write_line(
                f"exportcheck: no test failed; the run fails as --baseline {comparison.before} demands: "
                f"{worse} got worse",
                red=True,
            )

    def _left_out(self, session: pytest.Session, exitstatus: int) -> tuple[str | None, str | None]:
        """(Why cases may be missing from the records, why the run ended early); ``None``: it is not so."""
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            return ("interrupted",) * 2
        if exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            return ("internal error",) * 2
        stopped = session.shouldstop or session.shouldfail
        # -x that stopped nothing left nothing out.
        partial = None if self.partial == _MAXFAIL and not stopped else self.partial
        early = str(stopped) if stopped else None
        return partial or early, early

    def _find_obsolete(self, session: pytest.Session) -> None:
        root = self._config.rootpath
        folders = {(root / record["spec"]).parent.resolve() for record in self.records}
        for argument in self._config.args:
            path = Path(self._config.invocation_params.dir, argument.split("::")[0])
            if path.is_dir():
                folders.add(path.resolve())
        stopped = session.shouldstop or session.shouldfail
        for golden in obsolete_goldens(folders):
            shown = relative_text(golden, root)
            if not self._session.options.prune or self.partial or stopped:
                self.obsolete.append(shown)
                continue
            try:
                golden.unlink()
            except OSError as error:
                self.errors.append(f"{shown} not deleted: {error.strerror or error}")
            else:
                self.pruned.append(shown)

    def _remember_durations(self) -> None:
        cache = getattr(self._config, "cache", None)
        if cache is None or not self._seconds:
            return
        known = self.stored_durations()
        for spec, (seconds, tests) in self._seconds.items():
            # A run of some of a spec's tests says little about the whole.
            if tests and tests >= known.get(spec, [0.0, 0])[1]:
                known[spec] = [round(seconds, 3), tests]
        cache.set(_DURATIONS, known)

    def stored_durations(self) -> dict[str, list[float]]:
        """Spec path -> [seconds, tests], from earlier runs."""
        cache = getattr(self._config, "cache", None)
        stored = cache.get(_DURATIONS, {}) if cache is not None else {}
        return stored if isinstance(stored, dict) else {}

    def remembered(self) -> dict[str, float]:
        """Spec path -> seconds, from earlier runs."""
        return {spec: float(entry[0]) for spec, entry in self.stored_durations().items()}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("collectonly"):
            return
        comparison = self._reports.comparison
        written = self._reports.written
        if not (self.records or self.errors or self.obsolete or self.pruned or comparison or written):
            return
        terminal, verbose = terminalreporter, self._config.getoption("verbose")
        for error in self.errors:
            terminal.write_line(f"exportcheck: ERROR {error}", red=True)
        if verbose < -1 or self._config.getoption("no_summary", False):
            if comparison is not None and comparison.worse:
                # The exit status must not be a riddle.
                terminal.write_line(
                    f"exportcheck: {len(comparison.of('worse'))} worse than {comparison.before}",
                    red=True,
                )
            return
        if verbose >= 0:
            terminal.write_sep("=", "exportcheck")
            width = self._config.get_terminal_writer().fullwidth
            for line in matrix_lines(Matrix.of(self.records), width, every_row=verbose > 0):
                for piece in line:
                    terminal.write(piece.text, **({piece.colour: True} if piece.colour else {}))
                terminal.write_line("")
        if verbose > 0:
            for refusal in refusal_lines(self.records):
                terminal.write_line(refusal)
        if verbose >= 0:
            for short in memory_lines(self.records):
                terminal.write_line(short)
            for slow in slowest_lines(self.records):
                terminal.write_line(slow)
            for rounding in rounding_lines(self.records, every_case=verbose > 0):
                terminal.write_line(rounding)
            for diagnosis in diagnosis_lines(self.records):
                terminal.write_line(diagnosis)
        terminal.write_line("   ".join(self._totals()))
        if self._missing:
            terminal.write_line(f"not a full run: {self._missing}")
        for worth in ablation_lines(self.records):
            terminal.write_line(worth)
        for reused in (*reuse_lines(self.records, verbose > 0), *cache_lines(self.records)):
            terminal.write_line(reused)
        for what, paths in (
            ("updated", self.written),
            ("deleted", self.pruned),
            ("obsolete (--prune-shapes deletes them)", self.obsolete),
        ):
            for path in paths:
                terminal.write_line(f"{what}: {from_here(self._config, path)}")
        if self._session.options.prune and self.partial:
            terminal.write_line(f"nothing deleted: not a full run ({self.partial})")
        if comparison is not None:
            terminal.write_sep("-", "compared with the baseline")
            for text in as_text(comparison).splitlines():
                terminal.write_line(text, red=text.startswith("Got worse"))

    def _totals(self) -> list[str]:
        skipped = [record for record in self.records if is_case(record) and record["verdict"] == "skip"]
        why = " (no cuda)" if skipped and all("no CUDA" in str(r["message"]) for r in skipped) else ""
        totals = [self._how_far()] if self._interrupted else []
        totals += [f"{text}{why}"] if (text := cases_text(self.records)) else []
        shapes = shapes_text(self.records, len(self.obsolete))
        totals += [shapes] if shapes else []
        totals = totals or ["no case ran"]
        here = self._config.invocation_params.dir
        return totals + [
            f"{what}: {relative_text(path, here)}" for what, path in self._reports.written.items()
        ]

    def _how_far(self) -> str:
        ended = len({record["nodeid"] for record in self.records if is_case(record)})
        if self._planned < max(ended, 1):
            # While collecting; or workers have cases that are in no file of a spec.
            return "interrupted"
        return f"interrupted: {ended} of {counted(self._planned, 'case')} ended"


def _partial_selection(config: pytest.Config) -> str | None:
    """What on the command line leaves tests out, ``None`` if nothing does."""
    ours = [option for option in NARROWING if option.startswith("exportcheck_")]
    for option, shown in {**NARROWING, "maxfail": _MAXFAIL}.items():
        if option not in ours and config.getoption(option, None):
            return shown
    if any("::" in argument for argument in config.args):
        return "a node id on the command line"
    if any(Path(config.invocation_params.dir, argument).is_file() for argument in config.args):
        return _FILE
    if any(config.getoption(option) for option in ours):
        return "an axis is restricted"
    return None
