"""``torch-export`` and ``torch-export-strict``: `torch.export.export`, the program as torch runs it."""

from __future__ import annotations

import torch

from .base import Exported, ExportRequest, keywords_of
from .capture_cache import KeptCapture

__all__ = ["TorchExport", "TorchExportStrict"]


class TorchExport:
    """`torch.export.export` in non-strict mode.

    Options: any keyword of `torch.export.export`, such as ``prefer_deferred_runtime_asserts_over_guards``.
    """

    name = "torch-export"
    strict = False

    def option_names(self) -> list[str]:
        """What ``exporter_options`` may name."""
        return keywords_of(torch.export.export, "mod", "args", "kwargs", "dynamic_shapes", "strict")

    def export(self, request: ExportRequest) -> Exported:
        """Capture the model; the program takes keyword arguments."""

        def make() -> torch.export.ExportedProgram:
            with torch.no_grad():
                return torch.export.export(
                    request.model,
                    (),
                    kwargs=request.kwargs,
                    dynamic_shapes=request.dynamic_shapes,
                    strict=self.strict,
                    **request.options,
                )

        program = request.capture(make, exporter=self.name, options=dict(request.options))
        if isinstance(program, KeptCapture):
            assert request.captures is not None
            request.captures.use(program)
            return Exported(program, facts={"fx_nodes": program.facts.nodes}, kept=program)
        return Exported(program, facts={"fx_nodes": len(program.graph.nodes)})


class TorchExportStrict(TorchExport):
    """`torch.export.export` in strict mode (dynamo reads the bytecode)."""

    name = "torch-export-strict"
    strict = True
