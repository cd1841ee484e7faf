"""Running a case: what is checked before it, how its outcome becomes a verdict, a text and a record."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from .collection import SpecFile
from .errors import (
    COMPARISON,
    TEST,
    ComparisonError,
    CrashError,
    ExportCheckError,
    HistoryError,
    ShapesError,
    StageTimeoutError,
    error_class,
)
from .expectations import Expectation, expectation_for
from .explain import Explanation, explain
from .failures import (
    error_lines,
    from_here,
    representation,
    reproduce_command,
    reproduce_line,
    update_command,
)
from .memory import release_failure
from .plugin import session_of
from .repeated import note_repeatable
from .reports.artifacts import keep_artifacts
from .reports.record import DEVICE_NAME, case_record, plain_text, to_plain
from .session import RunningCase
from .user_files import with_user_files

if TYPE_CHECKING:
    from .session import Session
    from .spec import ModelSpec

__all__ = ["CaseRunner", "check_device", "check_requirements"]

_RUNNING: pytest.StashKey[RunningCase] = pytest.StashKey()
_EXPECTED: pytest.StashKey[Expectation] = pytest.StashKey()

#: With more tests before a failure that depends on them, the command to reproduce it names their files.
_MANY_TESTS = 10


def check_requirements(spec: ModelSpec) -> None:
    """Skip the test, visibly, if a distribution that the spec requires is not installed."""
    from .spec import missing_requirements

    missing = missing_requirements(spec)
    if missing:
        pytest.skip(f"requires {', '.join(missing)}: pip install {' '.join(missing)}")


def check_device(config: pytest.Config, device: str) -> None:
    """Skip the test if the machine has no such device, fail it if the device was required.

    With several GPUs each xdist worker gets its own, round robin.
    """
    if device == "cpu":
        return
    import torch

    session = session_of(config)
    if not torch.cuda.is_available():
        if device in session.options.require_devices:
            pytest.fail(f"no CUDA device on this machine, and --require-device {device} was given", False)
        pytest.skip(f"no CUDA device on this machine; --require-device {device} makes this an error")
    torch.cuda.set_device((session.worker or 0) % torch.cuda.device_count())


class CaseRunner:
    """Registered in every process that runs tests."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pytest_collection_finish(self) -> None:
        self._session.note_environment()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        planned = self._session.case_of(item)
        if planned is None:
            # A test of the user's own may count objects, or wait for one to be freed.
            self._session.garbage.bring_back()
            return (yield)
        file, line, _ = item.location
        running = RunningCase(item.nodeid, file, (line or 0) + 1, planned, self._session.markers)
        item.stash[_RUNNING] = self._session.running = running
        running.enter("load")
        self._expect(item, planned.spec, running)
        try:
            return (yield)
        finally:
            self._session.running = None
            if self._session.markers is not None:
                self._session.markers.clear()
            if nextitem is not None and nextitem.getparent(pytest.Module) is not item.getparent(
                pytest.Module
            ):
                # Of the spec that ended, before the next one is loaded. Only now: what the test logged, and
                # with it the arguments of the records, is let go after the fixtures.
                self._session.garbage.after_spec()
            else:
                self._session.garbage.after_case()

    def _expect(self, item: pytest.Item, spec: ModelSpec, running: RunningCase) -> None:
        expected = expectation_for(spec, running.planned.case)
        if expected is None:
            return
        item.stash[_EXPECTED] = expected
        item.add_marker(
            pytest.mark.xfail(raises=error_class(expected.stage), strict=True, reason=expected.reason)
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _RUNNING in item.stash:
            _quiet_torch_trace()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if _RUNNING in item.stash:
            _quiet_torch_trace()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        # After the report and the debugger, before the fixtures end that free the model. What is left of the
        # last test is for `pdb.pm`.
        if _RUNNING in item.stash and nextitem is not None:
            release_failure()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        # Outermost, to see the report after pytest has applied the xfail marks.
        report = yield
        running = item.stash.get(_RUNNING, None)
        if running is None or report.when == "teardown" or (report.when == "setup" and report.passed):
            return report
        if report.passed and not running.checked:
            # A test of the user that only looks at the case, or expects its failure: no verdict on the case.
            return report
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, ExportCheckError):
            running.stage = error.stage
        elif error is not None and running.checked:
            # The check is done: what fails now is a demand of the test, and no stage is to blame.
            running.stage = TEST
        verdict = _verdict(report, running, error)
        explanation = None
        if isinstance(error, ExportCheckError):
            explanation = explain(self._session, running, error, expected=verdict.startswith("xfail"))
            running.record.update(explanation.record)
        _rewrite(item, report, running, error, verdict, explanation)
        record = case_record(running, verdict, _message(report, error), error)
        record |= self._more(item, running, error)
        if diffs := running.record.get("rewritten"):
            # Of a case that failed pytest shows it, of one that passed with -rP.
            report.sections.append(
                ("rewritten", plain_text(with_user_files("\n".join(diffs.values()).rstrip())))
            )
        report.exportcheck = to_plain(record)  # type: ignore[attr-defined]
        # JUnit writes what the test has at its teardown.
        item.user_properties.append(("exportcheck_verdict", verdict))
        explained = verdict.startswith("xfail") and "diagnosis" in running.record
        if explained or verdict.split()[0] in ("fail", "xpass", "crash", "timeout"):
            keep_artifacts(self._session.options.artifacts, report, running)
        return report

    def _more(
        self, item: pytest.Item, running: RunningCase, error: BaseException | None
    ) -> dict[str, object]:
        """What only the pytest side knows: how to run the case again, what was expected, on what it ran."""
        history = running.record.get("history") or {}
        more: dict[str, object] = {
            "seed": running.planned.spec.model.seed,
            "reproduce": reproduce_command(item.config, item.nodeid, _named(history.get("before", []))),
        }
        if isinstance(error, ExportCheckError) and error.details:
            more["details"] = [line for detail in error.details for line in detail.splitlines()]
        if isinstance(error, ShapesError) and item.getparent(SpecFile) is not None:
            more["accept"] = update_command(item.config, item.nodeid)
        expected = item.stash.get(_EXPECTED, None)
        if expected is not None:
            more["expected"] = {
                "stage": expected.stage,
                "reason": expected.reason,
                "line": expected.line,
            }
        if running.planned.case.device != "cpu" and (name := _device_name()) is not None:
            more[DEVICE_NAME] = name
        return more


def _device_name() -> str | None:
    """The GPU of this process, ``None`` without one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return str(cuda.get_device_name()) if cuda is not None and cuda.is_available() else None


def _named(before: list[str]) -> list[str]:
    """The tests to run before one that depends on them: their files, where there are many."""
    return before if len(before) <= _MANY_TESTS else list(dict.fromkeys(id.split("::")[0] for id in before))


def _quiet_torch_trace() -> None:
    """Take pytest's log capture off torch's structured trace.

    pytest 9.2 attaches its handlers to loggers that do not propagate, too. On ``torch.__trace`` the mere
    presence of a handler makes torch compute the trace of every export, and each failure would show dozens of
    empty DEBUG lines.
    """
    logger = logging.getLogger("torch.__trace")
    for handler in list(logger.handlers):
        if type(handler).__module__.startswith("_pytest."):
            logger.removeHandler(handler)


def _verdict(report: pytest.TestReport, running: RunningCase, error: BaseException | None) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail {running.stage}" if report.skipped else "xpass"
    if report.skipped:
        return "skip"
    if report.passed:
        return "pass"
    if error is None:
        return "xpass"
    if isinstance(error, ComparisonError):
        return f"fail {COMPARISON}"
    if isinstance(error, CrashError):
        return f"crash {running.stage}"
    if isinstance(error, StageTimeoutError):
        return f"timeout {running.stage}"
    if isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout"):
        return f"timeout {running.stage}"  # pytest-timeout, signal method.
    return f"fail {running.stage}"


def _message(report: pytest.TestReport, error: BaseException | None) -> str | None:
    if report.passed:
        return None
    if isinstance(error, ExportCheckError):
        return error.message
    if error is not None:
        return f"{type(error).__name__}: {error}" if not report.skipped else str(error)
    return str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))


def _may_be_told_once(report: pytest.TestReport, error: ExportCheckError) -> bool:
    """Whether it is a failure of the spec, which no exporter has to do with: all cases have the same."""
    return report.failed and error.stage in ("load", "observe") and bool(error.details)


def _unexpected(error: ExportCheckError, expected: Expectation, spec_path: str) -> str:
    """Why the expectation of the spec does not cover `error`."""
    where = f"line {expected.line} of {spec_path}"
    if isinstance(error, CrashError | StageTimeoutError):
        return (
            f"{where} expects a failure at {expected.stage}: a crash or a hang is never an expected failure"
        )
    if isinstance(error, HistoryError):
        return f"{where} expects a failure at {expected.stage}: one that depends on history is not expected"
    if isinstance(error, ComparisonError):
        return f"{where} expects a failure at {expected.stage}: a comparison that breaks is never expected"
    return f"moved from {expected.stage} to {error.stage}: change {where}"


def _rewrite(
    item: pytest.Item,
    report: pytest.TestReport,
    running: RunningCase,
    error: BaseException | None,
    verdict: str,
    explanation: Explanation | None,
) -> None:
    """Replace the report's text where ours says more: stage failures, unexpected passes, skips."""
    expected = item.stash.get(_EXPECTED, None)
    spec_path = running.planned.spec.relative
    one_line = item.config.getoption("tbstyle", None) == "line"
    if verdict == "skip":
        if isinstance(report.longrepr, tuple):
            # The place of the skip is the spec, not the line of ours that called pytest.skip.
            report.longrepr = (running.file, running.line, report.longrepr[2])
        return
    if verdict == "xpass" and error is None and expected is not None and report.failed:
        lines = [
            f"[XPASS(strict)] stage {expected.stage} was expected to fail and did not: "
            f"remove line {expected.line} of {spec_path}",
            f"  its reason was: {expected.reason}",
            reproduce_line(item.config, report.nodeid),
        ]
        report.longrepr = representation(spec_path, expected.line, "XPASS", lines, one_line=one_line)
        return
    if not isinstance(error, ExportCheckError):
        return
    verbose = item.config.getoption("verbose", 0) >= 2
    lines = error_lines(error, advice=verbose)
    if explanation is not None:
        lines += explanation.lines
    whole = len(lines)
    if expected is not None and report.failed and not item.config.getoption("runxfail"):
        lines.append(_unexpected(error, expected, spec_path))
    if isinstance(error, ShapesError) and item.getparent(SpecFile) is not None:
        lines.append(f"accept:     {update_command(item.config, report.nodeid)}")
    before = running.record["history"]["before"] if isinstance(error, HistoryError) else []
    lines.append(reproduce_line(item.config, report.nodeid, _named(before)))
    traceback = report.longrepr if verbose else None
    kind = type(error).__name__
    if _may_be_told_once(report, error) and not verbose:
        key = "\n".join([spec_path, error.headline, *error.details])
        note_repeatable(report, key, [error.headline, *lines[whole:]])
    file = from_here(item.config, running.file)
    report.longrepr = shown = representation(file, running.line, kind, lines, traceback, one_line)
    if explanation is not None and explanation.diagnosis and not one_line:
        shown.addsection("diagnosis", plain_text(with_user_files("\n".join(explanation.diagnosis))), "-")
