"""The matrix: rows specs, columns exporter and patch mode, grouped by device and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NOT_RUN", "Group", "Matrix", "cell_text", "counts", "is_case", "worst_verdict"]

Record = Mapping[str, Any]

#: Cell of a case that ran nowhere.
NOT_RUN = "·"

#: Which of several verdicts of one cell is shown: the first of these.
_WORST = ("crash", "timeout", "fail", "xpass", "xfail", "skip", "pass")

#: Order of the counts, and how they are written.
_COUNTS = {
    "pass": "pass",
    "xfail": "xfail",
    "fail": "FAIL",
    "crash": "CRASH",
    "timeout": "TIMEOUT",
    "xpass": "XPASS",
    "skip": "skip",
}

#: Column of the shapes checks.
_SHAPES = "shapes"


@dataclass
class Group:
    """The columns of one device (and dtype, where there are several).

    Attributes
    ----------
    label:
        ``cpu`` or ``cpu float16``.
    columns:
        Column labels, in order.
    cells:
        (row label, column label) -> verdict.
    records:
        (row label, column label) -> the records of that cell.
    """

    label: str
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    records: dict[tuple[str, str], list[Record]] = field(default_factory=dict)


@dataclass
class Matrix:
    """Everything that a renderer needs.

    Attributes
    ----------
    rows:
        Row labels: the spec's stem, or its path where stems are ambiguous, and the graph if it has several.
    groups:
        One per device and dtype.
    """

    rows: list[str]
    groups: list[Group]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Matrix:
        """Arrange `records` (sorted); several records of one cell show the worst verdict."""
        dtypes = {record["dtype"] for record in records}
        names = _spec_labels(record["spec"] for record in records)
        graphs: dict[str, dict[str, None]] = {}
        for record in records:
            seen = graphs.setdefault(record["spec"], {})
            if record["exporter"] is not None:
                seen[_row(names[record["spec"]], record["graph"])] = None
        groups: dict[str, Group] = {}
        for record in records:
            label = record["device"] + (f" {record['dtype']}" if len(dtypes) > 1 else "")
            group = groups.setdefault(label, Group(label))
            column = _column(record)
            if column not in group.columns:
                group.columns.append(column)
            if record["exporter"] is None:
                # A shapes check is about all graphs of its spec.
                rows = list(graphs[record["spec"]]) or [names[record["spec"]]]
            else:
                rows = [_row(names[record["spec"]], record["graph"])]
            for row in rows:
                before = group.cells.get((row, column))
                group.cells[row, column] = worst_verdict(before, record["verdict"])
                group.records.setdefault((row, column), []).append(record)
        for group in groups.values():
            group.columns.sort(key=lambda column: (column != _SHAPES, column))
        rows = [row for spec in graphs for row in (list(graphs[spec]) or [names[spec]])]
        return cls(rows, list(groups.values()))

    def cell(self, group: Group, row: str, column: str) -> str:
        """The text of a cell."""
        verdict = group.cells.get((row, column))
        return NOT_RUN if verdict is None else cell_text(verdict)

    def all_pass(self, row: str) -> bool:
        """Whether nothing in the row needs attention."""
        verdicts = [group.cells.get((row, column)) for group in self.groups for column in group.columns]
        return all(verdict in (None, "pass") for verdict in verdicts)


def cell_text(verdict: str) -> str:
    """How a verdict is written: what a person must look at is in capitals."""
    kind, _, stage = verdict.partition(" ")
    return f"{_COUNTS.get(kind, kind)} {stage}".rstrip()


def is_case(record: Record) -> bool:
    """Whether the record is about an export, and not a spec's shapes check."""
    return record["exporter"] is not None


def counts(records: Iterable[Record]) -> str:
    """``80 pass, 9 xfail, 1 FAIL, 5 skip (no cuda)``; kinds that do not occur are left out."""
    found = Counter(record["verdict"].split()[0] for record in records)
    return ", ".join(f"{found[kind]} {text}" for kind, text in _COUNTS.items() if found[kind])


def worst_verdict(first: str | None, second: str) -> str:
    """The worse of two verdicts; the first of two that are equally bad."""
    if first is None:
        return second
    return min(first, second, key=lambda verdict: _WORST.index(verdict.split()[0]))


def _column(record: Record) -> str:
    if record["exporter"] is None:
        return _SHAPES
    mode = record["patch_mode"]
    return str(record["exporter"]) + ("" if mode in (None, "none", "own") else f"+{mode}")


def _row(name: str, graph: str | None) -> str:
    return f"{name} ({graph})" if graph else name


def _spec_labels(specs: Iterable[str]) -> dict[str, str]:
    """Spec path -> its stem, or the path without suffix where two specs share a stem."""
    paths = dict.fromkeys(specs)
    stems = {path: path.rsplit("/", 1)[-1].rsplit(".", 1)[0] for path in paths}
    often = Counter(stems.values())
    return {path: stem if often[stem] == 1 else path.rsplit(".", 1)[0] for path, stem in stems.items()}
