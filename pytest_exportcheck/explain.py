"""What is said about a failure beyond its message: what is known of its kind, and, if asked, a diagnosis.

A diagnosis exports the model again, several times, and leaves traces like any export. It is made in a fresh
process, after the verdict, which it cannot change; one that fails, crashes or hangs costs itself only.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from .diagnose.causes import Cause, causes_of_text
from .errors import BLAMELESS, ComparisonError, ExportCheckError, HistoryError, StageTimeoutError
from .fresh.messages import Explain, Failure, Work
from .reports.artifacts import artifacts_folder

if TYPE_CHECKING:
    from .session import RunningCase, Session

__all__ = ["Explanation", "explain"]

#: Stages whose failures no export has to do with.
_BEFORE = ("load", "observe", "patch", "shapes")


@dataclass(frozen=True)
class Explanation:
    """What is added to the text and to the record of a failure.

    Attributes
    ----------
    causes:
        What is known of such a failure; with a diagnosis they are among its lines.
    diagnosis:
        The lines of a diagnosis, the verdict first; empty if none was asked for.
    record:
        Plain builtins for the record of the case.
    """

    causes: list[Cause] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """Lines for the message itself."""
        return [line for cause in self.causes for line in cause.lines()]


def explain(
    session: Session, running: RunningCase, error: ExportCheckError, *, expected: bool
) -> Explanation:
    """What there is to say about `error`; whatever goes wrong meanwhile is said as well.

    Parameters
    ----------
    expected:
        The spec expects this failure.
    """
    causes = _causes(running, error)
    asked = session.options.diagnose
    if asked != "off":
        error.details = [line for line in error.details if not _HINT.fullmatch(line)]
        causes = [replace(cause, remedy=_without_hint(cause.remedy)) for cause in causes]
    record: dict[str, Any] = {"causes": [cause.to_record() for cause in causes]} if causes else {}
    case = running.planned.case
    if asked == "off" or (expected and asked != "all") or case.exporter is None or error.stage in _BEFORE:
        return Explanation(causes, record=record)
    began = time.perf_counter()
    try:
        verdict, lines, found = _diagnose(session, running, error)
    except (Exception, pytest.fail.Exception) as problem:
        # A time limit of somebody else's is such an outcome; a diagnosis must not end the run.
        verdict = f"not diagnosed: {type(problem).__name__}: {problem}"
        lines, found = [verdict], None
    diagnosis = {"verdict": verdict, **(found or {})}
    if found is None:
        return Explanation(causes, lines, {**record, "diagnosis": diagnosis})
    # It knows more than the message does.
    lines = [_without_hint(line) for line in lines]
    known = [{**cause, "remedy": _without_hint(cause["remedy"])} for cause in found["causes"]]
    diagnosis["causes"] = known
    diagnosis["process_s"] = round(time.perf_counter() - began, 1)
    return Explanation([], lines, {"causes": known, "diagnosis": diagnosis})


#: What proposes a diagnosis: a line of its own, or words in brackets inside a remedy.
_HINT, _HINT_INSIDE = re.compile(r"--diagnose names [^\n]*"), re.compile(r" ?\(--diagnose names [^)]*\)")
#: What says which line makes a constant of a size: a diagnosis has nothing to add to it.
_NAMED_LINE = re.compile(r"became a constant: [^\n]*\([^\n():]+\.py:\d+: ")


def _without_hint(text: str) -> str:
    return _HINT_INSIDE.sub("", text)


def _causes(running: RunningCase, error: ExportCheckError) -> list[Cause]:
    fresh = running.record.get("confirmed") is True or running.record.get("isolated") is True
    text = "\n".join([error.message, *error.details])
    causes = causes_of_text(text, error.stage, running.planned.case.dtype, fresh)
    if _NAMED_LINE.search(text):
        causes = [replace(cause, remedy=_without_hint(cause.remedy)) for cause in causes]
    return causes


_NOT_DIAGNOSED: dict[type[ExportCheckError], str] = {
    HistoryError: "it depends on history",
    StageTimeoutError: "the case would hang again",
    ComparisonError: "the comparison is to blame, and no step of the export",
}


def _diagnose(
    session: Session, running: RunningCase, error: ExportCheckError
) -> tuple[str, list[str], dict[str, Any] | None]:
    """(the verdict, all lines, the record or ``None`` if there is none)."""
    why = next((why for cls, why in _NOT_DIAGNOSED.items() if isinstance(error, cls)), None)
    why = why or next((why for fact, why in BLAMELESS.items() if fact in error.facts), None)
    if why is not None:
        verdict = f"not diagnosed: {why}"
        return verdict, [verdict], None
    planned, options = running.planned, session.options
    folder = artifacts_folder(options.artifacts, planned) if options.artifacts is not None else None
    failure = Failure.of(error, error.stage)
    asked = Explain(failure, options.diagnose_budget, str(folder) if folder is not None else None)
    root = str(session.config.rootpath)
    work = Work(str(planned.spec.path), root, planned.case, share=options.share, explain=asked)
    steps = ["load"]
    outcome = session.fresh.run(work, steps.append, options.stage_limit)
    if outcome.failure is None:
        found = outcome.record["diagnosis"]
        return found["verdict"], outcome.record["lines"], found
    what = outcome.failure
    if outcome.set_up_failed:
        verdict = f"not diagnosed: {what.message}"
    elif what.kind in ("crash", "timeout"):
        verdict = f"not diagnosed: its own process did not survive the step {steps[-1]!r}: {what.message}"
    else:
        verdict = f"not diagnosed: an error of the diagnosis at {steps[-1]!r}: {what.message}"
    return verdict, [verdict, *(f"  {line}" for line in what.details)], None
