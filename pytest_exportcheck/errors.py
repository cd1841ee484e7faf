"""Errors, one class per stage: the class of a failure *is* the stage it happened at.

This module is imported by every room and imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .user_files import with_user_files

if TYPE_CHECKING:
    from .spec.nodes import Document

__all__ = [
    "BELOW_NOISE",
    "BLAMELESS",
    "COMPARISON",
    "COMPLEX_OUTPUT",
    "STAGES",
    "TEST",
    "CompareError",
    "ConvertError",
    "CrashError",
    "ExportCheckError",
    "ExportError",
    "HistoryError",
    "LoadError",
    "ObserveError",
    "PatchError",
    "Problem",
    "ResizeError",
    "RunError",
    "SessionError",
    "ShapesError",
    "SpecError",
    "StageTimeoutError",
    "error_class",
]

#: The stages of a case, in the order in which they run.
STAGES = ("load", "observe", "patch", "shapes", "export", "convert", "session", "run", "compare", "resize")

#: Not a stage: what a test of the user demands after the check, when every stage has passed.
TEST = "test"

#: Not a stage either: a comparison of the user's own broke, and judged nothing.
COMPARISON = "comparison"


#: In the facts of a failure: places of tolerances below eager's own noise, if it is due to nothing else.
BELOW_NOISE = "below_noise"

#: The same: outputs that are complex, and right but for that ONNX gives their parts.
COMPLEX_OUTPUT = "complex_output"

#: Facts of failures that no step of an export is to blame for, and why.
BLAMELESS = {
    BELOW_NOISE: "the tolerance is below eager's own noise, and no step of the export is to blame",
    COMPLEX_OUTPUT: "ONNX has no complex outputs, and the parts that it gives are right",
}


class ExportCheckError(Exception):
    """A case failed at a stage.

    Attributes
    ----------
    stage:
        Name of the stage, one of `STAGES`.
    message:
        One line: what happened.
    details:
        Further lines for the reader (tables, diffs, tracebacks), in order.
    facts:
        Plain builtins for the record of the case (for instance a list of output comparisons).
    """

    stage: str = ""

    def __init__(
        self, message: str, *, details: Sequence[str] = (), facts: dict[str, object] | None = None
    ) -> None:
        message = with_user_files(message)
        super().__init__(message)
        self.message = message
        self.details = [with_user_files(line) for line in details]
        self.facts = dict(facts or {})

    @property
    def headline(self) -> str:
        """What failed, and the message."""
        return f"stage {self.stage}: {self.message}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details])


class LoadError(ExportCheckError):
    """The model could not be built or loaded."""

    stage = "load"


class ObserveError(ExportCheckError):
    """A call failed in eager, was not deterministic, or the calls cannot be served by one graph."""

    stage = "observe"


class PatchError(ExportCheckError):
    """A patch mode could not be applied, or changes what the model computes."""

    stage = "patch"


class ShapesError(ExportCheckError):
    """The inferred dynamic shapes differ from the accepted ones."""

    stage = "shapes"


class ExportError(ExportCheckError):
    """The exporter refused the model (capture)."""

    stage = "export"


class ConvertError(ExportCheckError):
    """The captured program could not be converted to the target format."""

    stage = "convert"


class SessionError(ExportCheckError):
    """The runtime could not load the program."""

    stage = "session"


class RunError(ExportCheckError):
    """The runtime failed on a call, or a call cannot be fed to the program."""

    stage = "run"


class CompareError(ExportCheckError):
    """The program's outputs differ from eager's on an observed call."""

    stage = "compare"


class ResizeError(ExportCheckError):
    """The program fails or differs from eager at sizes that no observed call had."""

    stage = "resize"


_CLASSES = {
    cls.stage: cls
    for cls in (
        LoadError,
        ObserveError,
        PatchError,
        ShapesError,
        ExportError,
        ConvertError,
        SessionError,
        RunError,
        CompareError,
        ResizeError,
    )
}


class _AtAnyStage(ExportCheckError):
    """A failure whose class does not tell its stage; no expectation of a stage covers it."""

    def __init__(
        self,
        message: str,
        *,
        stage: str,
        details: Sequence[str] = (),
        facts: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message, details=details, facts=facts)
        self.stage = stage


class CrashError(_AtAnyStage):
    """The process of the case ended, or was ended, before it had a verdict."""


class StageTimeoutError(_AtAnyStage):
    """A stage had not ended when its time was up; the process of the case was killed."""


class HistoryError(_AtAnyStage):
    """The case fails in this process and does not, or elsewhere, in a fresh one."""


class ComparisonError(_AtAnyStage):
    """A comparison of the user's own cannot be loaded, raised, or returned no list: it judged nothing.

    No stage has failed; `stage` is the one that asked for it.
    """

    @property
    def headline(self) -> str:
        return f"{COMPARISON} (at stage {self.stage}): {self.message}"


def error_class(stage: str) -> type[ExportCheckError]:
    """The error class of `stage`; `KeyError` for an unknown name."""
    return _CLASSES[stage]


@dataclass(frozen=True)
class Problem:
    """One problem in a spec file, at 1-based `line` and `column`."""

    path: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.message}"


class SpecError(Exception):
    """A spec file cannot be used. Not a stage: no case exists yet.

    Attributes
    ----------
    problems:
        Every problem of the file, in file order.
    document:
        What was read all the same, for whoever looks for more problems in it.
    """

    def __init__(self, problems: Sequence[Problem], document: Document | None = None) -> None:
        self.problems = list(problems)
        self.document = document
        super().__init__("\n".join(str(problem) for problem in self.problems))
