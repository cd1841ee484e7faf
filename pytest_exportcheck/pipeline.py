"""The stages of a case in their order: from a spec to a verdict. Knows nothing of pytest.

The rooms do the work; here they are put in a row, and what they raise is given its stage.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from .cases import CaseId
from .checks.captured import CapturedProgram, Run
from .checks.compare import Tolerances, compare_leaves
from .checks.equivalence import check_patches
from .checks.frozen import Dims, dims_text, frozen_axes, frozen_in_program, onnx_dims, program_dims
from .checks.inputs import refuse_baked_inputs
from .checks.numbers import blame_stand_ins, check_observed_calls, tolerances_of
from .checks.own import load_own
from .checks.sizes import check_other_sizes
from .checks.state import Held, differences, kept_gradients, model_state
from .errors import (
    CompareError,
    ComparisonError,
    ConvertError,
    ExportCheckError,
    ExportError,
    ObserveError,
    PatchError,
    RunError,
)
from .exporters.base import (
    Exported,
    Exporter,
    ExportRequest,
    dynamic_arguments,
    flat_forward,
    named_arguments,
    target_of,
)
from .exporters.conversions import CaseConversions
from .exporters.guards import CaptureWatch
from .exporters.registry import load_exporter
from .exporters.rnn import fresh_dispatch
from .exporters.sizes_seen import see_comparisons
from .foreign_errors import refusal
from .observe.observation import GraphObservation, Observation
from .patches.base import PatchMode
from .patches.evidence import evidence
from .patches.reach import reach_of
from .plurals import counted
from .pytrees import flatten_with_paths, register_flattening_functions
from .runtimes.base import open_session
from .runtimes.onnx_runtime import onnx_input_dims
from .shapes_check import CheckedObservation, check_shapes, facts_of
from .spec import ModelSpec
from .spec.names import choices
from .spec_run import OWN, SpecRun
from .tracebacks import one_line, user_lines

__all__ = ["OWN", "CheckedObservation", "SpecRun", "check_shapes", "facts_of", "run_case"]

#: Looks at a captured program: (program, what was decided by sizes, graph, `Activity` of the patches).
Probe = Callable[[torch.export.ExportedProgram, CaptureWatch, GraphObservation, Any], None]


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
            raise refusal(error, name, "the captured program cannot be converted") from error
        self(outer)


def _load_exporter(name: str) -> Exporter:
    try:
        return cast(Exporter, load_exporter(name))
    except LookupError as error:
        raise ExportError(str(error)) from None
    except Exception as error:
        raise ExportError(
            f"exporter {name} cannot be loaded: {one_line(error)}", details=user_lines(error)
        ) from error


def _refuse_unknown_options(spec: ModelSpec, exporter: Exporter) -> None:
    """An option that the exporter has not is told before the model is loaded.

    Raises
    ------
    ExportError
        There is one.
    """
    names = getattr(exporter, "option_names", None)
    known = names() if names is not None else None
    for option in spec.exporter_options.get(exporter.name, {}):
        if known is not None and option not in known:
            place = spec.place("exporter_options", exporter.name, option)
            raise ExportError(f"{place}: {exporter.name} has no option {option!r}{choices(option, known)}")


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
    run: SpecRun,
    case: CaseId,
    anew: bool,
) -> tuple[Exported, ExportRequest]:
    runtime = target_of(exporter)
    target = graph.target
    arguments = graph.example.arguments
    try:
        outputs = flatten_with_paths(graph.eager(arguments))
    except Exception as error:
        # Made from a call that lacks an argument and its stand-in: no exporter is to blame.
        raise refusal(error, "observe", "eager refuses the arguments to export with") from error
    activity: Any = None
    exported: Any = None

    def on_capture(program: torch.export.ExportedProgram, run: Run | None = None) -> None:
        if probe is not None:
            probe(program, watch, graph, activity)
        captured.check(program, run)

    try:
        with (
            fresh_dispatch(),
            kept_gradients(observation.model),
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
                share=run.share,
                # A probe wants to see all that the patches do, in the conversion too.
                conversions=None
                if probe is not None or not run.share
                else CaseConversions(
                    run.conversions,
                    (exporter.name, case.device, case.dtype, case.graph),
                    str(case.patch_mode),
                    watch,
                    graph.shapes,
                    lambda custom: reach_of(mode, custom_operators=custom),
                    renew=anew,
                ),
            )
            watch.inputs(kwargs)
            with watch:
                exported = exporter.export(request)
                if getattr(exported, "notes", None):
                    see_comparisons(target, arguments, graph.shapes)
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
        try:
            _run_case(run, case, stages, record, probe, anew=probe is not None)
        except ExportCheckError as failure:
            if record.get("conversion") not in ("shared", "cached"):
                raise
            _run_anew(run, case, stages, record, failure)
    finally:
        stages.stop()


def _run_anew(
    run: SpecRun, case: CaseId, stages: _Stages, record: dict[str, Any], failure: ExportCheckError
) -> None:
    """The case with a conversion of its own: one that was made for another case or run fails none."""
    reused, spent = record["conversion"], record["durations"]
    record.clear()
    record["durations"] = spent
    _run_case(run, case, stages, record, None, anew=True)
    record["warnings"].append(
        f"with the {reused} conversion it fails at {failure.stage}, with a new one it passes: "
        f"{failure.message}"
    )


def _run_case(
    run: SpecRun, case: CaseId, stages: _Stages, record: dict[str, Any], probe: Probe | None, anew: bool
) -> None:
    assert case.exporter is not None
    assert case.patch_mode is not None
    spec = run.spec
    stages("load")
    mode = run.mode(case.patch_mode)
    exporter = _load_exporter(case.exporter)
    _refuse_unknown_options(spec, exporter)
    load_own(spec)
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
    mode = run.prepared(case, mode, observation, target_of(exporter))
    # What eager answers may depend on how often it was asked.
    ask_once = run.share and not graph.stateful
    if rounding := _check_mode(mode, observation, graph, target_of(exporter), tolerances, ask_once):
        record["rounding"] = rounding
    with register_flattening_functions(None), run.mode(under).apply(observation.model, "eager"):
        stages("export")
        changed: list[str] = []
        state = model_state(observation.model, attributes=False)
        watch, captured = CaptureWatch(), CapturedProgram(spec, graph, tolerances, record)
        try:
            exported, request = _export(
                exporter, mode, observation, graph, stages, watch, captured, record, probe, run, case, anew
            )
        except ExportCheckError:
            if captured.differs:
                blame_stand_ins(graph, tolerances)
            raise
        except (Exception, SystemExit) as error:
            failure = refusal(error, "export", f"{exporter.name} refuses the model")
            failure.details[:0] = frozen_axes(graph.shapes, watch.frozen())
            raise failure from error
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
        record["warnings"] += exported.notes
        if isinstance(exported.program, torch.export.ExportedProgram):
            dims = program_dims(exported.program, request.input_paths)
            _fail_if_frozen(dims, graph, watch, ExportError, record)
        elif (declared := onnx_input_dims(exported.program)) is not None:
            stages("convert")
            dims = onnx_dims(declared, exported.input_names)
            _fail_if_frozen(dims, graph, watch, ConvertError, record)
        if watch.missing:
            record["warnings"].append(f"comparisons of sizes cannot be read: there is no {watch.missing}")
        outcome = None
        if not anew and ask_once and run.outcomes.keep:
            outcome = run.outcomes.of(case, graph, exported, request, watch)
            if outcome is not None and (known := outcome.known()) is not None:
                record["warnings"] += known.pop("warnings")
                record.update(known)
                stages("resize")
                return
        seen, warned = set(record), len(record["warnings"])
        stages("session")
        try:
            session = open_session(exported, observation.device, request.output_paths)
        except ExportCheckError:
            raise
        except Exception as error:
            raise refusal(error, "session", "the program cannot be loaded") from error
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
        comparisons = watch.comparisons(graph.shapes)
        try:
            check_other_sizes(
                spec,
                graph,
                session,
                tolerances,
                record,
                comparisons,
                captured,
                lambda relation: watch.comparisons(graph.shapes, relation=relation),
                ask_once,
            )
        finally:
            # Eager may keep what it saw (a table of positions that grew): the next case gets a new model.
            if _changed(observation, graph, state, tolerances):
                run.forget(case.device, case.dtype)
                outcome = None
        if outcome is not None:
            shown = {key: value for key, value in record.items() if key not in seen}
            outcome.keep({**shown, "warnings": record["warnings"][warned:]})


def _check_mode(
    mode: PatchMode,
    observation: Observation,
    graph: GraphObservation,
    target: str,
    tolerances: Tolerances,
    share: bool,
) -> list[str]:
    """Whether the patches can be applied and leave every observed output as it is; what rounding explains."""
    if mode.name == "none":
        return []
    try:
        with register_flattening_functions(None):
            return check_patches(mode, observation, graph, target, tolerances, share)
    except (PatchError, ObserveError, ComparisonError):
        raise
    except Exception as error:
        raise refusal(error, "patch", f"patch mode {mode.name} cannot be applied") from error


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
        raise error(f"{counted(len(frozen), 'dynamic axis', 'dynamic axes')} became constant", details=frozen)
