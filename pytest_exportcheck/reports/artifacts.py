"""What is kept of a failed case under ``--exportcheck-artifacts``: its text, its record, the shapes seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import json_ready

if TYPE_CHECKING:
    import pytest

    from ..session import RunningCase

__all__ = ["keep_artifacts"]


def keep_artifacts(root: Path | None, report: pytest.TestReport, running: RunningCase) -> None:
    """Write the artifacts of a failed case to a folder of its own; workers never share one."""
    if root is None:
        return
    spec = running.planned.spec
    folder = root / Path(spec.relative).with_suffix("") / running.planned.case.label()
    record: dict[str, Any] = dict(report.exportcheck)
    proposed = running.record.get("proposed_golden")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(report.longreprtext + "\n", encoding="utf-8")
        (folder / "record.json").write_text(json.dumps(json_ready(record), indent=2) + "\n", encoding="utf-8")
        if proposed is not None:
            (folder / "shapes.yaml").write_text(str(proposed), encoding="utf-8")
    except OSError as error:
        # The verdict of the case must not depend on the disk.
        report.sections.append(("exportcheck artifacts", f"not written to {folder}: {error}"))
