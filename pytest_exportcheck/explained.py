"""What is added to the failure of a case: what sizes decided, what the exporter noted, what may cure it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, cast

from .cases import CaseId
from .checks.captured import CapturedProgram
from .checks.compare import Tolerances
from .checks.frozen import Dims, dims_text, frozen_axes, frozen_in_program, lead_with_axes
from .checks.numbers import Leaves, _run, blame_stand_ins
from .checks.padded import mask_lines
from .errors import BLAMELESS, CompareError, ConvertError, ExportCheckError, ResizeError, RunError
from .exporters.base import Exported, Exporter, target_of
from .exporters.captures import UnusableCapture
from .exporters.guards import CaptureWatch
from .exporters.registry import load_exporter
from .foreign_errors import refusal
from .observe.observation import GraphObservation
from .patches.cures import cure_lines
from .plurals import counted
from .runtimes.base import Session
from .spec import ModelSpec
from .spec_run import OWN

__all__ = [
    "explained_by",
    "explained_by_capture",
    "explained_by_captured",
    "explained_by_masks",
    "fail_if_frozen",
    "name_cures",
]

#: ``model.py:12``, in a note of an exporter.
_PLACE = re.compile(r"\S+\.py:\d+")


def name_cures(failure: ExportCheckError, case: CaseId) -> None:
    """Add which patch mode replaces the code that the failure names, if one of ours does."""
    if failure.stage in ("load", "observe", "patch", "shapes") or case.patch_mode in (None, OWN):
        return
    with contextlib.suppress(Exception):
        # A word more must not cost the failure.
        texts = [failure.message, *failure.details]
        failure.details += cure_lines(
            texts, str(case.patch_mode), target_of(cast(Exporter, load_exporter(str(case.exporter))))
        )


@contextlib.contextmanager
def explained_by_capture(
    exporter: Exporter,
    graph: GraphObservation,
    tolerances: Tolerances,
    watch: CaptureWatch,
    captured: CapturedProgram,
) -> Iterator[None]:
    """A failure of an export says what sizes decided; an exception is a refusal, with the axes that froze."""
    try:
        yield
    except UnusableCapture:
        raise
    except ExportCheckError as error:
        if captured.differs:
            blame_stand_ins(graph, tolerances)
            if not BLAMELESS.keys() & error.facts.keys():
                error.details += captured.by_masks()
            error.details += captured.decided(watch.comparisons(graph.shapes))
        raise
    except (Exception, SystemExit) as error:
        failure = refusal(error, "export", f"{exporter.name} refuses the model")
        lead_with_axes(failure, frozen_axes(graph.shapes, watch.frozen()))
        raise failure from error


@contextlib.contextmanager
def explained_by_captured(captured: CapturedProgram) -> Iterator[None]:
    """A failure on observed calls says whether the captured program agrees, unless no program is to blame."""
    try:
        yield
    except (RunError, CompareError) as error:
        if not BLAMELESS.keys() & error.facts.keys():
            error.details += captured.on_observed_calls()
        raise


@contextlib.contextmanager
def explained_by_masks(
    spec: ModelSpec, graph: GraphObservation, session: Session, tolerances: Tolerances
) -> Iterator[None]:
    """A failure on observed calls says whether a mask decides which of them fail."""
    try:
        yield
    except CompareError as error:
        if not BLAMELESS.keys() & error.facts.keys():

            def answer(arguments: dict[str, Any]) -> Leaves:
                return _run(session, arguments, "a call", RunError).outputs

            error.details += mask_lines(spec, graph, tolerances, answer)
        raise


@contextlib.contextmanager
def explained_by(exported: Exported) -> Iterator[None]:
    """A failure of the program says what its exporter noted, unless it names all these lines already."""
    try:
        yield
    except (ConvertError, RunError, CompareError, ResizeError) as error:
        said = "\n".join([error.message, *error.details])
        places = [_PLACE.search(note) for note in exported.notes]
        if not all(place is not None and place[0] in said for place in places):
            error.details += exported.notes
        raise


def fail_if_frozen(
    dims: Dims,
    graph: GraphObservation,
    watch: CaptureWatch,
    error: type[ExportCheckError],
    record: dict[str, Any],
) -> None:
    """Raises `error` if dynamic axes became constant, with what made them so."""
    record["exported_shapes"] = dims_text(dims)
    record["specialised"] = frozen = frozen_in_program(dims, graph.shapes, watch.frozen())
    if frozen:
        raise error(f"{counted(len(frozen), 'dynamic axis', 'dynamic axes')} became constant", details=frozen)
