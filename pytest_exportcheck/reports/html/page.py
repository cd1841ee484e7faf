"""From the data of a report to the page: the matrix as markup, the rest as data that `page.js` shows later.

A run of 2,000 cases would be half a million elements, which take a browser longer than a reader waits. The
details of the cases are lines of JSON in the page instead, and only that of an opened case is ever parsed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from ..diagnosis import causes, culprits, error_profile, first_node, guilty_line
from ..matrix import Matrix, cell_text, is_case
from ..read import case_key, case_name
from ..record import sort_key
from ..totals import cases_text, shapes_text
from . import plots
from .blocks import Block, Plots, case_blocks, value

__all__ = ["render"]

Record = Mapping[str, Any]

#: Plots of single cases that are drawn, those of failed cases first: a thousand take a minute.
MOST_PLOTS = 120

_FAILED = ("fail", "crash", "timeout", "xpass")
_KINDS = (*_FAILED, "xfail", "skip", "pass")

#: What the cases are filtered by; `page.js` has the values of a case in this order.
_FIELDS = {
    "exporter": "Exporter",
    "patch_mode": "Patch mode",
    "device": "Device",
    "dtype": "Dtype",
    "graph": "Graph",
}


def render(data: Mapping[str, Any]) -> str:
    """The page of a report."""
    records = sorted(data["cases"], key=sort_key)
    matrix = Matrix.of(records)
    script = _resource("blocks.js") + _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = data.get("environment") or {}
    text = _template().render(
        totals=", ".join(filter(None, (cases_text(records), shapes_text(records)))),
        left_out=environment.get("left_out"),
        matrix=_table(matrix, records),
        failures=[_failure(number, record) for number, record in enumerate(records) if _failed(record)],
        filters=_filters(records),
        field_labels=_FIELDS,
        index=_json([_entry(record) for record in records]),
        details=Markup("\n").join(map(_json, _details(records))),
        rest=_json({"plots": _run_plots(matrix, records), "environment": _environment(environment)}),
        style=Markup(_resource("page.css")),
        script=Markup(script),
        script_hash=digest,
    )
    # A file has no half of a pair of surrogates, which a name may be.
    return text.encode("utf-8", "backslashreplace").decode()


@cache
def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell_text": cell_text}
    return environment.from_string(_resource("page.html.jinja"))


#: What could end the element that the data stands in, or begin a comment in it.
_MARKUP = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def _json(data: Any) -> Markup:
    """`data` as one line in a ``script`` element that is no script."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.translate(_MARKUP))


def _name(record: Record) -> str:
    return case_name(case_key(record))


def _kind(record: Record) -> str:
    return str(record["verdict"].split()[0])


def _failed(record: Record) -> bool:
    return _kind(record) in _FAILED


def _failure(number: int, record: Record) -> dict[str, Any]:
    """What stands of a failed case where there is no JavaScript."""
    told = {field: record.get(field) for field in ("message", "accept", "reproduce")}
    return {
        "number": number,
        "name": _name(record),
        "kind": _kind(record),
        "verdict": record["verdict"],
        **told,
    }


def _entry(record: Record) -> list[Any]:
    """Of a case that is not open: name, verdict, its kind, values of the filters, words to find it by."""
    values = [_field(record, field) for field in _FIELDS]
    return [_name(record), cell_text(record["verdict"]), _kind(record), values, " ".join(_words(record))]


def _words(record: Record) -> Iterator[str]:
    """What is searched beside the name; the browser's own search does not see into what is closed."""
    yield str(record.get("message") or "")
    yield from map(str, record.get("details") or ())
    yield guilty_line(record) or ""
    yield from map(str, record.get("warnings") or ())
    for cause in causes(record):
        yield f"{cause.get('name')} {cause.get('sentence')}"
    for culprit in culprits(record):
        yield f"{culprit.get('path')} {culprit.get('kind')} {culprit.get('line')} {culprit.get('reason')}"
    node = first_node(record) or {}
    yield " ".join(str(node.get(key) or "") for key in ("name", "operator", "onnx_nodes", "module", "source"))


def _environment(environment: Record) -> list[list[Any]]:
    told = {**environment}
    if told.get("arguments"):
        told["arguments"] = _command(told["arguments"])
    return [[key, value(item)] for key, item in told.items() if item not in (None, "", [], {})]


def _command(arguments: Any) -> str:
    """Arguments as they are typed."""
    return shlex.join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)


def _table(matrix: Matrix, records: Sequence[Record]) -> dict[str, Any]:
    """Rows of cells; a cell has its records (number, kind and text), the worst first."""
    numbers = {id(record): number for number, record in enumerate(records)}
    columns = [(group, column) for group in matrix.groups for column in group.columns]
    rows = []
    for row in matrix.rows:
        cells = []
        for group, column in columns:
            found = group.records.get((row, column), [])
            worst = group.cells.get((row, column))
            found = sorted(found, key=lambda record: record["verdict"] != worst)
            cells.append(
                [(numbers[id(record)], _kind(record), cell_text(record["verdict"])) for record in found]
            )
        rows.append({"label": _breakable(row), "cells": cells})
    groups = [{"label": group.label, "span": len(group.columns)} for group in matrix.groups]
    labels = [(column, number) for number, group in enumerate(matrix.groups) for column in group.columns]
    return {"rows": rows, "groups": groups, "columns": labels}


#: A longer name may wrap.
_LONG = 24


def _breakable(name: str) -> Markup:
    """`name`, which if it is long wraps behind a mark rather than in a word."""
    parts = re.split(r"(?<=[_/.-])(?=\w)", name) if len(name) > _LONG else [name]
    return Markup("<wbr>").join(parts)


def _filters(records: Sequence[Record]) -> dict[str, list[str]]:
    """The values to choose from, by field."""
    kinds = set(map(_kind, records))
    return {
        **{field: sorted({_field(record, field) for record in records}) for field in _FIELDS},
        "verdict": [kind for kind in _KINDS if kind in kinds],
    }


def _field(record: Record, field: str) -> str:
    empty = {"exporter": "shapes", "patch_mode": "none given", "graph": "none"}
    return str(record[field] or empty.get(field, ""))


def _details(records: Sequence[Record]) -> Iterator[list[Block]]:
    checks = {
        (record["spec"], record["device"], record["dtype"]): record
        for record in records
        if record["exporter"] is None
    }
    drawn, written = _drawn(records), _written(records)
    for at, record in enumerate(records):
        check = checks.get((record["spec"], record["device"], record["dtype"]), record)
        yield case_blocks(record, _shapes(record, check, written), drawn.get(at))


def _drawn(records: Sequence[Record]) -> dict[int, Plots]:
    """The plots of the first cases, failed ones before others, by the number of the case."""
    drawn: dict[int, Plots] = {}
    left = MOST_PLOTS
    for at in sorted(range(len(records)), key=lambda at: not _failed(records[at])):
        if left <= 0:
            break
        drawn[at] = _case_plots(records[at])
        left -= len(drawn[at].others) + (drawn[at].time is not None)
    return drawn


def _case_plots(record: Record) -> Plots:
    made = (
        ("Error by node", plots.errors_by_node(error_profile(record))),
        ("Error by output", plots.errors_by_output(record.get("outputs") or ())),
    )
    others = [(title, plot) for title, plot in made if plot is not None]
    return Plots(plots.time_by_stage(record.get("durations") or {}), others)


def _written(records: Sequence[Record]) -> set[str]:
    """Files of accepted shapes that the run changed: those on which its shapes checks agree."""
    texts: dict[str, set[str]] = {}
    changed: set[str] = set()
    for record in records:
        golden = record.get("golden")
        if isinstance(golden, dict) and golden.get("path"):
            texts.setdefault(str(golden["path"]), set()).add(str(golden.get("text")))
            changed |= {str(golden["path"])} if golden.get("changed") else set()
    return {path for path in changed if len(texts[path]) == 1}


def _shapes(record: Record, check: Record, written: Collection[str]) -> list[dict[str, Any]]:
    """One row per input: accepted, inferred (both of the spec's shapes check), declared by the program.

    Parameters
    ----------
    written:
        See `_written`: there, what was inferred is what is accepted now.
    """
    every = dict.fromkeys([*(check.get("shapes") or {}), *(check.get("accepted") or {})])
    graphs = [record["graph"] or ""] if is_case(record) else list(every)
    golden = check.get("golden")
    new = isinstance(golden, dict) and bool(golden.get("changed")) and golden.get("path") in written
    rows: list[dict[str, Any]] = []
    for graph in graphs:
        before = (check.get("accepted") or {}).get(graph) or {}
        inferred = (check.get("shapes") or {}).get(graph) or {}
        accepted = inferred if new else before
        exported = record.get("exported_shapes") or {}
        rows += [
            {
                "path": f"{graph}: {path}" if graph and not is_case(record) else path,
                "accepted": accepted.get(path),
                "inferred": inferred.get(path),
                "exported": exported.get(path),
                "differs": not new
                and check.get("accepted") is not None
                and accepted.get(path) != inferred.get(path),
                "news": _news(before.get(path), inferred.get(path)) if new else "",
            }
            for path in dict.fromkeys([*before, *inferred, *exported])
        ]
    return rows


def _news(was: str | None, now: str | None) -> str:
    """What accepting the shapes in this run changed of one input."""
    if was == now:
        return ""
    if now is None:
        return f"given up in this run, was {was}"
    return "accepted in this run" + (f", was {was}" if was else "")


def _run_plots(matrix: Matrix, records: Sequence[Record]) -> list[tuple[str, str]]:
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
