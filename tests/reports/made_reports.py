"""Reports made by hand, of few cases, and the command that reads them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from pytest_exportcheck.reports.compare import compare
from pytest_exportcheck.reports.read import Report

from .test_matrix import record

#: The least that a record has.
WHOLE = {"spec": "a", "exporter": "x", "patch_mode": "n", "device": "cpu", "dtype": "f", "graph": None}

#: What tells a case from the others.
CASE = ("spec", "exporter", "patch_mode", "device", "dtype", "graph")


def report(*cases, name="before.json", **packages):
    return Report(name, {"packages": packages}, list(cases))


def output(max_abs, path="logits", atol=1e-5):
    return {"path": path, "max_abs": max_abs, "atol": atol, "ok": True}


def effects(before, after):
    found = compare(report(*before), report(*after, name="after.json"))
    return [(change.kind, change.effect) for change in found.changes]


def selected(*paths, options=(), deselected=(), unfinished=None):
    cases = [record(spec, exporter) for spec, exporter in deselected]
    return {
        "selection": {
            "paths": list(paths),
            "options": list(options),
            "deselected": [{name: case[name] for name in CASE} for case in cases],
            "unfinished": unfinished,
        }
    }


def command(python: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    parts = [python, "-m", "pytest_exportcheck.cli", *arguments]
    return subprocess.run(parts, cwd=folder, capture_output=True, text=True, check=False)


def write(path: Path, *cases, **packages) -> None:
    path.write_text(json.dumps({"schema": 1, "environment": {"packages": packages}, "cases": cases}))
