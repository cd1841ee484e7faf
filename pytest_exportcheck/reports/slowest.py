"""The cases that took longest, and the stage that took most of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .read import case_key, case_name

__all__ = ["case_seconds", "slowest_lines"]

_SHOWN = 3

#: Nobody waits for what takes less.
_LEAST_SECONDS = 1.0


def case_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Stage -> wall seconds."""
    durations = record.get("durations") or {}
    return {stage: float(spent.get("wall_s") or 0.0) for stage, spent in durations.items()}


def slowest_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each of the three slowest, the slowest first; none for quick ones."""
    timed = [(sum(case_seconds(record).values()), record) for record in records]
    slow = sorted((pair for pair in timed if pair[0] >= _LEAST_SECONDS), key=lambda pair: -pair[0])[:_SHOWN]
    for number, (seconds, record) in enumerate(slow):
        stage, most = max(case_seconds(record).items(), key=lambda item: item[1])
        start = "slowest:" if not number else " " * len("slowest:")
        yield f"{start} {seconds:6.1f} s  {case_name(case_key(record))} ({stage} {most:.1f} s)"
