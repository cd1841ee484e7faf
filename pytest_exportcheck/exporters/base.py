"""What an exporter is: a name and one method. Each exporter has a file of its own."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ..dims import DimExpr
from ..observe import CallSignature, GraphShapes, dynamic_shapes_for, symbol_label
from ..pytrees import clone_tree, flatten_with_paths, is_constant
from .capture_cache import KeptCapture
from .captures import CaseCaptures
from .containers import SharedContainers
from .conversions import CaseConversions

__all__ = ["ExportRequest", "Exported", "Exporter", "flat_forward", "plain_copy", "target_of"]


@dataclass(frozen=True)
class ExportRequest:
    """What an exporter is given.

    Attributes
    ----------
    model:
        In eval mode. Inside the request its method takes exactly `kwargs`: constants are baked in already.
    kwargs:
        The arguments that hold tensors, by name: copies, free to be written into.
    dynamic_shapes:
        As `torch.export.export` takes them for `kwargs`: ``Dim.DYNAMIC`` on each dynamic axis.
    dynamic_names:
        The same structure with a name on each dynamic axis, as `torch.onnx.export` takes it.
    input_paths:
        Path of every tensor in `kwargs`, in flatten order.
    output_paths:
        Path of every leaf of the model's output (``None`` outputs included), in flatten order.
    output_tensor_paths:
        Those of `output_paths` that are tensors.
    mode:
        The active patch mode, or ``None``; it may have fixes for the captured graph.
    stage:
        ``with request.stage("convert"):`` says that a failure inside is one of conversion, not of capture.
    options:
        Options of this exporter from the spec (``exporter_options``).
    captured:
        To be called with the ExportedProgram before it is converted. It is run on every observed call, so
        that wrong numbers of the capture are told from those of the conversion (raises `ExportError`). Where
        its module does not take `kwargs` and return what the model returns, the second argument is a function
        that does: tensor arguments by name in, (path, value) of the outputs out.
    share:
        What never changes may be made once per process (``--no-share`` turns it off).
    conversions:
        Conversions that need not be made again; ``None``: make every one.
    captures:
        The same of captures.
    """

    model: torch.nn.Module
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    dynamic_names: dict[str, Any]
    input_paths: list[str]
    output_paths: list[str]
    output_tensor_paths: list[str]
    shapes: GraphShapes
    options: Mapping[str, Any]
    stage: Callable[[str], AbstractContextManager[None]]
    mode: Any = None
    captured: Callable[..., None] = lambda program, run=None: None
    share: bool = True
    conversions: CaseConversions | None = None
    captures: CaseCaptures | None = None

    def capture(
        self, make: Callable[[], torch.export.ExportedProgram], **settings: Any
    ) -> torch.export.ExportedProgram | KeptCapture:
        """What `make` captures, or the same capture of an earlier run.

        Parameters
        ----------
        settings:
            What `make` depends on beside the request's model, arguments, shapes and options.
        """
        return make() if self.captures is None else self.captures.obtain(make, settings)


@dataclass
class Exported:
    """What an exporter returns.

    Attributes
    ----------
    program:
        A `torch.export.ExportedProgram`, an ONNX model (``onnx.ModelProto``, ``torch.onnx.ONNXProgram``,
        ``onnx_ir.Model``, bytes, or a path), or a callable that takes the keyword arguments.
    input_names:
        ONNX: path of a leaf -> name of the graph's input. Inputs that the graph does not use may be absent.
    output_paths:
        ONNX: path of each output of the graph, in order; ``""`` for one that stands for no leaf of ours.
    constants:
        Outputs that the exporter turned into constants: path -> value.
    extra_inputs:
        ONNX: inputs that stand for no leaf of ours (a constant of a cache layer), by name, fed with these
        values.
    facts:
        For the record.
    notes:
        What a person should know of a program that passes too: for the warnings of the record.
    kept:
        The capture of an earlier run that `program` is, or was made of.
    """

    program: Any
    input_names: dict[str, str] = field(default_factory=dict)
    output_paths: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    extra_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: KeptCapture | None = None


@runtime_checkable
class Exporter(Protocol):
    """Turns a model into a program.

    Attributes
    ----------
    name:
        As in the spec's matrix and on the command line.

    Optional attributes: ``target`` (default ``"torch"``) tells a patch mode what the program is for;
    ``observed_under`` names the patch mode under which calls are recorded for an exporter with patches of its
    own; ``option_names()`` returns the names that ``exporter_options`` may have for it (without it, any).
    """

    name: str

    def export(self, request: ExportRequest) -> Exported:
        """Export; any exception is a failure at the stage ``export``."""
        ...


def keywords_of(function: Callable[..., Any], *ours: str) -> list[str]:
    """The keywords of `function` that an option may set: all but `ours`."""
    return [name for name in inspect.signature(function).parameters if name not in ours]


def target_of(exporter: Exporter) -> str:
    """What a program of `exporter` is for: ``torch`` unless it says otherwise."""
    return str(getattr(exporter, "target", "torch"))


def split_constants(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments that hold a tensor, the others)."""
    tensors: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, value in arguments.items():
        has_tensor = any(isinstance(leaf, torch.Tensor) for _, leaf in flatten_with_paths(value, name))
        (tensors if has_tensor else constants)[name] = value
    return tensors, constants


class _Argument(str):
    """Stands for the argument of that name."""

    __slots__ = ()


@contextlib.contextmanager
def flat_forward(
    model: torch.nn.Module, method: str, signature: CallSignature, arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Inside the block ``model.forward`` takes the tensor arguments by keyword; constants are baked in.

    `torch.export` reads ``forward``'s signature: with ``**kwargs`` in it, every spelling of dynamic shapes
    fails (torch 2.13, pytorch#150022), and a constant argument would become an input of the program.

    Yields
    ------
    dict
        The tensor arguments, copied.
    """
    tensors, constants = split_constants(arguments)
    had = vars(model).get("forward")
    original = getattr(model, method)
    order = list(arguments)
    training = [(module, module.training) for module in model.modules()]
    plain = {name for name, value in constants.items() if is_constant(value)}
    # Where each argument goes is worked out here: strict mode traces what `forward` does, in Python too.
    given_positional, keyword = signature.call({name: _Argument(name) for name in order})
    positional = [
        (str(item), None) if isinstance(item, _Argument) else (None, item) for item in given_positional
    ]
    names = {key: str(name) for key, name in keyword.items()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(tensors, args, strict=False)) | kwargs
        merged = {}
        for name in order:
            if name in given:
                merged[name] = given[name]
            elif name in plain:
                merged[name] = constants[name]
            elif name in constants:
                # An empty cache holds no tensor: the trace fills it, so each call gets one of its own.
                merged[name] = clone_tree(constants[name])
        return original(
            *[value if name is None else merged[name] for name, value in positional],
            **{key: merged[name] for key, name in names.items()},
        )

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in tensors]
    )
    forward.replaced = had  # type: ignore[attr-defined]  # for a copy of the model that is called as it was
    model.forward = forward
    containers = SharedContainers(model)
    try:
        yield clone_tree(tensors)
    finally:
        containers.put_back()
        if had is None:
            vars(model).pop("forward", None)
        else:
            model.forward = had
        # Exporters switch modes and restore those of a wrapper: a model left in train mode has dropout in
        # eager.
        for module, mode in training:
            module.training = mode


def plain_copy(module: torch.nn.Module, shared: dict[int, Any]) -> torch.nn.Module:
    """A deep copy of `module`, but for `shared` (by identity), with the ``forward`` that it has outside of
    `flat_forward`."""
    copied = copy.deepcopy(module, shared)
    forward: Any = vars(copied).get("forward")
    if hasattr(forward, "replaced"):
        # It calls the original module.
        vars(copied).pop("forward")
        if forward.replaced is not None:
            vars(copied)["forward"] = forward.replaced
    return copied


def dynamic_arguments(
    kwargs: Mapping[str, Any], shapes: GraphShapes, leaf: Callable[[DimExpr], Any] | None = None
) -> dict[str, Any]:
    """``dynamic_shapes`` for `kwargs`; `leaf` makes the entry of one axis (default ``Dim.DYNAMIC``)."""
    make = leaf or (lambda dim: torch.export.Dim.DYNAMIC)
    return {name: dynamic_shapes_for(value, shapes, name, make) for name, value in kwargs.items()}


def named_arguments(kwargs: Mapping[str, Any], shapes: GraphShapes) -> dict[str, Any]:
    """``dynamic_shapes`` with names, as `torch.onnx.export` takes them."""
    return dynamic_arguments(kwargs, shapes, symbol_label)
