"""One piece of a model: a module at one place where it is called, with its inputs, and how it exports."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checks.compare import Tolerances
from ..checks.max_diff import max_diff
from ..errors import ExportCheckError
from ..exporters.base import Exported, Exporter
from ..noise import quietly
from ..observe import CallSignature, RecordedCall
from ..observe.attach import without_forward_hooks
from ..observe.targets import Target
from ..pytrees import clone_tree, register_flattening_functions
from ..pytrees.string_type import string_type
from ..runtimes.base import Session, open_session
from .custom_ops import ModuleAsOperator, hold, release
from .onnx_custom_ops import open_with_custom_ops, table_of
from .piece_shapes import PieceShapes
from .piece_text import PieceText, short_dims
from .status import CustomOpStrategy, StatusExport, StatusExportCode
from .subject import EXPORTER_ALIASES, Subject, first_line, load_any_exporter, subject_from_calls

__all__ = ["ModelDiagnoseOutput", "failed_export"]

#: What ``replace_by_custom_op`` may be.
Strategy = bool | CustomOpStrategy | Mapping[Any, CustomOpStrategy]


class ModelDiagnoseOutput(PieceShapes, PieceText):
    """A module at one call site, and the pieces that it calls.

    Attributes
    ----------
    parent, children:
        The piece that calls this one, and those that it calls.
    name:
        Path from the parent's module, ``layers[0]``; a second call site of one module is ``act#2``.
    path:
        Path from the model, as in ``named_modules``.
    model, method_name, forward:
        The module, the method, and the method as it was when the piece was made.
    level:
        Depth in the tree.
    inputs:
        ``(args, kwargs)`` of the recorded calls, copied before the call.
    outputs:
        What they returned, as a tuple.
    n_calls:
        How many calls were made, recorded or not.
    exporter_status, exporter_outputs, exporter_discs:
        After `try_export`: the result, the outputs of the program for every call, their differences as
        `max_diff` gives them. What was exported is also an attribute of the exporter's name (``fx``).
    forward_custom_op_schema:
        Schema of the custom op that stood in for it last, ``None`` if there was none.

    Environment: ``DIAGNAME`` (name of a piece whose exceptions are raised even if ``quiet``),
    ``DIAGPRINTSTATUS`` (print every result), ``DIAGPRINTEXPORT`` (print what is handed to the exporter).
    """

    def __init__(
        self,
        parent: ModelDiagnoseOutput | None,
        name: str,
        model: torch.nn.Module,
        level: int = 0,
        method_name: str = "forward",
        *,
        path: str = "",
    ) -> None:
        self.parent = parent
        self.name = name
        self.path = path
        self.model = model
        self.level = level
        self.method_name = method_name
        self.forward = getattr(model, method_name)
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[tuple[Any, ...]] = []
        self.children: list[ModelDiagnoseOutput] = []
        self.n_calls = 0
        self.signature = inspect.signature(self.forward)
        self.forward_ordered_parameter_names = list(self.signature.parameters)
        self.forward_custom_op_schema: str | None = None
        self.last_error: BaseException | None = None
        parameter = next(model.parameters(), None)
        self.device = str(parameter.device) if parameter is not None else "cpu"
        self._results: list[Any] = []
        self._operator: ModuleAsOperator | None = None
        self._tried = False

    def __iter__(self) -> Iterator[ModelDiagnoseOutput]:
        """This piece and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child

    # names

    @property
    def full_name(self) -> str:
        """``mlp:LlamaMLP``."""
        return f"{self.name}:{type(self.model).__name__}"

    @property
    def dot_name(self) -> str:
        """The name behind two dots for each level: ``.... mlp - LlamaMLP``."""
        return f"{'..' * self.level} {self.name} - {type(self.model).__name__}"

    @property
    def custom_op_name(self) -> str:
        """``C_Model_layers_0_mlp``: of the custom op that stands in for it."""
        own = self.name if self.parent is not None else type(self.model).__name__
        clean = "".join(c if c.isalnum() else "_" for c in own).strip("_")
        return f"C_{clean}" if self.parent is None else f"{self.parent.custom_op_name}_{clean}"

    # recording

    def add_child(self, diag: ModelDiagnoseOutput) -> None:
        """Add a piece that this one calls."""
        self.children.append(diag)

    def add_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep copies of the inputs of a call; `TypeError` if they do not fit the signature."""
        self.signature.bind(*args, **kwargs)
        with register_flattening_functions(None):
            self.inputs.append(clone_tree((tuple(args), dict(kwargs))))

    def add_outputs(self, outputs: Any) -> None:
        """Keep a copy of what a call returned."""
        with register_flattening_functions(None):
            self._results.append(clone_tree(outputs))
        result = self._results[-1]
        self.outputs.append(result if isinstance(result, tuple) else (result,))
        self.n_calls = max(self.n_calls, len(self.outputs))

    # custom ops

    def is_customized(self) -> bool:
        """Whether a custom op stands in for it now."""
        return self._operator is not None

    def put_custom_op_inplace(
        self, verbose: int = 0, shape_functions: Mapping[str, Any] | None = None
    ) -> ModuleAsOperator:
        """Let a custom op stand in for the module until `remove_custom_op_inplace`."""
        if self._operator is None:
            with register_flattening_functions(None):
                self._operator = hold(
                    (id(self.model), self.method_name),
                    lambda: ModuleAsOperator(
                        self.model,
                        self.method_name,
                        self.custom_op_name,
                        self.inputs,
                        self._shape_functions(shape_functions),
                    ),
                )
            self.forward_custom_op_schema = next((s.schema for s in self._operator.structures), "")
        if verbose:
            print(f"[custom op] {self.full_name}: {self.forward_custom_op_schema}")
        return self._operator

    def remove_custom_op_inplace(self, verbose: int = 0) -> None:
        """Put the module's own method back; nothing happens if no custom op stands in for it."""
        if self._operator is None:
            return
        self._operator = None
        release((id(self.model), self.method_name))
        if verbose:
            print(f"[custom op] {self.full_name}: removed")

    @contextlib.contextmanager
    def _replaced(
        self,
        pieces: Sequence[ModelDiagnoseOutput],
        shape_functions: Mapping[str, Any] | None,
        verbose: int = 0,
    ) -> Iterator[list[ModuleAsOperator]]:
        """Custom ops for `pieces` inside the block; none is left after it, whatever happens."""
        done: list[ModelDiagnoseOutput] = []
        try:
            operators = []
            for piece in pieces:
                fresh = not piece.is_customized()
                operators.append(piece.put_custom_op_inplace(verbose, shape_functions))
                if fresh:
                    done.append(piece)
            yield operators
        finally:
            for piece in done:
                piece.remove_custom_op_inplace(verbose)

    # exporting

    def subject(
        self,
        exporter: Exporter,
        *,
        dynamic: bool = True,
        tolerances: Tolerances | None = None,
        options: dict[str, Any] | None = None,
    ) -> Subject:
        """The piece with its recorded calls, ready to be exported.

        Raises
        ------
        ObserveError
            One graph cannot serve the calls.
        """
        signature = _PieceSignature.of(self.forward)
        used = list(zip(self.inputs, self._results, strict=True))
        calls = [
            RecordedCall(k, signature.bind(args, kwargs), result, 0.0, len(args))
            for k, ((args, kwargs), result) in enumerate(used if dynamic else used[:1])
        ]
        target = Target(self.full_name, self.model, self.method_name, signature)
        subject = subject_from_calls(
            self.model, target, calls, exporter, tolerances=tolerances, options=options or {}
        )
        subject.device = self.device
        return subject

    def export_once(
        self,
        exporter: str | Exporter = "torch-export",
        exporter_kwargs: Mapping[str, Any] | None = None,
        *,
        quiet: bool = True,
        discrepancies: bool = True,
        dynamic: bool | None = None,
        tolerances: Tolerances | None = None,
        replaced: Sequence[ModelDiagnoseOutput] = (),
        shape_functions: Mapping[str, Any] | None = None,
        verbose: int = 0,
    ) -> StatusExport:
        """Export this piece as it is, with `replaced` pieces as custom ops, and run what comes out."""
        options = dict(exporter_kwargs or {})
        chosen = _chosen(exporter, options)
        quiet = quiet and os.environ.get("DIAGNAME", "") != self.name
        dynamic = len(self.inputs) > 1 if dynamic is None else dynamic
        code = StatusExportCode.CHILDC if replaced and self not in replaced else StatusExportCode.NONE
        if self in replaced:
            code |= StatusExportCode.CUSTOM
        step = "SHAPES"
        try:
            if not self.inputs:
                raise ValueError(f"{self.full_name} has no recorded call")
            with register_flattening_functions(None), torch.no_grad():
                with quietly():
                    subject = self.subject(chosen, dynamic=dynamic, tolerances=tolerances, options=options)
                self._debug_export(subject)
                step = "EXPORT"
                with (
                    quietly(),
                    # They run around the recorded calls: to an exporter they are part of the module.
                    without_forward_hooks(self.model),
                    self._replaced(replaced, shape_functions, verbose) as operators,
                ):
                    step = "CUSTOM"
                    table = table_of(chosen, operators)
                    step = "EXPORT"
                    if table:
                        known = subject.options.get("custom_translation_table", {})
                        subject.options["custom_translation_table"] = {**known, **table}
                    exported, paths = subject.export()
                    self._keep(exporter, exported)
                    status = StatusExport(code | StatusExportCode.OK, exported=exported.program)
                    if discrepancies:
                        step = "EVAL"
                        session = (
                            open_with_custom_ops(exported, operators)
                            if table
                            else open_session(exported, subject.device, paths)
                        )
                        self._compare(subject, session, status)
        except (Exception, SystemExit) as error:
            if not quiet:
                raise
            self.last_error = error
            status = failed_export(error, step, code)
        if not quiet and not status.is_ok():
            raise AssertionError(f"{self.full_name}: step={status.step}, {status.reason}")
        self._print_status(status, verbose)
        return status

    def _keep(self, exporter: str | Exporter, exported: Exported) -> None:
        name = exporter if isinstance(exporter, str) else exporter.name
        setattr(self, name.replace("-", "_"), exported.program)
        if EXPORTER_ALIASES.get(name, name).startswith("torch-export"):
            self.fx = exported.program

    def _compare(self, subject: Subject, session: Session, status: StatusExport) -> None:
        """Run the program on every recorded call; a difference makes `status` a failure."""
        self.exporter_outputs: list[Any] = []
        self.exporter_discs: list[dict[str, Any]] = []
        subject.sizes = "off"
        for sample in subject.samples():
            got = session.run(sample.tensors)
            self.exporter_outputs.append([value for _, value in got])
            have = dict(got)
            pairs = [(leaf, have.get(path)) for path, leaf in sample.expected if leaf is not None]
            self.exporter_discs.append(max_diff([a for a, _ in pairs], [b for _, b in pairs]))
            bad = [result for result in sample.compare(got, subject.tolerances) if not result.ok]
            if bad and status.is_ok():
                worst = max(bad, key=lambda result: (bool(result.reason), result.max_abs))
                what = worst.reason or f"max abs {worst.max_abs:.1e}, max rel {worst.max_rel:.1e}"
                status.status = status.status.remove(StatusExportCode.OK) | (
                    StatusExportCode.FAIL | StatusExportCode.DISC
                )
                status.step, status.reason = "DISC", f"{worst.path} on {sample.label}: {what}"

    def _debug_export(self, subject: Subject) -> None:
        if os.environ.get("DIAGPRINTEXPORT"):
            print(f"-- {self.full_name}: {subject.exporter.name}")
            print(f"   example={string_type(subject.example.arguments, with_shape=True)}")
            print(f"   dynamic shapes={short_dims(str(self.guess_dynamic_shapes()))}")

    def _print_status(self, status: StatusExport, verbose: int) -> None:
        if verbose or os.environ.get("DIAGPRINTSTATUS"):
            print(f"[try_export] {self.dot_name} --- {status.pretty_text()}")

    def strategy_of(self, given: Strategy) -> CustomOpStrategy:
        """The strategy for this piece; a dict is asked for its path, name, class and name of the class."""
        if isinstance(given, bool):
            return CustomOpStrategy.ONLY_IF_FAILING if given else CustomOpStrategy.NONE
        if isinstance(given, CustomOpStrategy):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"replace_by_custom_op is a CustomOpStrategy or a dict of them, not {given!r}")
        keys = (self.path, self.name, self.full_name, type(self.model), type(self.model).__name__)
        return next((given[key] for key in keys if key in given), CustomOpStrategy.NONE)

    def try_export(
        self,
        exporter: str | Exporter = "fx",
        exporter_kwargs: Mapping[str, Any] | None = None,
        verbose: int = 0,
        quiet: bool = True,
        discrepancies: bool = True,
        use_dynamic_shapes: bool | None = None,
        replace_by_custom_op: Strategy = CustomOpStrategy.NONE,
        atol: float | None = None,
        rtol: float | None = None,
        shape_functions: Mapping[str, Any] | None = None,
    ) -> StatusExport:
        """Export the piece, and those below it where it fails or the strategy asks for it.

        Parameters
        ----------
        exporter:
            Any exporter by name; ``fx``, ``onnx_dynamo`` and ``torch_script`` are names of ours too.
        exporter_kwargs:
            Options of the exporter.
        verbose:
            1 prints every result.
        quiet:
            False: an exception of an export is raised, and a difference is an `AssertionError`.
        discrepancies:
            Run every program on the recorded calls and compare with what the piece returned.
        use_dynamic_shapes:
            Whether axes that differ between the calls are dynamic; default: if there are several calls.
            False: the first call only.
        replace_by_custom_op:
            See `CustomOpStrategy`; or a dict, by the path, name or class of a piece; ``NONE`` for the others.
        atol, rtol:
            Default: by dtype, relative to the size of the output.
        shape_functions:
            Class name or `custom_op_name` -> number of the output -> function of the tensor inputs that
            returns a tensor of its shape, for custom ops.

        Returns
        -------
        StatusExport
            Of this piece; it is also kept as ``exporter_status``.
        """
        strategy = self.strategy_of(replace_by_custom_op)
        once: dict[str, Any] = {
            "exporter": exporter,
            "exporter_kwargs": exporter_kwargs,
            "discrepancies": discrepancies,
            "dynamic": use_dynamic_shapes,
            "tolerances": Tolerances(atol, rtol),
            "shape_functions": shape_functions,
            "verbose": verbose,
        }
        children = self.children
        later = bool(children) and strategy is CustomOpStrategy.ONLY_IF_FAILING
        if strategy is CustomOpStrategy.LOCAL and children:
            status = self.export_once(quiet=quiet, replaced=children, **once)
        else:
            status = self.export_once(quiet=quiet or later, **once)
        if later and not status.is_ok():
            whole = status
            status = self.export_once(quiet=True, replaced=children, **once)
            if status.is_ok():
                status.note = f"fails with its children: {whole.step} {whole.reason:.80}"
        if strategy is CustomOpStrategy.ALWAYS:
            status = self._as_custom_op(status, quiet, once)
        self.exporter_status = status
        self._tried = True
        goes_on = strategy in (CustomOpStrategy.ALWAYS, CustomOpStrategy.LOCAL)
        if goes_on or not status.is_ok() or StatusExportCode.CHILDC in status.status:
            for child in children:
                child.try_export(
                    exporter,
                    exporter_kwargs,
                    verbose,
                    quiet,
                    discrepancies,
                    use_dynamic_shapes,
                    replace_by_custom_op,
                    atol,
                    rtol,
                    shape_functions,
                )
        return status

    def _as_custom_op(self, real: StatusExport, quiet: bool, once: dict[str, Any]) -> StatusExport:
        """The piece as an opaque operator, which proves nothing, with the verdict on its real export."""
        opaque = self.export_once(quiet=quiet, replaced=[self], **once)
        if not real.is_ok():
            return StatusExport(
                real.status | StatusExportCode.CUSTOM,
                real.step,
                real.reason,
                opaque.exported,
                error=real.error,
            )
        return opaque


class _PieceSignature(CallSignature):
    """Of a piece: a parameter without default that no argument is given for was passed as ``None``."""

    def call(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        missing = [n for n in self.names if n not in arguments and n not in self.defaults]
        given = {**dict.fromkeys(missing), **arguments}
        names = [*self.names, *(name for name in given if name not in self.names)]
        return super().call({name: given[name] for name in names if name in given})


def failed_export(
    error: BaseException, step: str = "EXPORT", code: StatusExportCode = StatusExportCode.NONE
) -> StatusExport:
    """The result for a piece at whose `step` this was raised."""
    reason = short_dims(first_line(error))
    if not isinstance(error, ExportCheckError):
        reason = f"{type(error).__name__}: {reason}"
    return StatusExport(code | StatusExportCode.FAIL, step, reason, error=error)


def _chosen(exporter: str | Exporter, options: dict[str, Any]) -> Exporter:
    """The exporter; ``strict`` among the options of `torch.export` chooses between the two of ours."""
    if not isinstance(exporter, str):
        return exporter
    name = EXPORTER_ALIASES.get(exporter, exporter)
    if name.startswith("torch-export") and "strict" in options:
        name = "torch-export-strict" if options.pop("strict") else "torch-export"
    return load_any_exporter(name)
