"""From a spec to its cases: which cells exist, in which order, and under which marker names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cases import CaseId
from .registry import brings_patches

if TYPE_CHECKING:
    from .options import Options
    from .spec import ModelSpec

__all__ = ["OWN_PATCHES", "PlannedCase", "export_cases", "is_selected", "marker_names", "shape_cases"]

#: Patch mode of a case whose exporter brings its own patches: it runs once and not once per mode.
OWN_PATCHES = "own"


@dataclass(frozen=True, eq=False)
class PlannedCase:
    """The parameter of a test: a case and its spec. Compared by identity, as pytest does with parameters."""

    spec: ModelSpec
    case: CaseId


def shape_cases(spec: ModelSpec) -> list[CaseId]:
    """One shapes check per device and dtype."""
    return [
        CaseId(spec.relative, None, None, device, dtype)
        for device in spec.matrix.devices
        for dtype in spec.matrix.dtypes
    ]


def export_cases(spec: ModelSpec) -> list[CaseId]:
    """Every cell of the spec's matrix, devices outermost, so that an observation serves a run of cases."""
    return [
        CaseId(spec.relative, exporter, mode, device, dtype, graph)
        for device in spec.matrix.devices
        for dtype in spec.matrix.dtypes
        for exporter, mode in _programs(spec)
        for graph in spec.graph_names
    ]


def _programs(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    for exporter in spec.matrix.exporters:
        if brings_patches(exporter):
            yield exporter, OWN_PATCHES
        else:
            for mode in spec.matrix.patch_modes:
                yield exporter, mode


def is_selected(case: CaseId, options: Options) -> bool:
    """Whether the axis options let `case` run. Axes that a case does not have do not count."""
    return all(
        not wanted or value is None or value in wanted
        for value, wanted in (
            (case.exporter, options.exporters),
            (case.patch_mode, options.patch_modes),
            (case.device, options.devices),
            (case.dtype, options.dtypes),
        )
    )


def marker_names(case: CaseId) -> list[str]:
    """The markers that select `case` with ``-m``: ``exporter_onnx_dynamo``, ``device_cuda``, ..."""
    return [
        marker(axis, value)
        for axis, value in (
            ("exporter", case.exporter),
            ("patch", case.patch_mode),
            ("device", case.device),
            ("dtype", case.dtype),
        )
        if value is not None
    ]


def marker(axis: str, value: str) -> str:
    """A name as ``-m`` accepts it: everything that is not part of an identifier becomes ``_``."""
    return f"{axis}_" + "".join(char if char.isalnum() or char == "_" else "_" for char in value)
