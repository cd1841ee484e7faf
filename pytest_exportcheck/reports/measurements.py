"""What benchmarks write, and what changed between two of them: beyond noise bands that are stated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plurals import counted
from .compare import TIME_BAND
from .read import ReportError

__all__ = ["RATIO_BAND", "Difference", "Measurements", "differences", "differences_text", "read_measurements"]

#: Of figures that are ratios of two measurements of one run: what slows the machine slows both.
RATIO_BAND = 1.2

#: Figures below this say nothing, in seconds.
_LEAST_SECONDS = 0.2


@dataclass(frozen=True)
class Measurements:
    """``{"benchmark": name, "rows": {row: {figure: number}}}``.

    Figures that end in ``_s`` are seconds, those called ``ratio`` or ``of_...`` are ratios; others are not
    compared.
    """

    benchmark: str
    rows: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Difference:
    """A figure that is not as before; `worse` if it grew, ``None`` for one that only one file has."""

    row: str
    figure: str
    before: float | None
    after: float | None
    worse: bool | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"{self.row}: {self.figure} is only in {'AFTER' if self.before is None else 'BEFORE'}"
        ratio = f" ({self.after / self.before:.2f})" if self.before else ""
        return f"{self.row}: {self.figure} {self.before:g} to {self.after:g}{ratio}"


def read_measurements(path: Path) -> Measurements | None:
    """What a benchmark wrote to `path`; ``None`` for anything else, reports included.

    Raises
    ------
    ReportError
        It says that it is of a benchmark, and has no rows of figures, or something else as a figure.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or "benchmark" not in data:
        return None
    rows = data.get("rows")
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ReportError(f"{path}: a benchmark without rows of figures")
    for row, figures in rows.items():
        for figure, value in figures.items():
            if _band(figure) is not None and value is not None and _number(value) is None:
                raise ReportError(f"{path}: {figure} of {row} is {value!r:.40}")
    return Measurements(str(data["benchmark"]), rows)


def differences(before: Measurements, after: Measurements) -> list[Difference]:
    """Figures outside the bands, row by row.

    Raises
    ------
    ReportError
        The two are of different benchmarks.
    """
    if before.benchmark != after.benchmark:
        raise ReportError(f"BEFORE is of the benchmark {before.benchmark}, AFTER of {after.benchmark}")
    return list(_differences(before.rows, after.rows))


def _differences(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> Iterator[Difference]:
    for row in dict.fromkeys([*before, *after]):
        was, now = before.get(row, {}), after.get(row, {})
        for figure in dict.fromkeys([*was, *now]):
            band = _band(figure)
            if band is None:
                continue
            one, other = _number(was.get(figure)), _number(now.get(figure))
            if one is None or other is None:
                if one is not other:
                    yield Difference(row, figure, one, other, worse=None)
                continue
            small = figure.endswith("_s") and max(one, other) < _LEAST_SECONDS
            if small or max(one, other) <= band * min(one, other):
                continue
            yield Difference(row, figure, one, other, worse=other > one)


def _band(figure: str) -> float | None:
    if figure == "ratio" or figure.startswith("of_"):
        return RATIO_BAND
    return TIME_BAND if figure.endswith("_s") else None


def _number(value: Any) -> float | None:
    """A figure; ``None`` for what is no finite number from 0 on."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) and value >= 0 else None


def differences_text(found: list[Difference]) -> str:
    """Lines for the terminal; the bands are named."""
    words = {True: "worse", False: "better", None: "other"}
    lines = [f"{words[each.worse]:7}{each}" for each in found]
    bands = f"noise bands: ratios {RATIO_BAND:g}, seconds {TIME_BAND:g}"
    worse = sum(each.worse is True for each in found)
    changes = counted(len(found), "change")
    return "\n".join([*lines, f"benchmark: {changes}, {worse} worse ({bands})"]) + "\n"
