"""Stage markers: what a worker was doing, left on disk so that its death can be told apart by the controller.

A process killed by a signal or by `os._exit` sends nothing. Each stage of a case therefore leaves one small
file, named after the worker and replaced atomically; it is removed when the test ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .cases import CaseId

__all__ = ["StageMarker", "StageMarkers", "running_in_workers"]


@dataclass(frozen=True)
class StageMarker:
    """What a worker was doing.

    Attributes
    ----------
    nodeid:
        The test.
    case:
        Its case.
    stage:
        The stage entered last.
    file, line:
        Where the test is (1-based line), for the failure's location.
    """

    nodeid: str
    case: CaseId
    stage: str
    file: str
    line: int


class StageMarkers:
    """The marker file of one worker in a directory that the controller made."""

    def __init__(self, directory: Path, worker: str) -> None:
        self.path = directory / worker
        self._new = directory / f"{worker}.new"

    def write(self, marker: StageMarker) -> None:
        """Replace the file's content. About 0.1 ms; a full disk costs the marker, not the case."""
        try:
            self._new.write_text(json.dumps(asdict(marker)), encoding="utf-8")
            os.replace(self._new, self.path)
        except OSError:
            return

    def read(self) -> StageMarker | None:
        """The marker that is there, if any."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return StageMarker(**{**data, "case": CaseId(**data["case"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def clear(self) -> None:
        """Remove the file: the test ended."""
        self.path.unlink(missing_ok=True)


def running_in_workers(directory: Path) -> Iterator[tuple[float, StageMarker]]:
    """What each worker is doing, and for how many seconds."""
    try:
        files = [path for path in directory.iterdir() if path.suffix != ".new"]
    except OSError:
        return
    for path in files:
        try:
            seconds = time.time() - path.stat().st_mtime
        except OSError:
            continue  # the test has just ended
        marker = StageMarkers(directory, path.name).read()
        if marker is not None:
            yield seconds, marker
