"""One case in a dtype, and a rewritten model as a program."""

from __future__ import annotations

from typing import Any

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.pipeline import SpecRun, run_case

__all__ = ["verdict"]


def verdict(
    run: SpecRun, exporter: str, mode: str, dtype: str = "float32"
) -> tuple[str, ExportCheckError | None, dict[str, Any]]:
    """(``pass`` or the stage that failed, the failure, the record) of one case on the CPU."""
    record: dict[str, Any] = {}
    try:
        run_case(run, CaseId(run.spec.relative, exporter, mode, "cpu", dtype), lambda stage: None, record)
    except ExportCheckError as error:
        return error.stage, error, record
    return "pass", None, record
