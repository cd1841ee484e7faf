"""From the data of a report to the page: what is shown of a case, and in which order."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from ...plurals import counted
from ..diagnosis import causes, culprits, error_profile, first_node, guilty_line, left_over, rungs
from ..matrix import Matrix, cell_text, counts, is_case
from ..read import case_key, case_name
from ..record import sort_key
from . import plots

__all__ = ["render"]

Record = Mapping[str, Any]

#: Plots of single cases that are drawn, those of failed cases first: a thousand take a minute.
MOST_PLOTS = 120

_FAILED = ("fail", "crash", "timeout", "xpass")
_KINDS = (*_FAILED, "xfail", "skip", "pass")


class _Record(dict[str, Any]):
    """A record in which a key that it lacks is ``None``: older reports, and those of others, have fewer."""

    def __missing__(self, key: str) -> None:
        return None


def render(data: Mapping[str, Any]) -> str:
    """The page of a report."""
    records = sorted(data["cases"], key=sort_key)
    matrix = Matrix.of(records)
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        environment=_Record(data.get("environment") or {}),
        counts=counts(record for record in records if is_case(record)),
        total=sum(map(is_case, records)),
        matrix=_table(matrix, records),
        cases=_cases(records),
        filters=_filters(records),
        plots=_run_plots(matrix, records),
        style=Markup(_resource("page.css")),
        script=Markup(script),
        script_hash=digest,
    )


@cache
def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "e": _number,
        "cell_text": cell_text,
        "size": _size,
        "counted": counted,
        "command": _command,
    }
    return environment.from_string(_resource("page.html.jinja"))


def _number(value: Any, digits: str = ".1e") -> str:
    return format(value, digits) if isinstance(value, int | float) else str(value)


def _command(arguments: Any) -> str:
    """Arguments as they are typed."""
    return shlex.join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)


def _size(count: Any) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _table(matrix: Matrix, records: Sequence[Record]) -> dict[str, Any]:
    """Rows of cells; a cell has the numbers of its records, the worst first."""
    numbers = {id(record): number for number, record in enumerate(records)}
    columns = [(group, column) for group in matrix.groups for column in group.columns]
    rows = []
    for row in matrix.rows:
        cells = []
        for group, column in columns:
            found = group.records.get((row, column), [])
            worst = group.cells.get((row, column))
            found = sorted(found, key=lambda record: record["verdict"] != worst)
            cells.append([numbers[id(record)] for record in found])
        rows.append({"label": row, "cells": cells})
    groups = [{"label": group.label, "span": len(group.columns)} for group in matrix.groups]
    labels = [(column, number) for number, group in enumerate(matrix.groups) for column in group.columns]
    return {"rows": rows, "groups": groups, "columns": labels}


def _filters(records: Sequence[Record]) -> dict[str, list[str]]:
    """The values to choose from, by field."""
    values = {
        field: list(dict.fromkeys(_field(record, field) for record in records))
        for field in ("exporter", "patch_mode", "device", "dtype", "graph")
    }
    kinds = {record["verdict"].split()[0] for record in records}
    return {
        **{field: sorted(found) for field, found in values.items()},
        "verdict": [kind for kind in _KINDS if kind in kinds],
    }


def _field(record: Record, field: str) -> str:
    empty = {"exporter": "shapes", "patch_mode": "none given", "graph": "none"}
    return str(record[field] or empty.get(field, ""))


def _cases(records: Sequence[Record]) -> list[dict[str, Any]]:
    shapes = {
        (record["spec"], record["device"], record["dtype"]): record
        for record in records
        if record["exporter"] is None
    }
    failed_first = sorted(range(len(records)), key=lambda at: not _failed(records[at]))
    drawn: dict[int, list[tuple[str, Markup]]] = {}
    times: dict[int, Markup | None] = {}
    left = MOST_PLOTS
    for at in failed_first:
        if left <= 0:
            break
        drawn[at] = _case_plots(records[at])
        times[at] = plots.time_by_stage(records[at].get("durations") or {})
        left -= len(drawn[at]) + (times[at] is not None)
    return [
        {
            "record": _Record(record, outputs=[_Record(output) for output in record.get("outputs") or ()]),
            "name": case_name(case_key(record)),
            "kind": record["verdict"].split()[0],
            "fields": {
                name: _field(record, name) for name in ("exporter", "patch_mode", "device", "dtype", "graph")
            },
            "shapes": _shapes(
                record, shapes.get((record["spec"], record["device"], record["dtype"]), record)
            ),
            "seconds": {
                stage: (spent.get("wall_s"), spent.get("cpu_s"))
                for stage, spent in (record.get("durations") or {}).items()
            },
            "guilty": guilty_line(record),
            "diagnosis": _diagnosis(record),
            "causes": [_Record(cause) for cause in causes(record)],
            "plots": drawn.get(at),
            "time": times.get(at),
        }
        for at, record in enumerate(records)
    ]


def _diagnosis(record: Record) -> dict[str, Any] | None:
    """What the page shows of a diagnosis; ``None`` if there is none."""
    found = record.get("diagnosis")
    if not isinstance(found, dict):
        return None
    node = first_node(record)
    ladder, pieces, told = found.get("ladder"), found.get("pieces"), found.get("reproduction")
    return {
        "facts": _Record(found),
        "rungs": [_Record(rung) for rung in rungs(record)],
        "sample": ladder.get("sample") if isinstance(ladder, dict) else None,
        "node": _Record(node) if node is not None else None,
        "profile": error_profile(record),
        "culprits": [_Record(culprit) for culprit in culprits(record)],
        "searched": pieces.get("note") if isinstance(pieces, dict) else None,
        "reproduction": told if isinstance(told, list) else [told] if told else [],
        "more": left_over(record),
    }


def _failed(record: Record) -> bool:
    return record["verdict"].split()[0] in _FAILED


def _case_plots(record: Record) -> list[tuple[str, Markup]]:
    made = (
        ("Error by node", plots.errors_by_node(error_profile(record))),
        ("Error by output", plots.errors_by_output(record.get("outputs") or ())),
    )
    return [(title, plot) for title, plot in made if plot is not None]


def _shapes(record: Record, check: Record) -> list[dict[str, Any]]:
    """One row per input: accepted, inferred (both of the spec's shapes check), declared by the program."""
    graphs = [record["graph"] or ""] if is_case(record) else list(check.get("shapes") or {})
    rows: list[dict[str, Any]] = []
    for graph in graphs:
        accepted = (check.get("accepted") or {}).get(graph) or {}
        inferred = (check.get("shapes") or {}).get(graph) or {}
        exported = record.get("exported_shapes") or {}
        rows += [
            {
                "path": f"{graph}: {path}" if graph and not is_case(record) else path,
                "accepted": accepted.get(path),
                "inferred": inferred.get(path),
                "exported": exported.get(path),
                "differs": check.get("accepted") is not None and accepted.get(path) != inferred.get(path),
            }
            for path in dict.fromkeys([*accepted, *inferred, *exported])
        ]
    return rows


def _run_plots(matrix: Matrix, records: Sequence[Record]) -> list[tuple[str, Markup]]:
    total: dict[str, dict[str, float]] = {}
    for record in records:
        for stage, spent in (record.get("durations") or {}).items():
            sums = total.setdefault(stage, {"wall_s": 0.0, "cpu_s": 0.0})
            for key in sums:
                sums[key] += float(spent.get(key) or 0.0)
    several = len(matrix.groups) > 1
    nodes = [
        (f"{row} {column}" + (f" {group.label}" if several else ""), int(record["nodes"]))
        for group in matrix.groups
        for (row, column), found in group.records.items()
        for record in found
        if record.get("nodes")
    ]
    made = (
        ("Errors of all outputs", plots.histogram(records)),
        ("Time by stage, all cases", plots.time_by_stage(total)),
        ("Node counts", plots.node_counts(nodes)),
    )
    return [(title, plot) for title, plot in made if plot is not None]
