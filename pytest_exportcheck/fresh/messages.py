"""What a pytest process and the processes of its cases say to each other: one JSON document a line.

Plain builtins only, so that a reply that was cut off, or that says nonsense, is recognised and does no harm.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from ..cases import CaseId
from ..errors import (
    ComparisonError,
    CrashError,
    ExportCheckError,
    HistoryError,
    StageTimeoutError,
    error_class,
)
from ..reports.record import to_plain

__all__ = [
    "LOST_CLIENT",
    "Explain",
    "Failure",
    "UnexpectedError",
    "Work",
    "apply_warning_filters",
    "decode",
    "encode",
    "lines_of",
    "warning_filters",
    "write_all",
]

#: Exit status of a process that could not send its result.
LOST_CLIENT = 70


class UnexpectedError(Exception):
    """Something that is no failure of a stage was raised in the process of a case; the text is all of it."""


@dataclass(frozen=True)
class Work:
    """What a process is asked to do.

    Attributes
    ----------
    spec, root:
        Absolute paths of the spec file and of pytest's root directory.
    case:
        The case; without an exporter it is the shapes check of the spec.
    golden, golden_name:
        For the shapes check: the accepted text (``None``: there is none), and how messages name its file.
    share:
        What never changes is made once per process.
    ablate, limit:
        The case is not to be judged, but its patches; ``limit``: seconds that a stage may take.
    explain:
        The case is not judged, its failure is explained.
    """

    spec: str
    root: str
    case: CaseId
    golden: str | None = None
    golden_name: str = ""
    share: bool = True
    ablate: bool = False
    limit: float | None = None
    explain: Explain | None = None

    def to_plain(self) -> dict[str, Any]:
        """As a message carries it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Work:
        """Back from `to_plain`."""
        explain = data.get("explain")
        return cls(
            **{
                **data,
                "case": CaseId(**data["case"]),
                "explain": Explain(**{**explain, "failure": Failure.from_plain(explain["failure"])})
                if explain
                else None,
            }
        )


@dataclass(frozen=True)
class Explain:
    """What is to be explained, and how.

    Attributes
    ----------
    failure:
        As it was reported.
    budget_s:
        Seconds after which no new step begins.
    reproduction:
        Folder for a script that reproduces the failure; ``None``: none is wanted.
    """

    failure: Failure
    budget_s: float
    reproduction: str | None = None


@dataclass(frozen=True)
class Failure:
    """How a case failed.

    Attributes
    ----------
    kind:
        ``fail`` (a stage failed), ``crash``, ``timeout``, or ``error`` (an exception that is no failure of a
        stage: a defect of ours).
    stage:
        The stage that failed, or in which the process was.
    error:
        Name of the exception's class.
    message, details, facts:
        See `ExportCheckError`.
    """

    kind: str
    stage: str
    error: str
    message: str
    details: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, stage: str) -> Failure:
        """The failure that `error` is; `stage` is where the case was."""
        name = type(error).__name__
        if isinstance(error, ExportCheckError):
            lost = {"CrashError": "crash", "StageTimeoutError": "timeout"}
            return cls(
                lost.get(name, "fail"),
                error.stage,
                name,
                error.message,
                tuple(error.details),
                to_plain(error.facts),
            )
        return cls("error", stage, name, f"{name}: {error}")

    def exception(self) -> Exception:
        """The same as an exception to raise."""
        if self.kind == "error":
            return UnexpectedError("\n".join([self.message, *self.details]))
        for cls in (CrashError, StageTimeoutError, HistoryError, ComparisonError):
            if self.error == cls.__name__:
                return cls(self.message, stage=self.stage, details=self.details, facts=self.facts)
        return error_class(self.stage)(self.message, details=self.details, facts=self.facts)

    def to_plain(self) -> dict[str, Any]:
        """As a message carries it."""
        return {**asdict(self), "details": list(self.details)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Failure:
        """Back from `to_plain`."""
        return cls(**{**data, "details": tuple(data["details"])})


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as one line. ``nan`` and ``inf`` stay numbers, lone surrogates are escaped."""
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of a line, ``None`` if it is none: the process died while it wrote."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything; `OSError` if the other side is gone."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def lines_of(descriptor: int) -> Iterator[bytes]:
    """The lines that arrive, each as soon as it is complete; ends when the other side closes."""
    rest: list[bytes] = []
    while block := os.read(descriptor, 1 << 16):
        *complete, last = block.split(b"\n")
        for line in complete:
            yield b"".join([*rest, line])
            rest = []
        rest.append(last)


def warning_filters() -> list[list[Any]]:
    """The warning filters in force, as plain values: one that makes warnings errors is part of a verdict."""
    filters: list[Any] = list(warnings.filters)
    return [
        [action, _pattern(text), f"{category.__module__}:{category.__qualname__}", _pattern(module), line]
        for action, text, category, module, line in filters
    ]


def _pattern(compiled: Any) -> str:
    return compiled.pattern if isinstance(compiled, re.Pattern) else str(compiled or "")


def apply_warning_filters(filters: list[list[Any]]) -> None:
    """Put the filters of `warning_filters` into force. One whose category cannot be imported is left out."""
    warnings.resetwarnings()
    for action, text, category, module, line in filters:
        name, _, path = category.partition(":")
        try:
            found: Any = import_module(name)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        warnings.filterwarnings(action, text, found, module, line, append=True)
