"""``onnx-dynamo``: `torch.onnx.export(dynamo=True)` in its two steps, capture and conversion."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, OutputKind

from ..errors import ConvertError, ExportError
from ..plurals import counted
from .base import Exported, ExportRequest, keywords_of
from .capture_cache import KeptCapture
from .rnn import onnx_loops
from .tables import shared_tables

__all__ = ["OnnxDynamo", "capture", "graph_outputs", "match_inputs", "quiet_logs", "refuse_other_opset"]


def capture(request: ExportRequest) -> torch.export.ExportedProgram:
    """The capture that `torch.onnx.export` makes: sizes 0 and 1 are not special (``backed_size_oblivious``).

    Done here and not inside `torch.onnx.export` so that a refused capture is told from a failed conversion,
    and is not retried with other strategies, which takes long and never helped (measured, 57 families).
    """
    loops = onnx_loops() if _any_dynamic(request.dynamic_shapes) else contextlib.nullcontext()
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), loops, oblivious:
        return torch.export.export(
            request.model, (), kwargs=request.kwargs, dynamic_shapes=request.dynamic_shapes, strict=False
        )


def _any_dynamic(shapes: Any) -> bool:
    """Whether any axis is dynamic: only then does `torch.onnx.export` capture recurrent layers as loops."""
    if isinstance(shapes, torch.export.dynamic_shapes._DimHint):
        return True
    children = (
        shapes.values() if isinstance(shapes, dict) else shapes if isinstance(shapes, (list, tuple)) else ()
    )
    return any(map(_any_dynamic, children))


def match_inputs(
    program: torch.export.ExportedProgram, paths: list[str], graph_names: list[str]
) -> dict[str, str]:
    """Path of each input leaf -> name of the ONNX graph's input that carries it.

    The graph's names are those of the placeholders; an input that the model returns unchanged is renamed
    ``NAME_orig`` by torch 2.13, and one that it does not use may be gone.
    """
    return _matched([str(spec) for spec in program.graph_signature.user_inputs], paths, graph_names)


def _matched(placeholders: list[str], paths: list[str], graph_names: list[str]) -> dict[str, str]:
    names = set(graph_names)
    matched = {}
    for path, placeholder in zip(paths, placeholders, strict=True):
        for candidate in (placeholder, f"{placeholder}_orig"):
            if candidate in names:
                matched[path] = candidate
                break
    return matched


def graph_outputs(
    program: torch.export.ExportedProgram, paths: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """(path of each ONNX output in order, outputs that are constants by path).

    Raises
    ------
    ExportError
        The program has another number of outputs than the model.
    """
    outputs = [
        spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT
    ]
    return _by_path(
        [[argument.value] if isinstance(argument, ConstantArgument) else [] for argument in outputs], paths
    )


def _by_path(outputs: list[list[Any]], paths: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The same from the constants of a program: for each output its value, or nothing for a tensor."""
    if len(outputs) != len(paths):
        raise ExportError(
            f"the captured program has {counted(len(outputs), 'output')}, "
            f"the model has {len(paths)}: {', '.join(paths)}"
        )
    pairs = list(zip(paths, outputs, strict=True))
    return [path for path, held in pairs if not held], {path: held[0] for path, held in pairs if held}


def raise_if_no_tensor(program: torch.export.ExportedProgram, paths: list[str], error: BaseException) -> None:
    """Name the outputs that a failed conversion stumbled over because they are no tensors (torch 2.13).

    It takes the name of every output but ``None``. For the number 3 it raises "'int' object has no attribute
    'name'", which says nothing of the model.

    Raises
    ------
    ConvertError
        There are such outputs.
    """
    outputs = [
        spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT
    ]
    if len(outputs) != len(paths):
        return
    values = {
        path: argument.value
        for path, argument in zip(paths, outputs, strict=True)
        if isinstance(argument, ConstantArgument) and argument.value is not None
    }
    innermost = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    kinds = {type(value).__name__ for value in values.values()}
    if str(innermost) not in {f"{kind!r} object has no attribute 'name'" for kind in kinds}:
        return
    shown = ", ".join(f"{path} ({type(value).__name__} {value!r})" for path, value in values.items())
    raise ConvertError(
        f"torch.onnx.export converts no outputs that are no tensors: {shown}: "
        f"{type(innermost).__name__}: {innermost}",
        details=["return a tensor in its place, or leave it out of the outputs"],
    ) from error


def refuse_other_opset(options: Mapping[str, Any], model: Any) -> None:
    """An opset that was asked for and that torch.onnx cannot make: it only warns, and returns another one.

    Raises
    ------
    ConvertError
        The model has another opset; a pass would be about that one.
    """
    wanted, made = options.get("opset_version"), model.opset_imports.get("")
    if wanted is not None and made is not None and made != wanted:
        raise ConvertError(
            f"opset_version: {wanted} was asked for, and torch.onnx made a model of opset {made}",
            details=["choose an opset that it can make, or leave the choice to it"],
        )


def _converted(
    request: ExportRequest, program: torch.export.ExportedProgram, table: Any
) -> torch.onnx.ONNXProgram:
    options = dict(request.options)
    if table:
        options.setdefault("custom_translation_table", table)
    with warnings.catch_warnings(), quiet_logs(), shared_tables(request.share):
        # Harmless, one per axis and per export: a name that another axis of the same size took already.
        warnings.filterwarnings("ignore", message="# The axis name")
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        # The optimizer folds constants, log(0) of a bucket that nothing falls into among them.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"onnx\.reference")
        try:
            onnx_program = torch.onnx.export(
                program, dynamic_shapes=request.dynamic_names, verbose=False, **options
            )
        except Exception as error:
            raise_if_no_tensor(program, request.output_paths, error)
            raise
        assert onnx_program is not None
        refuse_other_opset(options, onnx_program.model)
        if request.mode is not None:
            request.mode.after_convert(onnx_program)
    return onnx_program


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Leave out what torch.onnx and onnxscript log of every export of a kind, and nobody can act upon.

    A custom translation takes functions or lists that have no ONNX type (torch 2.13 logs a line of each, and
    dispatches to it as it should); a node that is not folded is no fault of a model.
    """
    loggers = [logging.getLogger(name) for name in _NOISY]
    for logger in loggers:
        logger.addFilter(_says_something)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("Failed to infer the signature", "Skipping constant"))


_NOISY = (
    "torch.onnx._internal.exporter._registration",
    "torch.onnx._internal.exporter._core",
    "onnxscript.optimizer._constant_folding",
)


def _settings(request: ExportRequest) -> str:
    return f"{sorted(request.options.items())!r} {request.dynamic_names!r}"


def _converted_before(request: ExportRequest, kept: KeptCapture) -> Exported | None:
    """The conversion of an earlier case or run of the same capture; ``None`` where there is none."""
    if request.conversions is None or not kept.facts.converted:
        return None
    with request.stage("convert"):
        then = kept.facts
        found = request.conversions.find(then.converted, _settings(request), kept.weights, then.custom)
    if found is None:
        return None
    assert request.captures is not None
    request.captures.use(kept)
    model, facts = found
    paths, constants = _by_path(kept.facts.outputs, request.output_paths)
    names = [str(value.name) for value in model.graph.inputs]
    return Exported(
        torch.onnx.ONNXProgram(model, None),
        _matched(kept.facts.inputs, request.input_paths, names),
        paths,
        constants,
        facts={"fx_nodes": kept.facts.nodes, **facts},
        kept=kept,
    )


class OnnxDynamo:
    """The dynamo-based ONNX exporter of torch.

    Options: any keyword of `torch.onnx.export`, such as ``opset_version`` or ``optimize``.
    """

    name = "onnx-dynamo"
    target = "onnx"

    def option_names(self) -> list[str]:
        """What ``exporter_options`` may name."""
        return keywords_of(torch.onnx.export, "model", "args", "f", "kwargs", "verbose", "dynamic_shapes")

    def export(self, request: ExportRequest) -> Exported:
        """Capture, then convert; the ONNX graph keeps the names of the dynamic axes."""
        return self.convert(request, request.capture(lambda: capture(request), exporter=self.name))

    def convert(
        self, request: ExportRequest, program: torch.export.ExportedProgram | KeptCapture
    ) -> Exported:
        """The second step; a failure belongs to the stage ``convert``."""
        if isinstance(program, KeptCapture):
            found = _converted_before(request, program)
            if found is not None:
                request.captured(program)
                return found
            # What torch knows of its symbols was not kept: it can be run, and is not converted.
            assert request.captures is not None
            program = request.captures.anew()
        request.captured(program)
        nodes = len(program.graph.nodes)
        # The mode may have fixes for the graph (``hf``); they work in place.
        table = request.mode.before_convert(program) if request.mode is not None else None

        def make() -> torch.onnx.ONNXProgram:
            return _converted(request, program, table)

        facts: dict[str, Any] = {}
        if request.captures is not None:
            request.captures.converted(program)
        with request.stage("convert"):
            if request.conversions is None:
                onnx_program = make()
            else:
                settings = _settings(request)
                onnx_program, facts = request.conversions.obtain(program, settings, make)
        graph = onnx_program.model.graph
        paths, constants = graph_outputs(program, request.output_paths)
        return Exported(
            onnx_program,
            match_inputs(program, request.input_paths, [str(value.name) for value in graph.inputs]),
            paths,
            constants,
            facts={"fx_nodes": nodes, **facts},
        )
