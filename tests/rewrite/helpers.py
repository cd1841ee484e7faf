"""One case in a dtype, and the comparison of a rewritten model's program with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.patches.rewrite import Rewriting, rewrite_for_export
from pytest_exportcheck.pipeline import SpecRun, run_case

from .forms import NEGATIVE, POSITIVE

__all__ = ["differences", "rewriting_of", "verdict"]

ROWS = ({0: torch.export.Dim.DYNAMIC},)


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


def rewriting_of(model: torch.nn.Module) -> tuple[Rewriting, list[torch.export.ExportedProgram]]:
    """The model rewritten from two observed calls, positive and negative; its program, if it exports then."""
    programs = []

    def export() -> None:
        programs.append(torch.export.export(model, (POSITIVE.clone(),), dynamic_shapes=ROWS, strict=False))

    calls = [((NEGATIVE.clone(),), {})]
    return rewrite_for_export(model, (POSITIVE.clone(),), calls=calls, export=export), programs


def differences(
    eager: torch.nn.Module, program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]
) -> list[str]:
    """Where a program differs from a model that nothing was run on: results, changed inputs, buffers,
    errors.
    """
    module = program.module()
    found = []
    for position, x in enumerate(inputs):
        expected, got = (_outcome(one, x) for one in (eager, module))
        if isinstance(expected, Exception) or isinstance(got, Exception):
            if not (isinstance(expected, Exception) and isinstance(got, Exception)):
                found.append(f"input {position}: {expected!r}, {got!r}")
            continue
        for a, b in zip(expected, got, strict=True):
            a, b = torch.as_tensor(a), torch.as_tensor(b)
            if a.shape != b.shape or not torch.allclose(a.double(), b.double(), atol=1e-5, equal_nan=True):
                found.append(f"input {position}: {a}, {b}")
    return found


def _outcome(model: torch.nn.Module, x: torch.Tensor) -> list[Any] | Exception:
    x = x.clone()
    try:
        with torch.no_grad():
            result = model(x)
    except Exception as error:
        return error
    total = getattr(model, "total", None)
    return [*_pytree.tree_leaves(result), x, *([] if total is None else [total.clone()])]
