"""What a case is: spec x exporter x patch mode x device x dtype (x graph). Names only, nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CaseId"]


@dataclass(frozen=True, order=True)
class CaseId:
    """Identity of one case.

    Attributes
    ----------
    spec:
        The spec's path relative to pytest's root directory, with forward slashes.
    exporter, patch_mode:
        Names in their registries. ``exporter`` is ``None`` for the shapes check of a spec.
    device:
        ``cpu`` or ``cuda`` (the worker picks the index).
    dtype:
        ``float32``, ``float16``, ``bfloat16`` or ``float64``.
    graph:
        Name of the group of calls that the program serves, ``None`` if one graph serves all.
    """

    spec: str
    exporter: str | None
    patch_mode: str | None
    device: str
    dtype: str
    graph: str | None = None

    def label(self) -> str:
        """The bracketed part of a node id: ``cpu-float32-onnx-dynamo-none`` (``-prefill``)."""
        return "-".join(
            part for part in (self.device, self.dtype, self.exporter, self.patch_mode, self.graph) if part
        )

    def __str__(self) -> str:
        return f"{self.spec}[{self.label()}]"
