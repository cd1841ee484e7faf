"""What is diagnosed: a target with its calls, how it is exported, and the inputs on which it is judged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from ..checks.compare import LeafComparison, Tolerances
from ..checks.own import Own
from ..checks.padding import rules_of_call
from ..checks.rounding import MovedEager, compare_rounded
from ..checks.ties import Ties
from ..errors import ExportCheckError, ObserveError
from ..exporters.base import (
    Exported,
    Exporter,
    ExportRequest,
    dynamic_arguments,
    flat_forward,
    named_arguments,
    split_constants,
    target_of,
)
from ..exporters.guards import CaptureWatch
from ..exporters.registry import load_exporter
from ..exporters.rnn import fresh_dispatch
from ..observe import (
    CallSignature,
    GraphShapes,
    InputObserver,
    RecordedCall,
    choose_example,
    infer_shapes,
    other_sizes,
    sizes_from_spec,
)
from ..observe.relations import broken_sizes, without
from ..observe.resize import ExportExample
from ..observe.targets import Target, target_text
from ..observe.variety import first_accepted, inputs_at
from ..patches.base import PatchMode
from ..pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from ..spec import ModelSpec

__all__ = [
    "EXPORTER_ALIASES",
    "Clock",
    "Sample",
    "Subject",
    "first_line",
    "load_any_exporter",
    "subject_from_calls",
    "subject_of",
]

#: Names in the documents of the piece-by-piece API -> ours.
EXPORTER_ALIASES = {"fx": "torch-export", "onnx_dynamo": "onnx-dynamo", "torch_script": "onnx-torchscript"}


def load_any_exporter(name: str) -> Exporter:
    """An exporter by our name or by the one that the documents use; `LookupError` if there is none."""
    return cast(Exporter, load_exporter(EXPORTER_ALIASES.get(name, name)))


def first_line(error: BaseException | str) -> str:
    """The first line of a message that says something."""
    text = error.message if isinstance(error, ExportCheckError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


class Clock:
    """A time budget. Steps ask before they begin; a step that runs is not interrupted.

    Attributes
    ----------
    begin:
        Called with the name of each step.
    """

    def __init__(self, seconds: float, begin: Callable[[str], None] = lambda step: None) -> None:
        self._began = time.perf_counter()
        self.seconds = seconds
        self.begin = begin

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left, not below 0."""
        return max(self.seconds - self.spent, 0.0)

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        return self.left <= 0


@dataclass(frozen=True)
class Sample:
    """Inputs on which a program is compared with eager.

    Attributes
    ----------
    label:
        ``call 2 of 3``, or the sizes: ``batch=1, seq=7``.
    arguments:
        By name, complete.
    expected:
        (path, leaf) of eager's outputs.
    eager:
        What rounding does to them.
    where:
        Positions that count, by path of an output.
    """

    label: str
    arguments: dict[str, Any]
    expected: list[tuple[str, Any]]
    eager: MovedEager
    where: Mapping[str, torch.Tensor | Ties | Own] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Any]:
        """Copies of the arguments that hold tensors."""
        copied: dict[str, Any] = clone_tree(split_constants(self.arguments)[0])
        return copied

    def compare(self, got: list[tuple[str, Any]], tolerances: Tolerances) -> list[LeafComparison]:
        """`got` against eager, leaf by leaf."""
        return compare_rounded(self.expected, got, tolerances, self.where, self.eager)


@dataclass
class Subject:
    """A target, the way it is exported, and its recorded calls.

    Attributes
    ----------
    model:
        The whole model, to which patches are applied.
    target:
        The method that is exported.
    example:
        Arguments for the exporter.
    mode, observed_under:
        The patch mode of the export, and the one under which the calls were recorded.
    sizes:
        As ``resize`` in a spec: ``auto``, ``off`` or values for symbols.
    spec:
        Whose ``compare`` rules hold.
    share:
        As `ExportRequest.share`.
    failed:
        Sizes at which the check found the failure: they are looked at before other sizes.
    """

    model: torch.nn.Module
    target: Target
    shapes: GraphShapes
    example: ExportExample
    calls: list[RecordedCall]
    exporter: Exporter
    tolerances: Tolerances = field(default_factory=Tolerances)
    mode: PatchMode | None = None
    observed_under: PatchMode | None = None
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    sizes: Any = "auto"
    spec: ModelSpec | None = None
    share: bool = True
    failed: Mapping[str, int] | None = None

    @property
    def kind(self) -> str:
        """What a patch mode is told that the program is for."""
        return target_of(self.exporter)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The registrations and patches under which the calls were recorded."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(register_flattening_functions(None))
            if self.observed_under is not None:
                stack.enter_context(self.observed_under.apply(self.model, "eager"))
            yield

    @contextlib.contextmanager
    def request(
        self,
        stage: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
        **options: Any,
    ) -> Iterator[ExportRequest]:
        """Inside the block the target is ready to be exported; `options` are added to the exporter's."""
        target, arguments = self.target, self.example.arguments
        outputs = flatten_with_paths(target.eager(arguments))
        with contextlib.ExitStack() as stack:
            stack.enter_context(fresh_dispatch())
            if self.mode is not None:
                stack.enter_context(self.mode.apply(self.model, self.kind))
            kwargs = stack.enter_context(
                flat_forward(target.module, target.method, target.signature, arguments)
            )
            yield ExportRequest(
                model=target.module,
                kwargs=kwargs,
                dynamic_shapes=dynamic_arguments(kwargs, self.shapes),
                dynamic_names=named_arguments(kwargs, self.shapes),
                input_paths=[path for n, v in kwargs.items() for path, _ in flatten_with_paths(v, n)],
                output_paths=[path for path, _ in outputs],
                output_tensor_paths=[path for path, leaf in outputs if isinstance(leaf, torch.Tensor)],
                shapes=self.shapes,
                options={**self.options, **options},
                stage=stage,
                mode=self.mode,
                share=self.share,
            )

    def export(
        self,
        watch: CaptureWatch | None = None,
        captured: Callable[..., None] = lambda program, run=None: None,
    ) -> tuple[Exported, list[str]]:
        """(what the exporter returns, paths of the outputs); raises whatever the exporter raises.

        `captured` is told the captured program, as in `ExportRequest`.
        """
        with self.request() as request, watch or contextlib.nullcontext():
            if watch is not None:
                watch.inputs(request.kwargs)
            return self.exporter.export(replace(request, captured=captured)), request.output_paths

    def samples(self) -> Iterator[Sample]:
        """The observed calls, then sizes that no call had; those that eager refuses are left out."""
        for position, call in enumerate(self.calls):
            try:
                arguments = self.shapes.complete(call)
            except ObserveError:
                continue
            yield self._sample(f"call {position + 1} of {len(self.calls)}", arguments, call.output_leaves())
        if self.sizes == "off":
            return
        listed = isinstance(self.sizes, Mapping)
        wanted = (
            sizes_from_spec(self.example, self.sizes)
            if listed
            else other_sizes(self.shapes, self.example, self.calls)
        )
        if self.failed is not None:
            # Those on the other side of a comparison are known to the check only.
            wanted = [dict(self.failed), *wanted]
        free = [] if listed else [(without(self.shapes, thin), thin) for thin in self.shapes.thin]
        broken = [(shapes, sizes) for shapes, thin in free for sizes in broken_sizes(thin, self.example)]
        for shapes, sizes in [*((self.shapes, sizes) for sizes in wanted), *broken]:
            text = ", ".join(f"{name}={size}" for name, size in sizes.items())
            try:
                # The inputs of the check, whose failure is explained.
                inputs = inputs_at(self.example, shapes, sizes, self.calls, self.shapes)
                accepted, _ = first_accepted(
                    inputs, lambda given: flatten_with_paths(clone_tree(self.target.eager(given)))
                )
            except Exception:  # no inputs of such sizes can be made
                continue
            if accepted is not None:
                made, expected = accepted
                yield self._sample(f"sizes {text}", made.arguments, expected)

    def sample_of_example(self) -> Sample:
        """What the exporter is given, and eager's answer."""
        arguments = self.example.arguments
        return self._sample(
            "the example", arguments, flatten_with_paths(clone_tree(self.target.eager(arguments)))
        )

    def _sample(self, label: str, arguments: dict[str, Any], expected: list[tuple[str, Any]]) -> Sample:
        inputs = {p: leaf for n, value in arguments.items() for p, leaf in flatten_with_paths(value, n)}
        where = rules_of_call(self.spec, inputs, expected, "compare") if self.spec is not None else {}
        return Sample(label, arguments, expected, MovedEager(self.target, lambda: arguments), where)


def _as_call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of one set of inputs: such a pair, a tuple of positions, a dict of names, a tensor.

    Raises
    ------
    TypeError
        It is none of these.
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict):
            return tuple(given[0]), dict(given[1])
        return tuple(given), {}
    if isinstance(given, torch.Tensor):
        return (given,), {}
    raise TypeError(f"inputs are (args, kwargs), a tuple or a dict, not a {type(given).__name__}")


def subject_of(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    exporter: str | Exporter = "onnx-dynamo",
    *,
    method: str = "forward",
    mode: PatchMode | None = None,
    tolerances: Tolerances | None = None,
    batch_dims: bool = False,
    **options: Any,
) -> Subject:
    """A subject from a model and sets of inputs, without a spec.

    Parameters
    ----------
    inputs:
        Each ``(args, kwargs)``, a tuple of positions or a dict of names; sizes that differ between them
        become dynamic axes.
    batch_dims:
        Whether axis 0 of every tensor is dynamic all the same.
    options:
        Of the exporter.
    """
    observer = InputObserver()
    with register_flattening_functions(None), torch.no_grad():
        with observer(model, store_n_calls=len(inputs), method_name=method):
            for given in inputs:
                args, kwargs = _as_call(given)
                getattr(model, method)(*clone_tree(args), **clone_tree(kwargs))
        signature = observer.info.signature
        assert signature is not None
        return subject_from_calls(
            model,
            Target(target_text("", model, method), model, method, signature),
            observer.info.calls,
            load_any_exporter(exporter) if isinstance(exporter, str) else exporter,
            mode=mode,
            tolerances=tolerances,
            batch_dims=batch_dims,
            options=options,
        )


def subject_from_calls(
    model: torch.nn.Module,
    target: Target,
    calls: list[RecordedCall],
    exporter: Exporter,
    *,
    mode: PatchMode | None = None,
    tolerances: Tolerances | None = None,
    batch_dims: bool = False,
    options: dict[str, Any] | None = None,
) -> Subject:
    """A subject from recorded calls; `ObserveError` if one graph cannot serve them."""
    signature: CallSignature = target.signature
    shapes = infer_shapes(
        calls, signature_order=signature.names, defaults=signature.defaults, batch_dims=batch_dims
    )
    example = choose_example(calls, shapes, target.accepts)
    return Subject(
        model,
        target,
        shapes,
        example,
        calls,
        exporter,
        tolerances or Tolerances(),
        mode,
        options=options or {},
        sizes="auto",
    )
