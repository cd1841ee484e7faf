"""``onnx-torchscript``: the legacy `torch.onnx.export(dynamo=False)`, which traces with TorchScript."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.jit._trace import TracerWarning
from torch.utils import _pytree

from ..errors import ExportError
from ..observe import TensorLeaf, symbol_label
from ..plurals import counted
from ..pytrees import flatten_with_paths
from .base import Exported, ExportRequest, keywords_of
from .guards import place_in_model

__all__ = ["OnnxTorchScript"]

_LOG = logging.getLogger(__name__)

#: Places of the model's code that are listed.
_MOST = 4


class _Flat(torch.nn.Module):
    """Tensors in, tensors out: the tracer knows neither caches nor dataclasses."""

    def __init__(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._leaves, self._spec = _pytree.tree_flatten(kwargs)
        self.output_paths: list[str] = []
        self.dropped: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = list(tensors)
        leaves = [remaining.pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        outputs = self.model(**_pytree.tree_unflatten(leaves, self._spec))
        found = flatten_with_paths(outputs)
        pairs = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
        self.dropped = [path for path, leaf in found if not (leaf is None or isinstance(leaf, torch.Tensor))]
        self.output_paths = [path for path, _ in pairs]
        return tuple(leaf for _, leaf in pairs)


def _names(paths: list[str]) -> dict[str, str]:
    """A name for each path, ``cache_layers_0_keys``; ``x.0`` and ``x_0`` must not become one."""
    names: dict[str, str] = {}
    for path in paths:
        name = path.replace(".", "_")
        while name in names.values():
            name += "_"
        names[path] = name
    return names


def _frozen(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """What the tracer says of the model's code: a Python value there stays what it was for the example.

    Nothing else tells: there are no guards, and no symbols that comparisons could be read in.
    """
    places: dict[str, str] = {}
    for each in caught:
        place = place_in_model(each.filename, each.lineno)
        if place and issubclass(each.category, TracerWarning):
            places.setdefault(place, str(each.message).partition(". ")[0])
    notes = [f"the trace keeps what the example decided: {place} ({text})" for place, text in places.items()]
    more = [f"... and {counted(len(notes) - _MOST, 'more place')}"] if len(notes) > _MOST else []
    return [*notes[:_MOST], *more]


@contextlib.contextmanager
def _graph_to_log() -> Iterator[None]:
    """The graph of a model that is refused goes to our log, at the level DEBUG, and not to stdout.

    torch means to print it only where ``verbose`` asks for it, and takes the function that tells for its
    answer (``setup_onnx_logging`` of torch 2.13). It is as long as the model.
    """
    original = getattr(torch._C, "_jit_onnx_log", None)
    if original is None:
        yield
        return
    torch._C._jit_onnx_log = lambda *said: _LOG.debug("%s", "".join(map(str, said)))
    try:
        yield
    finally:
        torch._C._jit_onnx_log = original


class OnnxTorchScript:
    """The TorchScript-based ONNX exporter of torch (deprecated there, still in wide use).

    Options: any keyword of `torch.onnx.export`, such as ``opset_version``.
    """

    name = "onnx-torchscript"
    target = "torchscript"

    def option_names(self) -> list[str]:
        """What ``exporter_options`` may name."""
        names = ("input_names", "output_names", "dynamic_axes")
        return keywords_of(torch.onnx.export, "model", "args", "f", "dynamo", *names)

    def export(self, request: ExportRequest) -> Exported:
        """Trace a flat wrapper; inputs and outputs are named after their paths."""
        flat = _Flat(request.model, request.kwargs).eval()
        pairs = [
            (path, leaf)
            for name, value in request.kwargs.items()
            for path, leaf in flatten_with_paths(value, name)
            if isinstance(leaf, torch.Tensor)
        ]
        names = _names([path for path, _ in pairs])
        axes = {}
        for path, name in names.items():
            leaf = request.shapes.leaves.get(path)
            if isinstance(leaf, TensorLeaf):
                axes[name] = {axis: symbol_label(dim) for axis, dim in leaf.dynamic.items()}
        outputs = [f"output_{k}" for k, _ in enumerate(request.output_tensor_paths)]
        buffer = io.BytesIO()
        dump = contextlib.nullcontext() if request.options.get("verbose") else _graph_to_log()
        with torch.no_grad(), dump, warnings.catch_warnings(record=True) as caught:
            # Deprecation: the verdict is what counts here.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", TracerWarning)
            torch.onnx.export(
                flat,
                tuple(leaf for _, leaf in pairs),
                buffer,  # type: ignore[arg-type]  # the legacy exporter writes into files too
                dynamo=False,
                input_names=list(names.values()),
                output_names=outputs,
                dynamic_axes=axes,
                **request.options,
            )
        if flat.dropped:
            raise ExportError(f"TorchScript drops outputs that are no tensors: {', '.join(flat.dropped)}")
        return Exported(buffer.getvalue(), names, flat.output_paths, notes=_frozen(caught))
