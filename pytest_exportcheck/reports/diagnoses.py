"""Diagnoses in one line each, for the end of a run: expected failures have no text of their own there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["diagnosis_lines"]


def diagnosis_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """``llama[cpu-float32-onnx-dynamo-none]: guilty: ...`` for each case that was diagnosed."""
    for record in records:
        verdict = (record.get("diagnosis") or {}).get("verdict")
        if verdict:
            yield f"{record['nodeid'].partition('[')[2].rstrip(']')} of {record['spec']}: {verdict}"
