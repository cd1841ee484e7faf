"""Reading reports back, and putting those of several machines together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import COMPARISON, STAGES, TEST
from .json_report import SCHEMA
from .matrix import worst_verdict
from .record import sort_key
from .selection import Shards

__all__ = ["CaseKey", "Report", "ReportError", "case_key", "case_name", "merge", "read_report"]

#: What tells a case from every other one of a run.
_FIELDS = ("spec", "exporter", "patch_mode", "device", "dtype", "graph")

_VERDICT = re.compile(
    rf"pass|xpass|skip|(fail|xfail|crash|timeout) ({'|'.join((*STAGES, TEST))})|fail {COMPARISON}"
)

#: Numbers of a record, and of an output. JSON has no numbers that are not finite: these are text.
_COUNTS = ("nodes", "model_bytes")
_ERRORS = ("max_abs", "atol", "eager_moves")
_NOT_FINITE = ("nan", "inf")

#: Fields that reports and comparisons go into, and what is in them.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("outputs", "details", "warnings"), list),
    **dict.fromkeys(
        ("durations", "shapes", "accepted", "exported_shapes", "operators", "patches", "rewritten"), dict
    ),
}
_INNER: dict[str, type] = {
    **dict.fromkeys(("outputs", "durations", "shapes", "accepted"), dict),
    "operators": int,
}

#: Lists of the environment, and what is in them.
_LISTS: dict[str, type] = {"gpus": str, "seeds": int}
_SELECTION: dict[str, type] = {"paths": str, "options": str, "deselected": dict}

CaseKey = tuple[str, str | None, str | None, str, str, str | None]


class ReportError(ValueError):
    """A file is no report, or one of a version that cannot be read; the message names the file."""


@dataclass(frozen=True)
class Report:
    """A JSON report.

    Attributes
    ----------
    name:
        As messages name it.
    environment:
        Packages, machine, options of the run.
    cases:
        Records, one per case and shapes check.
    """

    name: str
    environment: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]

    def by_key(self) -> dict[CaseKey, Mapping[str, Any]]:
        """Record by case; of several of one case the worst."""
        found: dict[CaseKey, Mapping[str, Any]] = {}
        for record in self.cases:
            key = case_key(record)
            found[key] = record if key not in found else _worse(found[key], record)
        return found


def case_key(record: Mapping[str, Any]) -> CaseKey:
    """The identity of the case of a record."""
    spec, exporter, patch_mode, device, dtype, graph = (record[field] for field in _FIELDS)
    return spec, exporter, patch_mode, device, dtype, graph


def case_name(key: CaseKey) -> str:
    """``model_specs/llama.yaml [cpu-float32-onnx-dynamo-none]``."""
    spec, exporter, patch_mode, device, dtype, graph = key
    parts = [device, dtype, exporter or "shapes", patch_mode, graph]
    return f"{spec} [{'-'.join(part for part in parts if part)}]"


def read_report(path: Path) -> Report:
    """Read a report that ``--exportcheck-report`` wrote.

    Raises
    ------
    ReportError
        The file cannot be read, is no report, or has another schema version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ReportError(f"{path}: not a JSON report: it is nested too deep") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise ReportError(f"{path}: not a JSON report: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("cases"), list):
        raise ReportError(f"{path}: not a report of --exportcheck-report: it has no list of cases")
    if data.get("schema") != SCHEMA:
        raise ReportError(
            f"{path}: report schema {data.get('schema')!r}, this version reads {SCHEMA}: write it again with "
            "the same version of pytest-exportcheck"
        )
    for index, record in enumerate(data["cases"]):
        wrong = _wrong(record)
        if wrong is not None:
            raise ReportError(f"{path}: case {index}{_named(record)} is no record of a case: {wrong}")
    facts = data.get("environment")
    wrong = _wrong_environment(facts) if isinstance(facts, dict) else None
    if wrong is not None:
        raise ReportError(f"{path}: not a report of --exportcheck-report: environment.{wrong}")
    return Report(str(path), facts if isinstance(facts, dict) else {}, data["cases"])


def _wrong(record: Any) -> str | None:
    """What of a record cannot be read; fields that it has beside those that are read may be anything.

    Numbers that comparisons judge must be numbers: of what is damaged nobody can say that it is not worse.
    """
    if not isinstance(record, dict):
        return f"it is a {type(record).__name__}"
    for field in (*_FIELDS, "verdict"):
        optional = field in ("exporter", "patch_mode", "graph")
        if field not in record:
            return f"it has no {field!r}"
        if not isinstance(record[field], str) and not (optional and record[field] is None):
            return f"{field!r} is {record[field]!r:.40}"
    if not _VERDICT.fullmatch(record["verdict"]):
        return f"the verdict is {record['verdict']!r:.40}"
    if record.get("stage") is not None and record["stage"] not in (*STAGES, TEST):
        return f"the stage is {record['stage']!r:.40}"
    for field in _COUNTS:
        if not _is_number(record.get(field)):
            return f"{field!r} is {record[field]!r:.40}"
    for field, kind in _KINDS.items():
        value: Any = record.get(field)
        if value is None:
            continue
        if not isinstance(value, kind):
            return f"{field!r} is {value!r:.40}"
        inner = _INNER.get(field)
        items: Any = value.values() if isinstance(value, dict) else value
        if inner is not None and not all(isinstance(item, inner) for item in items):
            return f"{field!r} is {value!r:.40}"
    for output in record.get("outputs") or ():
        if not isinstance(output.get("path"), str):
            return f"an output has the path {output.get('path')!r:.40}"
        if not isinstance(output.get("shape") or [], list):
            return f"the shape of an output is {output['shape']!r:.40}"
        for field in _ERRORS:
            if not _is_number(output.get(field), _NOT_FINITE):
                return f"{field!r} of output {output['path']} is {output[field]!r:.40}"
        if not isinstance(output.get("ok", False), bool):
            return f"'ok' of output {output['path']} is {output['ok']!r:.40}"
        for field in ("by", "reason"):
            if not isinstance(output.get(field) or "", str):
                return f"{field!r} of output {output['path']} is {output[field]!r:.40}"
    for operator, count in (record.get("operators") or {}).items():
        if not _is_number(count):
            return f"the number of operators {operator!r} is {count!r:.40}"
    for stage, spent in (record.get("durations") or {}).items():
        if not _is_number(spent.get("cpu_s")):
            return f"the CPU seconds of {stage!r} are {spent['cpu_s']!r:.40}"
    return None


def _named(record: Any) -> str:
    """Which case it is, if the record tells."""
    if not isinstance(record, dict) or not all(field in record for field in _FIELDS):
        return ""
    key = case_key(record)
    sound = all(isinstance(part, str | None) for part in key)
    return f" ({case_name(key)})" if sound and None not in (key[0], *key[3:5]) else ""


def _is_number(value: Any, texts: Sequence[str] = ()) -> bool:
    """Whether it is none, a number from 0 on, or one of `texts`, as which one that is not finite counts."""
    if value is None or isinstance(value, str):
        return value is None or value in texts
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 if math.isfinite(value) else str(value) in texts


def _wrong_environment(facts: Mapping[str, Any]) -> str | None:
    """What of the environment cannot be read, of what comparisons and merges go into."""
    for name in ("packages", "selection"):
        if not isinstance(facts.get(name) or {}, dict):
            return f"{name} is no mapping"
    selection = facts.get("selection") or {}
    for prefix, found, kinds in (("", facts, _LISTS), ("selection.", selection, _SELECTION)):
        for name, kind in kinds.items():
            items = found.get(name) or []
            if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
                return f"{prefix}{name} is {items!r:.40}"
    for prefix, holder, name in (("", facts, "left_out"), ("selection.", selection, "unfinished")):
        if not isinstance(holder.get(name) or "", str):
            return f"{prefix}{name} is {holder[name]!r:.40}"
    for case in selection.get("deselected") or ():
        for field in _FIELDS:
            if not isinstance(case.get(field) or "", str):
                return f"selection.deselected has a case whose {field!r} is {case[field]!r:.40}"
    return None


def _worse(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of two records of one case the one that counts: a shard that skipped it says nothing of it."""
    if (one["verdict"] == "skip") != (other["verdict"] == "skip"):
        return other if one["verdict"] == "skip" else one
    return one if worst_verdict(one["verdict"], other["verdict"]) == one["verdict"] else other


def merge(reports: Sequence[Report]) -> tuple[dict[str, Any], list[str]]:
    """The union of the reports of several shards.

    A case that several shards ran keeps its worst verdict; one that a shard skipped, for want of a device,
    that of the shard that ran it.

    Returns
    -------
    tuple
        The data of the merged report, and what a person should know: shards with other packages, cases with
        two verdicts.
    """
    notes = []
    first = reports[0]
    found: dict[CaseKey, tuple[Mapping[str, Any], str]] = {}
    for report in reports:
        differing = _differing_packages(first.environment, report.environment)
        if differing:
            notes.append(f"{report.name} ran with other packages than {first.name}: {', '.join(differing)}")
        for key, record in report.by_key().items():
            known = found.get(key)
            verdicts = {record["verdict"]} if known is None else {known[0]["verdict"], record["verdict"]}
            if known is not None and len(verdicts - {"skip"}) > 1:
                notes.append(
                    f"{case_name(key)}: {known[0]['verdict']} in {known[1]}, {record['verdict']} in "
                    f"{report.name}; the worse is kept"
                )
            if known is None or _worse(known[0], record) is record:
                found[key] = record, report.name
    cases = sorted((record for record, _ in found.values()), key=sort_key)
    named = len({report.name for report in reports}) == len(reports)
    shards = Shards(
        {
            report.name if named else f"{number}. {report.name}": report.environment
            for number, report in enumerate(reports, 1)
        },
        cases,
    )
    facts = {
        **first.environment,
        **{
            name: sorted({item for report in reports for item in report.environment.get(name) or ()})
            for name in ("gpus", "seeds")
        },
        "left_out": shards.left_out(),
        "selection": shards.selection(),
        "shards": [dict(report.environment) for report in reports],
    }
    return {"schema": SCHEMA, "environment": facts, "cases": cases}, notes


def _differing_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    before, after = one.get("packages") or {}, other.get("packages") or {}
    return [
        f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
