"""The steps of the ladder as values: what each gave, and what all of them say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checks.compare import LeafComparison
from ..errors import ExportCheckError
from ..exporters.base import Exported
from ..exporters.broken_guards import BrokenGuard
from .subject import Sample

__all__ = ["Ladder", "Rung", "innermost", "kind_of", "rung_of"]

#: How torch begins what it says of a guard that does not hold.
_GUARD = "Guard failed: "


@dataclass(frozen=True)
class Rung:
    """One step of the ladder on the inputs of the sample.

    Attributes
    ----------
    name:
        ``capture``, ``conversion``, ``onnxruntime ENABLE_BASIC``, ...
    status:
        ``ok``; ``differs`` from eager; ``fails``: the step or its program raised; ``not run``.
    max_abs, max_rel:
        Over all float outputs; ``None`` if there are no numbers.
    worst:
        Path of the output with the largest error.
    note:
        The error, or why it was not run.
    """

    name: str
    status: str
    max_abs: float | None = None
    max_rel: float | None = None
    worst: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether the step is where eager and the program part."""
        return self.status in ("differs", "fails")

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {**vars(self), "seconds": round(self.seconds, 3)}


@dataclass
class Ladder:
    """What the steps gave.

    Attributes
    ----------
    sample:
        Label of the inputs.
    guilty:
        Name of the guilty step, empty if none was found.
    verdict, workaround:
        One line each.
    captured, decomposed, plain, final:
        The programs in between, for those who look further; ``None`` if a step was not reached.
    error:
        What the guilty step raised, if it did.
    broken:
        Conditions on sizes that the captured program demands and the inputs do not meet. Where it refuses
        them they are why; a program without guards may do without.
    """

    sample: str = ""
    rungs: list[Rung] = field(default_factory=list)
    guilty: str = ""
    what: str = ""
    workaround: str = ""
    inputs: Sample | None = None
    captured: torch.export.ExportedProgram | None = None
    decomposed: torch.export.ExportedProgram | None = None
    plain: Exported | None = None
    final: Exported | None = None
    error: BaseException | None = None
    broken: list[BrokenGuard] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether the captured program refuses the inputs, by conditions that are known."""
        return bool(self.broken) and _GUARD in str(self.error)

    @property
    def verdict(self) -> str:
        """``guilty: onnxruntime graph optimization (level ENABLE_EXTENDED); workaround: ...``."""
        if not self.guilty:
            return self.what or "not reproduced: every step agrees with eager"
        return f"guilty: {self.what}" + (f"; workaround: {self.workaround}" if self.workaround else "")

    def lines(self) -> list[str]:
        """The verdict, and a table of the steps."""
        rows: list[tuple[str, ...]] = [("step", "max abs", "max rel", "", "")]
        for rung in self.rungs:
            number = [f"{v:.1e}" if v is not None else "" for v in (rung.max_abs, rung.max_rel)]
            rows.append((rung.name, *number, rung.status, rung.note or rung.worst))
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        table = [
            "  " + "  ".join([*(c.ljust(w) for c, w in zip(row[:4], widths, strict=True)), row[4]]).rstrip()
            for row in rows
        ]
        return [self.verdict, f"on {self.sample}:" if self.sample else "before any input was run:", *table]

    def to_record(self) -> dict[str, Any]:
        """Plain builtins."""
        return {
            "sample": self.sample,
            "guilty": self.guilty,
            "verdict": self.verdict,
            "workaround": self.workaround,
            "guards": [{"demands": g.demands, "place": g.place, "text": str(g)} for g in self.broken],
            "rungs": [rung.to_record() for rung in self.rungs],
        }


def kind_of(error: BaseException) -> str:
    """``ValueError: ``, and nothing for a failure of a stage, whose message says it."""
    return "" if isinstance(error, ExportCheckError) else f"{type(error).__name__}: "


def innermost(error: BaseException) -> BaseException:
    """What was raised first."""
    seen: Iterator[BaseException] = _causes(error)
    return list(seen)[-1]


def _causes(error: BaseException) -> Iterator[BaseException]:
    known: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in known:
        known.add(id(current))
        yield current
        current = current.__cause__


def rung_of(name: str, results: list[LeafComparison], seconds: float) -> Rung:
    """The rung of a step that gave outputs."""
    ok = all(result.ok for result in results)
    numbers = [r for r in results if r.shape is not None and not r.by]
    shown = [r for r in results if not r.ok] or numbers
    # An output that differs by its dtype, its shape or a NaN has no error: 0.0 would say that it is right.
    numbers = [r for r in numbers if not r.reason or r.max_abs > 0]
    if not ok and not any(r in numbers for r in shown):
        numbers = []
    worst = max(shown, key=lambda r: (bool(r.reason), r.max_abs), default=None)
    return Rung(
        name,
        "ok" if ok else "differs",
        max((r.max_abs for r in numbers), default=None),
        max((r.max_rel for r in numbers), default=None),
        worst.path if worst is not None else "",
        f"{worst.path}: {worst.reason}" if worst is not None and worst.reason else "",
        seconds,
    )
