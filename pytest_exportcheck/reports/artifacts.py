"""What is kept of a failed case under ``--exportcheck-artifacts``: its text, its record, the shapes seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import json_ready

if TYPE_CHECKING:
    import pytest

    from ..plan import PlannedCase
    from ..session import RunningCase

__all__ = ["artifacts_folder", "keep_artifacts"]


def artifacts_folder(root: Path, planned: PlannedCase) -> Path:
    """The folder of a case below `root`; workers never share one."""
    return root / Path(planned.spec.relative).with_suffix("") / planned.case.label()


def keep_artifacts(root: Path | None, report: pytest.TestReport, running: RunningCase) -> None:
    """Write the artifacts of a failed case to a folder of its own."""
    if root is None:
        return
    folder = artifacts_folder(root, running.planned)
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
