"""``exportcheck diagnose``: a spec's cases, checked as pytest checks them, and every failure explained.

Run through pytest, without its own output: conftest files register exporters, expectations hold, and each
diagnosis has a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from .cli_common import Wrong
from .plurals import counted

if TYPE_CHECKING:
    from .spec import ModelSpec

__all__ = ["run_diagnose"]


def run_diagnose(path: Path, case: str | None, budget_s: float, output: Path | None) -> int:
    """Exit status: 0 if no case fails but as expected, 1 if one does, 2 for what cannot be run.

    Raises
    ------
    click.ClickException
        The spec cannot be used, or has no such case.
    """
    spec = _spec(path)
    node = f"{path}::test_export" + (f"[{_label(spec, case)}]" if case else "")
    arguments = [
        node,
        "--exportcheck",
        "--diagnose-all",
        f"--diagnose-budget={budget_s:g}",
        # The user's own options are about whole runs.
        "--override-ini=addopts=",
        "--override-ini=exportcheck_report=",
        "--override-ini=exportcheck_artifacts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
    ]
    if output is not None:
        arguments.append(f"--exportcheck-artifacts={output}")
    printer = _Printer()
    status = pytest.main(arguments, plugins=[printer])
    if printer.cases:
        failed = f"{printer.failed} failed" if printer.failed else "none failed"
        cases = counted(printer.cases, "case")
        kept = f", see {output}" if output is not None and printer.failed else ""
        click.echo(f"{cases}, {failed}{kept}", err=True)
    return {pytest.ExitCode.OK: 0, pytest.ExitCode.TESTS_FAILED: 1}.get(pytest.ExitCode(status), 2)


def _spec(path: Path) -> ModelSpec:
    from .errors import SpecError
    from .spec import load_spec

    try:
        return load_spec(path.resolve(), Path.cwd())
    except SpecError as error:
        raise Wrong("; ".join(map(str, error.problems))) from None


def _label(spec: ModelSpec, wanted: str) -> str:
    """The bracketed part of the node id that `wanted` is, or contains."""
    from .plan import export_cases
    from .spec.names import suggest

    labels = [case.label() for case in export_cases(spec)]
    label = wanted.partition("[")[2].removesuffix("]") if "[" in wanted else wanted
    if label not in labels:
        raise Wrong(f"no case {label!r}{suggest(label, labels)}; cases: {', '.join(labels)}")
    return label


class _Printer:
    """Prints each case as it ends.

    Attributes
    ----------
    cases, failed:
        How many ended, and how many of them failed, expected failures among them.
    """

    def __init__(self) -> None:
        self.cases = 0
        self.failed = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            click.echo(report.longreprtext, err=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, "exportcheck", None)
        if record is None:
            return
        self.cases += 1
        verdict = record["verdict"]
        click.echo(f"{record['nodeid'].partition('[')[2].removesuffix(']')}: {verdict}")
        if verdict.split()[0] in ("fail", "xfail", "crash", "timeout", "xpass"):
            self.failed += verdict != "xpass"
            click.echo(f"{report.longreprtext}\n")
        elif verdict == "skip":
            click.echo(f"  {record['message']}")
