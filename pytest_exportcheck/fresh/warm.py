"""What is imported once, before the first process is forked for a case.

Imports only. Nothing is built, exported or run, so that the processes have no history in common; and ONNX
Runtime is left to them, because its import starts a thread, which a fork would lose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module

__all__ = ["warm_up"]

#: What observing and exporting a model imports on the way (torch 2.13). A name that is gone costs its time in
#: every process, and nothing else.
_MODULES = (
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.modeling_utils",
    "networkx",
    "torch._dynamo",
    "torch._export.passes",
    "torch._export.serde.serialize",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._inductor.decomposition",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.export.pt2_archive",
    "torch.fx.experimental.symbolic_shapes",
    "onnxscript.optimizer",
    "onnx_ir.passes.common",
    "torch.onnx._internal.exporter._core",
    "torch.onnx.ops",
)


def warm_up() -> Callable[[], None]:
    """Import the engine and what it needs; returns what a forked process calls first.

    A pool of OpenMP threads does not survive a fork, and a forked process that meets one hangs. Until then
    torch therefore computes in one thread.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import_module("pytest_exportcheck.pipeline")
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
    with contextlib.suppress(ImportError, AttributeError):
        from torch.onnx._internal.exporter import _registration

        from ..exporters.tables import shared_tables

        with shared_tables():
            _registration.ONNXRegistry.from_torchlib()
    return lambda: torch.set_num_threads(threads)
