"""Memory of this process: its largest resident size, stage by stage, and what a failure keeps alive."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["StagePeaks", "peak_rss_mb", "release_failure"]

#: Linux: the sizes of this process, and the file that sets its high-water mark back (proc(5)).
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

#: Largest resident size before the mark was set back, MiB.
_earlier = 0.0


def _high_water() -> float | None:
    """The high-water mark of the resident size, MiB; ``None`` where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    unit = 1024 * 1024 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def peak_rss_mb() -> float | None:
    """Largest resident size of this process since it began, MiB; ``None`` where the system does not tell."""
    now = _high_water()
    return None if now is None else round(max(_earlier, now), 1)


def _set_back() -> bool:
    """Let the high-water mark start again from the present size; false where that is not possible."""
    global _earlier
    before = _high_water()
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    if before is not None:
        _earlier = max(_earlier, before)
    return True


class StagePeaks:
    """Notes the largest resident size during each stage in a record.

    The mark of the system only rises, so that it says nothing about a stage by itself; Linux lets a process
    set its own back. Elsewhere, and where ``/proc`` cannot be written, ``peak_rss_by_stage_mb`` is ``None``.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record
        self._peaks: dict[str, float] | None = {}
        self._stage = ""

    def enter(self, stage: str) -> None:
        """Close the stage that runs, begin another."""
        self._close()
        if self._peaks is not None and not _set_back():
            self._peaks = None
        self._stage = stage

    def stop(self) -> None:
        """Close the last stage and write the record."""
        self._close()
        self._record.update(peak_rss_mb=peak_rss_mb(), peak_rss_by_stage_mb=self._peaks)

    def _close(self) -> None:
        now = _high_water()
        if self._stage and self._peaks is not None and now is not None:
            self._peaks[self._stage] = max(self._peaks.get(self._stage, 0.0), round(now, 1))
        self._stage = ""


def release_failure() -> None:
    """Drop the failure that Python keeps for a debugger, and the local variables in its tracebacks.

    pytest leaves the exception of a failed test in ``sys.last_value`` until it calls the next. Its frames,
    and those of its causes, hold the model, its program and its session.
    """
    for error in _chain(getattr(sys, "last_value", None)):
        # Not left to the garbage collector: the frames are part of cycles.
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Up to Python 3.12 a frame keeps the dict that somebody asked it for; asking again empties it.
            frame.f_locals  # noqa: B018
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, its causes and contexts, and the members of groups."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
