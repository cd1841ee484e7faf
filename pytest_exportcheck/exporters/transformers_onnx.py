"""``transformers-onnx``: `transformers.exporters.OnnxExporter`, with the patches it brings itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees.registration import without_our_flattening
from .base import Exported, ExportRequest, keywords_of
from .onnx_dynamo import quiet_logs, refuse_other_opset
from .tables import shared_tables

__all__ = ["TransformersOnnx"]


def _axes_by_tensor(value: Any, shapes: Any) -> Iterator[tuple[int, Any]]:
    """(id of a tensor, its entry in `shapes`), for two trees of the same structure."""
    if isinstance(value, torch.Tensor):
        yield id(value), shapes
    elif type(value) in _pytree.SUPPORTED_NODES and shapes is not None:
        children, _ = _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        entries = list(shapes.values()) if isinstance(shapes, dict) else list(shapes)
        for child, entry in zip(children, entries, strict=True):
            yield from _axes_by_tensor(child, entry)


def _relaid(value: Any, axes: Mapping[int, Any]) -> Any:
    """Dynamic shapes of `value` in the layout that is registered now, from the axes of each tensor."""
    if isinstance(value, torch.Tensor):
        return axes.get(id(value), {})
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    entries = [_relaid(child, axes) for child in children]
    return node.unflatten_fn(entries, context) if type(value) in _pytree.BUILTIN_TYPES else entries


def _path(name: str) -> str:
    """Our path of an output. Its layout has a constant of each sliding layer among them; ours has not."""
    return "" if name.endswith("._sliding_window_tensor") else name


def _watched_exporter() -> tuple[Any, list[tuple[torch.export.ExportedProgram, torch.nn.Module]]]:
    """(its exporter, the programs that it captures with their modules).

    `OnnxExporter` is the capture of `DynamoExporter` and some steps more: a class between the two in the
    order of inheritance sees what the one hands to the other. Since transformers 5.24 that has a method of
    its own, before it is what `DynamoExporter.export` returns.
    """
    from transformers.exporters import OnnxExporter
    from transformers.exporters.exporter_dynamo import DynamoExporter

    captures: list[tuple[torch.export.ExportedProgram, torch.nn.Module]] = []

    def seen(program: torch.export.ExportedProgram) -> None:
        # At once: the steps that follow change the graph.
        captures.append((program, program.module()))

    Watched: Any
    if hasattr(DynamoExporter, "export_program"):

        class Watched(DynamoExporter):  # type: ignore[misc,no-redef]
            def export_program(self, *args: Any, **kwargs: Any) -> Any:
                program, metadata = super().export_program(*args, **kwargs)
                seen(program)
                return program, metadata

    else:

        class Watched(DynamoExporter):  # type: ignore[misc,no-redef]
            def export(self, *args: Any, **kwargs: Any) -> Any:
                program = super().export(*args, **kwargs)
                seen(program)
                return program

    class WatchedOnnx(OnnxExporter, Watched):  # type: ignore[misc]
        pass

    return WatchedOnnx(), captures


class TransformersOnnx:
    """The ONNX exporter that ships with transformers.

    Options: the fields of its ``OnnxConfig`` (``opset_version``, ``optimize``, ``ort_fusions``).
    """

    name = "transformers-onnx"
    #: It traces sliding-window layers as full caches (the "hf" patches): calls must be recorded the same way.
    observed_under = "hf"

    def option_names(self) -> list[str]:
        """What ``exporter_options`` may name."""
        from transformers.exporters import OnnxConfig

        return keywords_of(OnnxConfig, "export_format", "dynamic_shapes")

    def export(self, request: ExportRequest) -> Exported:
        """Export with the inferred shapes; graph names are transformers' own paths."""
        from transformers.exporters import OnnxConfig
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
        from transformers.exporters.utils import get_leaf_tensors

        exporter, captures = _watched_exporter()
        axes = dict(_axes_by_tensor(request.kwargs, request.dynamic_shapes))
        leaves = get_leaf_tensors(dict(request.kwargs))

        @contextlib.contextmanager
        def theirs() -> Iterator[None]:
            # Its own registration has other leaves than ours for sliding layers, and its names count on it.
            with warnings.catch_warnings(), quiet_logs(), torch.no_grad(), without_our_flattening():
                # "tested with torch 2.12": the verdict is what counts here.
                warnings.simplefilter("ignore")
                register_cache_pytrees_for_model(request.model)
                yield

        def judge() -> None:
            for captured, module in captures:

                def run(tensors: dict[str, Any], module: torch.nn.Module = module) -> list[tuple[str, Any]]:
                    with theirs():
                        outputs = module(**tensors)
                    return [(path, leaf) for name, leaf in outputs.items() if (path := _path(name))]

                request.captured(captured, run)

        try:
            with theirs(), shared_tables(request.share):
                shapes = {name: _relaid(value, axes) for name, value in request.kwargs.items()}
                config = OnnxConfig(dynamic_shapes=shapes, **request.options)
                exported = exporter.export(request.model, dict(request.kwargs), config)
        except Exception:
            judge()  # A wrong capture may be why the conversion fails.
            raise
        judge()
        # An `ir.Model`; before transformers 5.24 in the `ONNXProgram` of torch.
        program: Any = exported.program if hasattr(exported, "program") else exported.model
        refuse_other_opset(request.options, program)
        inputs = {str(value.name) for value in program.graph.inputs}

        def graph_name(path: str) -> str | None:
            # A name that is on both sides is told apart by a prefix.
            return next((name for name in (f"input.{path}", path) if name in inputs), None)

        names = {path: name for path in request.input_paths if (name := graph_name(path)) is not None}
        extra = {
            name: leaf
            for path, leaf in leaves.items()
            if path not in names and (name := graph_name(path)) is not None
        }
        outputs = [str(value.name) for value in program.graph.outputs]
        paths = [
            _path(name if name in request.output_paths else name.removeprefix("output.")) for name in outputs
        ]
        return Exported(program, names, paths, extra_inputs=extra)
