"""One case, or one shapes check, from the model to the verdict: the same here and in a fresh process."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import ExportCheckError, ObserveError, ShapesError, error_class
from ..lazy import large_imports
from ..memory import StagePeaks
from .messages import Work

if TYPE_CHECKING:
    from ..pipeline import SpecRun

__all__ = ["foreign_exits", "perform", "perform_afresh"]


def perform(
    work: Work, run: Callable[[], SpecRun], enter: Callable[[str], None], record: dict[str, Any]
) -> None:
    """Do `work` with the models and observations of `run`; the record gets the memory of each stage.

    Raises
    ------
    ExportCheckError
        The subclass of the stage that failed.
    """
    stage = "load"
    peaks = StagePeaks(record)

    def entered(name: str) -> None:
        nonlocal stage
        stage = name
        peaks.enter(name)
        enter(name)

    entered("load")
    try:
        with foreign_exits(lambda: stage):
            _perform(work, run, entered, record)
    finally:
        peaks.stop()


def _perform(
    work: Work, run: Callable[[], SpecRun], enter: Callable[[str], None], record: dict[str, Any]
) -> None:
    with large_imports():
        from ..pipeline import check_shapes, facts_of, run_case
    if work.case.exporter is not None:
        run_case(run(), work.case, enter, record)
        return
    observation = run().observe(work.case.device, work.case.dtype, enter=enter)
    enter("shapes")
    record.update(facts_of(observation, work.golden))
    record["golden_exists"] = work.golden is not None
    try:
        check_shapes(observation, work.golden, work.golden_name)
    except ShapesError:
        try:
            record["proposed_golden"] = observation.golden_text(work.golden_name)
        except ObserveError as broken:
            # The difference is the verdict; why no golden can be written is for those who want one.
            record["golden_refused"] = {"message": broken.message, "details": broken.details}
        raise


def perform_afresh(work: Work, enter: Callable[[str], None], record: dict[str, Any]) -> None:
    """Do `work` from the spec file on: judge the case, explain its failure, or say what its patches do.

    Of an ablation the record is what `ablation.ablate` returns.
    """
    enter("load")
    from ..pipeline import SpecRun
    from ..spec import load_spec

    run = SpecRun(load_spec(Path(work.spec), Path(work.root)), work.share)
    if work.explain is not None:
        _explain(work, run, enter, record)
        return
    if work.ablate:
        from ..ablation import ablate, one_thread

        with one_thread():
            record.update(ablate(run, work.case, enter, work.limit))
        return
    perform(work, lambda: run, enter, record)


def _explain(work: Work, run: SpecRun, enter: Callable[[str], None], record: dict[str, Any]) -> None:
    """Fill the record with the diagnosis of a failure, and with its text."""
    from ..diagnose.diagnosis import diagnose_case

    assert work.explain is not None
    error = work.explain.failure.exception()
    assert isinstance(error, ExportCheckError)
    with foreign_exits(lambda: "load"):
        kept = work.explain.reproduction
        found = diagnose_case(
            run,
            work.case,
            error,
            work.explain.budget_s,
            begin=enter,
            fresh=True,
            reproduction=Path(kept) if kept is not None else None,
        )
    record["diagnosis"] = found.to_record()
    record["lines"] = found.lines()


@contextmanager
def foreign_exits(stage: Callable[[], str]) -> Iterator[None]:
    """Turn what would end or hide the test, raised by foreign code, into a failure of the current stage.

    An exporter that calls `sys.exit`, or a model that raises a skip, must neither stop the run nor turn its
    failure into a skip.
    """
    try:
        yield
    except ExportCheckError:
        raise
    except SystemExit as error:
        raise error_class(stage())(f"sys.exit({error.code!r}) was called") from error
    except (
        pytest.skip.Exception,
        pytest.xfail.Exception,
        pytest.exit.Exception,
        unittest.SkipTest,
    ) as error:
        raise error_class(stage())(f"{type(error).__name__} was raised: {error}") from error
