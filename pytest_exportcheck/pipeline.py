"""The stages of a case in their order: from a spec to a verdict. Knows nothing of pytest.

The rooms do the work; here they are put in a row, and what they raise is given its stage.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from .cases import CaseId
from .checks.captured import CapturedProgram, Run
from .checks.compare import Tolerances, compare_leaves
from .checks.eager import check_eager
from .checks.equivalence import check_patches
from .checks.frozen import Dims, dims_text, frozen_axes, frozen_in_program, onnx_dims, program_dims
from .checks.golden import GoldenError, GoldenGraph, compare_goldens, parse_golden, render_golden
from .checks.inputs import refuse_baked_inputs
from .checks.numbers import blame_stand_ins, check_observed_calls, refuse_unused_rules, tolerances_of
from .checks.sizes import check_other_sizes, refuse_unknown_sizes
from .checks.state import Held, differences, model_state
from .errors import (
    CompareError,
    ConvertError,
    ExportCheckError,
    ExportError,
    LoadError,
    ObserveError,
    PatchError,
    RunError,
    ShapesError,
    error_class,
)
from .exporters.base import (
    Exported,
    Exporter,
    ExportRequest,
    dynamic_arguments,
    flat_forward,
    named_arguments,
)
from .exporters.guards import CaptureWatch
from .exporters.registry import load_exporter
from .exporters.rnn import fresh_dispatch
from .observe.infer import ConstantLeaf
from .observe.observation import GraphObservation, Observation, last_lines, observe
from .patches.base import PatchMode
from .patches.evidence import evidence
from .patches.observed import Observed
from .patches.registry import load_patch_mode
from .pytrees import flatten_with_paths, register_flattening_functions
from .runtimes.base import open_session
from .runtimes.onnx_runtime import onnx_input_dims
from .spec import ModelSpec, build_calls, build_model

__all__ = ["CheckedObservation", "SpecRun", "check_shapes", "run_case"]

#: torch.onnx colours its messages whether or not anybody reads them on a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

#: Looks at a captured program: (program, what was decided by sizes, graph, `Activity` of the patches).
Probe = Callable[[torch.export.ExportedProgram, CaptureWatch, GraphObservation, Any], None]

#: What ``CaseId.patch_mode`` is for an exporter that brings its own patches.
OWN = "own"


class _Stages:
    """Tells the caller which stage runs, and adds up wall and CPU seconds per stage."""

    def __init__(self, enter: Callable[[str], None], record: dict[str, Any]) -> None:
        self._enter = enter
        self._durations: dict[str, dict[str, float]] = record.setdefault("durations", {})
        self.current = ""
        self._began = (0.0, 0.0)

    def __call__(self, name: str) -> None:
        self.stop()
        self.current = name
        self._began = (time.perf_counter(), time.process_time())
        self._enter(name)

    def stop(self) -> None:
        """Close the running stage."""
        if self.current:
            spent = self._durations.setdefault(self.current, {"wall_s": 0.0, "cpu_s": 0.0})
            spent["wall_s"] += time.perf_counter() - self._began[0]
            spent["cpu_s"] += time.process_time() - self._began[1]
            self.current = ""

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """A stage within a call of foreign code; an exception that leaves the block belongs to it."""
        outer = self.current
        self(name)
        try:
            yield
        except ExportCheckError:
            raise
        except (Exception, SystemExit) as error:
            raise _refusal(error, name, "the captured program cannot be converted") from error
        self(outer)


class CheckedObservation(Observation):
    """An observation with the text of its golden."""

    def golden_text(self, path: str) -> str:
        """Proposed content of the golden file that is shown as `path`.

        Raises
        ------
        ObserveError
            A graph is broken: a golden without its section would be accepted as whole.
        """
        if self.failures:
            raise self.broken(f"{path} is not written: it would lack a graph")
        return render_golden(self.golden_graphs(), path, self.spec.relative)

    def check(self, graph: GraphObservation) -> None:
        """Note a graph as broken where eager disagrees with itself, or the spec asks for sizes it has not."""
        device = torch.device(self.device).type
        try:
            refuse_unknown_sizes(self.spec, graph)
            check_eager(graph, tolerances_of(self.spec, device, self.dtype))
        except ObserveError as error:
            self.fail(graph.name, error)

    def broken(self, *more: str) -> ObserveError:
        """The error that names the broken graphs; `more`: lines before its details."""
        names = [name for name in self.failures if name]
        which = f"graph {names[0]} is" if len(names) == 1 else f"graphs {', '.join(names)} are"
        details = list(more)
        said: dict[str, list[str]] = {}
        for name, failure in self.failures.items():
            said.setdefault("\n".join([failure.message, *failure.details]), []).append(str(name))
        for text, sharing in said.items():
            first, *rest = text.splitlines()
            details += [f"{', '.join(sharing)}: {first}", *(f"  {line}" for line in rest)]
        return ObserveError(f"{which} broken ({len(names)} of {len(self.spec.graph_names)})", details=details)

    def golden_graphs(self) -> dict[str | None, GoldenGraph]:
        """The inferred shapes as golden sections.

        One golden serves every dtype of a spec: the case's dtype is written as the first of the matrix.
        """
        primary = self.spec.matrix.dtypes[0]
        graphs = {}
        for name, graph in self.graphs.items():
            inputs = {}
            for path, leaf in graph.shapes.leaves.items():
                text = str(leaf)
                if not isinstance(leaf, ConstantLeaf) and leaf.dtype == self.dtype:
                    text = text.replace(self.dtype, primary, 1)
                inputs[path] = text
            graphs[name] = GoldenGraph(inputs, dict(graph.shapes.containers))
        return graphs


def _device_index(device: str) -> str:
    """``cuda`` on the device of this worker: worker k takes cuda:(k mod count)."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return device
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return f"cuda:{int(worker) % torch.cuda.device_count()}" if worker.isdigit() else device


class SpecRun:
    """Everything of one spec in one process: its models and observations, made once, kept until `close`.

    Attributes
    ----------
    modes:
        Patch modes under names of the caller's own (a part of a mode), beside those that are registered.
    """

    def __init__(self, spec: ModelSpec, share: bool = True) -> None:
        self.spec = spec
        self.share = share
        self.modes: dict[str, PatchMode] = {}
        self._models: dict[tuple[str, str], torch.nn.Module | ExportCheckError] = {}
        self._observations: dict[tuple[str, str, str], CheckedObservation | ExportCheckError] = {}
        self._prepared: dict[tuple[str | None, ...], PatchMode | ExportCheckError] = {}

    def close(self) -> None:
        """Free the models and what was recorded."""
        self._models.clear()
        self._observations.clear()
        self._prepared.clear()
        gc.collect()

    def forget(self, device: str, dtype: str) -> None:
        """Build the model and observe it again for the next case: this one was changed."""
        self._models.pop((device, dtype), None)
        for key in [key for key in self._observations if key[:2] == (device, dtype)]:
            del self._observations[key]
        for made in [key for key in self._prepared if key[:2] == (device, dtype)]:
            del self._prepared[made]

    def mode(self, name: str) -> PatchMode:
        """The patch mode of a case; `PatchError` if there is none of that name."""
        if name in self.modes:
            return self.modes[name]
        try:
            return cast(PatchMode, load_patch_mode("none" if name == OWN else name, self.spec.folder))
        except LookupError as error:
            raise PatchError(str(error)) from None

    def share_observation(self, device: str, dtype: str, mode: str, other: str) -> None:
        """Let cases under `other` have what was observed under `mode`."""
        self._observations[device, dtype, other] = self._observations[device, dtype, mode]

    def drop_mode(self, name: str) -> None:
        """Forget a mode of `modes`, and what was observed under it."""
        self.modes.pop(name, None)
        for key in [key for key in self._observations if key[2] == name]:
            del self._observations[key]

    def model(self, device: str, dtype: str) -> torch.nn.Module:
        """The model; raises `LoadError`, the same one again if it failed before."""
        key = (device, dtype)
        if key not in self._models:
            try:
                self._models[key] = build_model(self.spec, _device_index(device), dtype)
            except ExportCheckError as error:
                self._models[key] = error
            except (Exception, SystemExit) as error:
                self._models[key] = LoadError(f"{type(error).__name__}: {error}", details=last_lines(error))
        model: torch.nn.Module = _value(self._models[key])
        return model

    def observe(
        self, device: str, dtype: str, mode: str = "none", enter: Callable[[str], None] = lambda stage: None
    ) -> CheckedObservation:
        """The observation under a patch mode; `LoadError` or `ObserveError`, again if it failed before."""
        key = (device, dtype, mode)
        if key not in self._observations:
            enter("load")
            model = self.model(device, dtype)
            enter("observe")
            try:
                self._observations[key] = self._observe(model, device, dtype, mode)
            except ExportCheckError as error:
                self._observations[key] = error
            except (Exception, SystemExit) as error:
                self._observations[key] = ObserveError(
                    f"{type(error).__name__}: {error}", details=last_lines(error)
                )
        checked: CheckedObservation = _value(self._observations[key])
        return checked

    def prepared(
        self, case: CaseId, mode: PatchMode, observation: CheckedObservation, target: str
    ) -> PatchMode:
        """The mode made for the case's graph, where it is one that wants to see the calls.

        Raises
        ------
        PatchError
            It cannot be made; again, if it failed before.
        """
        prepare = getattr(mode, "prepared", None)
        if prepare is None:
            return mode
        # The runtime decides which other patches are in place; without any, torch and onnx are the same.
        runtime = "torch" if target == "onnx" and not getattr(mode, "sources", True) else target
        key = (case.device, case.dtype, observation.patch_mode, case.graph, mode.name, runtime)
        if key not in self._prepared:
            state = model_state(observation.model, attributes=False)
            try:
                with (
                    register_flattening_functions(None),
                    self.mode(observation.patch_mode).apply(observation.model, "eager"),
                ):
                    self._prepared[key] = prepare(_observed(observation.graph(case.graph), target))
            except ExportCheckError as error:
                self._prepared[key] = error
            except (Exception, SystemExit) as error:
                self._prepared[key] = _refusal(error, "patch", f"patch mode {mode.name} cannot be made")
            changed = list(differences(state, model_state(observation.model, attributes=False)).values())
            if changed:
                raise PatchError(f"rewriting for patch mode {mode.name} changed the model: {changed[0]}")
        made: PatchMode = _value(self._prepared[key])
        return made

    def _observe(self, model: torch.nn.Module, device: str, dtype: str, mode: str) -> CheckedObservation:
        where = _device_index(device)
        with register_flattening_functions(None), self.mode(mode).apply(model, "eager"):
            plans = build_calls(self.spec, where, dtype)
            seen = observe(self.spec, model, plans, where, dtype, mode)
            checked = CheckedObservation(**vars(seen))
            for graph in list(checked.graphs.values()):
                checked.check(graph)
            if not checked.failures:
                # A rule may be about the outputs of a broken graph.
                refuse_unused_rules(self.spec, list(checked.graphs.values()))
        return checked


def _value(kept: Any) -> Any:
    if isinstance(kept, ExportCheckError):
        # A new one each time: pytest writes the traceback of this test into the exception it is given.
        raise type(kept)(kept.message, details=kept.details, facts=kept.facts)
    return kept


def _observed(graph: GraphObservation, target: str) -> Observed:
    """The graph as a patch mode sees it."""

    def export() -> Any:
        where = graph.target
        arguments = graph.example.arguments
        with fresh_dispatch(), flat_forward(where.module, where.method, where.signature, arguments) as kwargs:
            shapes = dynamic_arguments(kwargs, graph.shapes)
            with torch.no_grad():
                return torch.export.export(where.module, (), kwargs, dynamic_shapes=shapes, strict=False)

    def run() -> list[Any]:
        return [graph.eager(call.arguments) for call in graph.calls]

    return Observed(graph.target.module, run, export, target)


def check_shapes(observation: CheckedObservation, golden: str | None, path: str) -> None:
    """Compare the inferred dynamic shapes with the accepted ones.

    Where a graph is broken, the others are compared all the same.

    Parameters
    ----------
    golden:
        Text of the golden file, ``None`` if there is none.
    path:
        The file as shown in messages.

    Raises
    ------
    ShapesError
        They differ, or there is no golden; the details hold the diff or the proposed content.
    ObserveError
        A graph is broken, and nothing is wrong with the shapes of the others.
    """
    graphs = observation.golden_graphs()
    proposed = render_golden(graphs, path, observation.spec.relative)
    if golden is None:
        if observation.failures:
            raise observation.broken(
                f"{path} does not exist, and is not written before every graph of it is there",
                *(["proposed content, so far:", *proposed.splitlines()] if graphs else []),
            )
        raise ShapesError(
            f"no accepted dynamic shapes: {path} does not exist",
            details=["proposed content:", *proposed.splitlines()],
        )
    try:
        accepted = parse_golden(golden, path)
    except GoldenError as error:
        raise ShapesError(str(error), details=["proposed content:", *proposed.splitlines()]) from None
    # What is accepted for a broken graph is neither confirmed nor obsolete.
    known = {**{name: accepted[name] for name in observation.failures if name in accepted}, **graphs}
    ordered = {name: known[name] for name in observation.spec.graph_names if name in known}
    diff = compare_goldens(golden, render_golden(ordered, path, observation.spec.relative))
    if diff:
        broken = observation.broken() if observation.failures else None
        raise ShapesError(
            f"inferred dynamic shapes differ from {path}" + (f"; {broken.message}" if broken else ""),
            details=[*diff, *_explain(observation, golden), *(broken.details if broken else ())],
        )
    if observation.failures:
        raise observation.broken(
            f"the other graphs have the shapes of {path}" if graphs else "no graph is left"
        )


@register_flattening_functions(None)
def _explain(observation: CheckedObservation, golden: str) -> list[str]:
    """For each axis that was dynamic and is not now (or the reverse): its sizes in the calls."""
    notes = []
    accepted = parse_golden(golden)
    for name, proposed in observation.golden_graphs().items():
        old = accepted.get(name)
        graph = observation.graphs[name]
        for path, text in proposed.inputs.items():
            before = old.inputs.get(path) if old else None
            if before is None or before == text or "[" not in before or "[" not in text:
                continue
            dims_before = before[before.index("[") + 1 : -1].split(", ")
            dims_now = text[text.index("[") + 1 : -1].split(", ")
            for axis, (was, now) in enumerate(zip(dims_before, dims_now, strict=False)):
                if was != now and was.isdigit() != now.isdigit():
                    sizes = [
                        leaf.shape[axis]
                        for call in graph.seen
                        if isinstance(leaf := call.leaves().get(path), torch.Tensor) and leaf.dim() > axis
                    ]
                    kind = "dynamic" if not was.isdigit() else was
                    # A call that begins with an empty cache has no such leaf; where all do, nothing is said.
                    seen = f" (sizes {sizes} in {len(sizes)} calls)" if sizes else ""
                    now = "dynamic" if not now.isdigit() else now
                    notes.append(f"{path}: axis {axis} was {kind}, is now {now}{seen}")
    return notes


def _load_exporter(name: str) -> Exporter:
    try:
        return cast(Exporter, load_exporter(name))
    except LookupError as error:
        raise ExportError(str(error)) from None
    except Exception as error:
        raise ExportError(f"exporter {name} cannot be loaded: {type(error).__name__}: {error}") from error


def _refusal(error: BaseException, stage: str, what: str) -> ExportCheckError:
    """The failure of foreign code at `stage`: its first line, then as much of it as a person reads."""
    if isinstance(error, SystemExit):
        return error_class(stage)(f"{what}: sys.exit({error.code!r}) was called", details=_places(error))
    # torch.onnx wraps the reason several times; the innermost one says what happened.
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    texts = [[line for line in _COLOURS.sub("", str(link)).splitlines() if line.strip()] for link in chain]
    first = texts[-1][0] if texts[-1] else "no message"
    error = chain[-1]
    lines = [*texts[-1][1:15], *(line for text in texts[:-1] for line in text[:15])]
    details = [*dict.fromkeys(line for line in lines if line != first), *_places(chain[0])]
    return error_class(stage)(f"{what}: {type(error).__name__}: {first}", details=details)


#: Packages whose frames say little about where a model is refused.
_MACHINERY = ("torch", "onnxscript", "onnx_ir", "onnxruntime", "pytest_exportcheck", "sympy")


def _places(error: BaseException) -> list[str]:
    """Where it was raised: the last frame in the model's or the user's code, and the raising one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return []
    own = [
        frame
        for frame in frames
        if not any(f"{os.sep}{name}{os.sep}" in frame.filename for name in _MACHINERY)
    ]
    shown = [*own[-1:], frames[-1]] if own[-1:] != frames[-1:] else own[-1:]
    return [
        f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line or ''}".rstrip(": ")
        for frame in shown
    ]


def _observed_under(exporter: Exporter, case: CaseId, mode: PatchMode) -> str:
    """Name of the mode under which the calls of a case are observed."""
    own = getattr(exporter, "observed_under", None)
    if case.patch_mode == OWN and own is not None:
        return str(own)
    return str(case.patch_mode) if mode.observed_under_itself else "none"


def _export(
    exporter: Exporter,
    mode: PatchMode,
    observation: Observation,
    graph: GraphObservation,
    stages: _Stages,
    watch: CaptureWatch,
    captured: CapturedProgram,
    record: dict[str, Any],
    probe: Probe | None,
    share: bool,
) -> tuple[Exported, ExportRequest]:
    runtime = str(getattr(exporter, "target", "torch"))
    target = graph.target
    arguments = graph.example.arguments
    try:
        outputs = flatten_with_paths(graph.eager(arguments))
    except Exception as error:
        # Made from a call that lacks an argument and its stand-in: no exporter is to blame.
        raise _refusal(error, "observe", "eager refuses the arguments to export with") from error
    activity: Any = None
    exported: Any = None

    def on_capture(program: torch.export.ExportedProgram, run: Run | None = None) -> None:
        if probe is not None:
            probe(program, watch, graph, activity)
        captured.check(program, run)

    try:
        with (
            fresh_dispatch(),
            mode.apply(observation.model, runtime) as activity,
            flat_forward(target.module, target.method, target.signature, arguments) as kwargs,
        ):
            request = ExportRequest(
                model=target.module,
                kwargs=kwargs,
                dynamic_shapes=dynamic_arguments(kwargs, graph.shapes),
                dynamic_names=named_arguments(kwargs, graph.shapes),
                input_paths=[path for n, v in kwargs.items() for path, _ in flatten_with_paths(v, n)],
                output_paths=[path for path, _ in outputs],
                output_tensor_paths=[path for path, leaf in outputs if isinstance(leaf, torch.Tensor)],
                shapes=graph.shapes,
                options=dict(observation.spec.exporter_options.get(exporter.name, {})),
                stage=stages.inside,
                mode=mode,
                captured=on_capture,
                share=share,
            )
            watch.inputs(kwargs)
            with watch:
                exported = exporter.export(request)
            program = getattr(exported, "program", None)
            if probe is not None and isinstance(program, torch.export.ExportedProgram):
                probe(program, watch, graph, activity)
    finally:
        # Also of an export that failed: the patches it went through.
        found = evidence(activity, getattr(exported, "program", None))
        if found:
            record["patches"] = found
    return exported, request


def run_case(
    run: SpecRun,
    case: CaseId,
    enter: Callable[[str], None],
    record: dict[str, Any],
    probe: Probe | None = None,
) -> None:
    """Take one case through its stages.

    Parameters
    ----------
    enter:
        Called with the name of each stage as it begins.
    record:
        Filled with plain builtins: durations, errors per output, node counts, sizes tried.
    probe:
        Is given what was captured, before anything else is done with it. What it raises, if it is no
        `Exception`, ends the case without a verdict.

    Raises
    ------
    ExportCheckError
        The subclass of the stage that failed.
    """
    stages = _Stages(enter, record)
    try:
        _run_case(run, case, stages, record, probe)
    finally:
        stages.stop()
        record["peak_rss_mb"] = _peak_rss_mb()


def _peak_rss_mb() -> float | None:
    """Largest resident size of this process so far, in MiB; ``None`` where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    unit = 1024 * 1024 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def _run_case(
    run: SpecRun, case: CaseId, stages: _Stages, record: dict[str, Any], probe: Probe | None
) -> None:
    assert case.exporter is not None
    assert case.patch_mode is not None
    spec = run.spec
    stages("load")
    mode = run.mode(case.patch_mode)
    exporter = _load_exporter(case.exporter)
    under = _observed_under(exporter, case, mode)
    observation = run.observe(case.device, case.dtype, under, stages)
    graph = observation.graph(case.graph)
    example = graph.example
    record.update(
        observed_under=under,
        example={
            "call": example.call,
            "sizes": example.sizes,
            "resized": example.resized,
            "note": example.note,
        },
        warnings=list(graph.shapes.warnings),
    )
    tolerances = tolerances_of(spec, case.device, case.dtype)
    stages("patch")
    mode = run.prepared(case, mode, observation, str(getattr(exporter, "target", "torch")))
    _check_mode(mode, observation, graph, str(getattr(exporter, "target", "torch")), tolerances)
    with register_flattening_functions(None), run.mode(under).apply(observation.model, "eager"):
        stages("export")
        changed: list[str] = []
        state = model_state(observation.model, attributes=False)
        watch, captured = CaptureWatch(), CapturedProgram(spec, graph, tolerances, record)
        try:
            exported, request = _export(
                exporter, mode, observation, graph, stages, watch, captured, record, probe, run.share
            )
        except ExportCheckError:
            if captured.differs:
                blame_stand_ins(graph, tolerances)
            raise
        except (Exception, SystemExit) as error:
            refusal = _refusal(error, "export", f"{exporter.name} refuses the model")
            refusal.details[:0] = frozen_axes(graph.shapes, watch.frozen())
            raise refusal from error
        finally:
            # A verdict must not depend on what ran before it.
            changed = _changed(observation, graph, state, tolerances)
            if changed:
                run.forget(case.device, case.dtype)
        if changed:
            raise ExportError(
                f"{exporter.name} changed the model in place: {changed[0]}",
                details=[
                    *changed[1:8],
                    "export a copy, or put back what was changed; the next case gets a new model",
                ],
            )
        if not isinstance(exported, Exported):
            raise ExportError(f"{exporter.name} returned a {type(exported).__name__}, not an Exported")
        record.update(exported.facts)
        if isinstance(exported.program, torch.export.ExportedProgram):
            dims = program_dims(exported.program, request.input_paths)
            _fail_if_frozen(dims, graph, watch, ExportError, record)
        elif (declared := onnx_input_dims(exported.program)) is not None:
            stages("convert")
            dims = onnx_dims(declared, exported.input_names)
            _fail_if_frozen(dims, graph, watch, ConvertError, record)
        stages("session")
        try:
            session = open_session(exported, observation.device, request.output_paths)
        except ExportCheckError:
            raise
        except Exception as error:
            raise _refusal(error, "session", "the program cannot be loaded") from error
        record.update(session.facts)
        names = session.facts.get("onnx_inputs")
        if names is not None:
            absent = [
                leaf.path
                for leaf in graph.shapes.tensors()
                if exported.input_names.get(leaf.path) not in names
            ]
            record["unused_inputs"] = absent
            if absent:
                stages("convert")
                refuse_baked_inputs(graph, absent, tolerances)
        try:
            check_observed_calls(spec, graph, session, tolerances, stages, record)
        except (RunError, CompareError) as error:
            error.details += captured.on_observed_calls()
            raise
        stages("resize")
        if watch.missing:
            record["warnings"].append(f"comparisons of sizes cannot be read: there is no {watch.missing}")
        comparisons = watch.comparisons(graph.shapes)
        try:
            check_other_sizes(spec, graph, session, tolerances, record, comparisons, captured)
        finally:
            # Eager may keep what it saw (a table of positions that grew): the next case gets a new model.
            if _changed(observation, graph, state, tolerances):
                run.forget(case.device, case.dtype)


def _check_mode(
    mode: PatchMode, observation: Observation, graph: GraphObservation, target: str, tolerances: Tolerances
) -> None:
    """Whether the patches can be applied and leave every observed output as it is."""
    if mode.name == "none":
        return
    try:
        with register_flattening_functions(None):
            check_patches(mode, observation, graph, target, tolerances)
    except PatchError:
        raise
    except Exception as error:
        raise _refusal(error, "patch", f"patch mode {mode.name} cannot be applied") from error


def _changed(
    observation: Observation, graph: GraphObservation, before: Mapping[str, Held], tolerances: Tolerances
) -> list[str]:
    """What of the model is not as it was: weights, buffers and modes by value, the rest by the first call."""
    stateful = {label for seen in observation.graphs.values() for label in seen.stateful}
    found = differences(before, model_state(observation.model, attributes=False))
    if observation.model is graph.target.module:
        found = {label: sentence for label, sentence in found.items() if label not in stateful}
    else:
        # A target names its state by its own paths.
        ends = tuple(label.partition("`")[2] for label in stateful)
        found = {label: sentence for label, sentence in found.items() if not ends or not label.endswith(ends)}
    if found:
        return list(found.values())
    call = graph.calls[0]
    try:
        again = flatten_with_paths(graph.eager(call.arguments))
    except Exception as error:
        # It took these arguments when they were recorded.
        return [f"eager raises {type(error).__name__} after the export: {error}"]
    if all(result.ok for result in compare_leaves(call.output_leaves(), again, tolerances)):
        return []
    return ["eager answers differently after the export"]


def _fail_if_frozen(
    dims: Dims,
    graph: GraphObservation,
    watch: CaptureWatch,
    error: type[ExportCheckError],
    record: dict[str, Any],
) -> None:
    record["exported_shapes"] = dims_text(dims)
    record["specialised"] = frozen = frozen_in_program(dims, graph.shapes, watch.frozen())
    if frozen:
        raise error(f"{len(frozen)} dynamic axes became constants", details=frozen)


def facts_of(observation: CheckedObservation, golden: str | None) -> Mapping[str, Any]:
    """What the record of a spec's shapes check says about the observation, and about the accepted text."""
    warnings = [warning for graph in observation.graphs.values() for warning in graph.shapes.warnings]
    graphs = [name for name in observation.graphs if name]
    broken = [name for name in observation.failures if name]
    shapes = {name or "": dict(golden.inputs) for name, golden in observation.golden_graphs().items()}
    return {
        "calls": len(observation.calls),
        "graphs": graphs,
        "broken": broken,
        "warnings": warnings,
        "shapes": shapes,
        "accepted": _accepted(golden),
    }


def _accepted(golden: str | None) -> dict[str, dict[str, str]] | None:
    """Graph -> path -> shape; ``None`` where nothing is accepted, or it cannot be read."""
    try:
        graphs = parse_golden(golden) if golden is not None else None
    except GoldenError:
        return None
    return None if graphs is None else {name or "": dict(graph.inputs) for name, graph in graphs.items()}
