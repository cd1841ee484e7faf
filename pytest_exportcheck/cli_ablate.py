"""``exportcheck patches --ablate SPEC``: which patches the cases of specs need, as a table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ablation import ablate, one_thread
from .cases import CaseId
from .errors import SpecError
from .fresh.warm import warm_up
from .noise import quietly
from .pipeline import OWN, SpecRun
from .plan import export_cases
from .registry import brings_patches
from .reports.ablation import as_markdown
from .reports.json_report import environment, report_data, write_data
from .reports.record import case_fields
from .spec import ModelSpec, load_spec

__all__ = ["run_ablation"]


def run_ablation(
    specs: Sequence[Path], modes: Sequence[str], exporters: Sequence[str], report: Path | None
) -> int:
    """Run it; 0 fine, 1 some case could not be ablated, 2 a spec cannot be read or names no such case.

    Parameters
    ----------
    modes, exporters:
        Which to ablate, whatever the matrix of a spec has; empty: those of its matrix.
    report:
        Where the records go, as JSON.
    """
    try:
        loaded = [load_spec(path.resolve(), Path.cwd()) for path in specs]
    except SpecError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}", file=sys.stderr)
        return 2
    records: list[dict[str, Any]] = []
    with quietly(logging.WARNING):
        warm_up()
    with one_thread():
        for spec in loaded:
            run = SpecRun(spec)
            for case in _cases(spec, modes, exporters):
                with quietly(logging.WARNING):
                    found = ablate(run, case)
                records.append({**case_fields(case), "verdict": found.get("with", "-"), "ablation": found})
                print(f"{case}: {_said(found)}", file=sys.stderr, flush=True)
            run.close()
            if report is not None:
                write_data(report, report_data(environment(sys.argv[1:]), records))
    if not records:
        print("no case has a patch mode with patches: name one with --mode", file=sys.stderr)
        return 2
    print(as_markdown(records), end="")
    return 1 if any("not_done" in record["ablation"] for record in records) else 0


def _cases(spec: ModelSpec, modes: Sequence[str], exporters: Sequence[str]) -> list[CaseId]:
    """The cases under modes that have patches; `modes` and `exporters` need not be in the matrix."""
    wanted = {
        CaseId(case.spec, exporter, mode, case.device, case.dtype, case.graph): None
        for case in export_cases(spec)
        for exporter in (exporters or [str(case.exporter)])
        for mode in (modes or [str(case.patch_mode)])
    }
    return [
        case
        for case in wanted
        if case.patch_mode not in ("none", OWN) and not brings_patches(str(case.exporter))
    ]


def _said(found: dict[str, Any]) -> str:
    if "not_done" in found:
        return f"not ablated: {found['not_done']}"
    kinds: dict[str, list[str]] = {}
    for name, one in found["patches"].items():
        kinds.setdefault(one["kind"], []).append(name.rpartition(":")[2])
    shown = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items()) or "no patch is called"
    why = f"; it was: {found['message']}" if found.get("message") and not found["patches"] else ""
    return f"{found['with']} with, {found['without_any']} without; {shown}{why} ({found['seconds']} s)"
