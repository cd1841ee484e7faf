"""A package of its own with exporters, a patch mode and a comparison, found through entry points only."""

import contextlib

import torch

from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.patches.none import NoPatches


class Deferred:
    name = "toy-deferred"

    def export(self, request: ExportRequest) -> Exported:
        return Exported(
            torch.export.export(
                request.model,
                (),
                request.kwargs,
                dynamic_shapes=request.dynamic_shapes,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        )


class Callable:
    """Returns a plain callable, off by `error` (an option of the spec)."""

    name = "toy-callable"

    def export(self, request: ExportRequest) -> Exported:
        model, error = request.model, request.options.get("error", 0.0)
        forward = type(model).forward
        return Exported(lambda **kwargs: forward(model, **kwargs) + error)


class MathSdpa(NoPatches):
    name = "toy-math"

    @contextlib.contextmanager
    def apply(self, model, target):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield


class Near:
    """Within one."""

    def __call__(self, expected, got, tolerance):
        worst = float((expected - got).abs().max())
        return [f"off by {worst:.2f}"] if worst > 1 else []


def broken(expected, got, tolerance):
    raise RuntimeError("judges nothing")
