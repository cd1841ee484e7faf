"""The stages of a case in their order: from a spec to a verdict. Knows nothing of pytest.

The rooms do the work; here they are put in a row, and what they raise is given its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from .cases import CaseId
from .checks.captured import CapturedProgram, Run, runner_of
from .checks.case_leaks import Leftovers
from .checks.compare import Tolerances, compare_leaves
from .checks.equivalence import check_patches
from .checks.frozen import onnx_dims, program_dims
from .checks.inputs import check_unread_inputs, inputs_by_output, refuse_baked_inputs
from .checks.numbers import check_observed_calls, tolerances_of
from .checks.own import load_own
from .checks.remains import TraceRemains
from .checks.sizes import check_other_sizes
from .checks.state import Held, differences, kept_gradients, model_state
from .checks.uniform import check_uniform_inputs
from .errors import (
    ComparisonError,
    ConvertError,
    ExportCheckError,
    ExportError,
    ObserveError,
    PatchError,
)
from .explained import (
    explained_by,
    explained_by_capture,
    explained_by_captured,
    explained_by_masks,
    fail_if_frozen,
    name_cures,
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
from .exporters.capture_cache import KeptCapture
from .exporters.captures import CaseCaptures, UnusableCapture
from .exporters.conversions import CaseConversions
from .exporters.guards import CaptureWatch
from .exporters.registry import load_exporter
from .exporters.rnn import fresh_dispatch
from .exporters.sizes_seen import see_comparisons
from .foreign_errors import refusal
from .observe.observation import GraphObservation, Observation
from .patches.base import PatchMode
from .patches.engine import uncounted
from .patches.evidence import diffs_of, evidence
from .patches.reach import parts_of, reach_of
from .pytrees import flatten_with_paths, register_flattening_functions
from .runtimes.base import open_session
from .runtimes.onnx_runtime import onnx_input_dims
from .shapes_check import CheckedObservation, check_shapes, facts_of
from .spec import ModelSpec
from .spec.imports import sibling_imports
from .spec.names import choices
from .spec_run import OWN, SpecRun
from .stages import Stages
from .tracebacks import one_line, user_lines

__all__ = ["OWN", "CheckedObservation", "SpecRun", "check_shapes", "facts_of", "run_case"]

#: Looks at a captured program: (program, what was decided by sizes, graph, `Activity` of the patches).
Probe = Callable[[torch.export.ExportedProgram, CaptureWatch, GraphObservation, Any], None]


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
    stages: Stages,
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
        answer = graph.eager(arguments)
        outputs = flatten_with_paths(answer)
    except Exception as error:
        # Made from a call that lacks an argument and its stand-in: no exporter is to blame.
        raise refusal(error, "observe", "eager refuses the arguments to export with") from error
    activity: Any = None
    exported: Any = None
    captures: CaseCaptures | None = None
    # What eager answers may depend on how often it was asked.
    repeatable = run.share and not anew and not graph.stateful and run.outcomes.keep

    @uncounted()
    def on_capture(program: Any, runner: Run | None = None) -> None:
        if probe is not None:
            probe(program, watch, graph, activity)
        replay = run.outcomes.replay(case, graph, program, watch) if repeatable and runner is None else None
        known = None if replay is None else replay.known()
        if known is not None:
            captured.adopt(known, lambda: runner_of(_loaded(program)))
            return
        captured.check(_loaded(program), runner)
        if replay is not None and "not_run" not in record["captured"]:
            replay.keep(record["captured"])

    try:
        with (
            fresh_dispatch(),
            kept_gradients(observation.model),
            mode.apply(observation.model, runtime) as activity,
            flat_forward(target.module, target.method, target.signature, arguments) as kwargs,
        ):
            input_paths = [path for n, v in kwargs.items() for path, _ in flatten_with_paths(v, n)]
            if probe is None and run.captures is not None:
                settings = {"method": target.method, "target": runtime, "mode": mode.name}
                captures = CaseCaptures(
                    run.captures,
                    target.module,
                    kwargs,
                    arguments,
                    answer,
                    parts_of(mode, observation.model),
                    watch,
                    graph.shapes,
                    input_paths,
                    settings,
                    renew=anew,
                    aside=uncounted,
                )
            request = ExportRequest(
                model=target.module,
                kwargs=kwargs,
                dynamic_shapes=dynamic_arguments(kwargs, graph.shapes),
                dynamic_names=named_arguments(kwargs, graph.shapes),
                input_paths=input_paths,
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
                    aside=uncounted,
                ),
                captures=captures,
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
        kept = getattr(exported, "kept", None)
        if found:
            if kept is not None:
                # Neither captured nor converted here: what was seen of them then.
                then = kept.facts
                found |= {"called": dict(then.patch_calls), "nodes": dict(then.patch_nodes)}
            record["patches"] = found
        if captures is not None:
            record.update(captures.facts)
            _note(record, captures.notes)
    return exported, request


def _loaded(program: Any) -> torch.export.ExportedProgram:
    """A capture of an earlier run is loaded when it is needed."""
    if not isinstance(program, KeptCapture):
        return cast(torch.export.ExportedProgram, program)
    try:
        return program.program()
    except Exception as error:
        raise UnusableCapture(f"a kept capture is ignored: {type(error).__name__}: {error}") from error


def _note(record: dict[str, Any], notes: Sequence[str]) -> None:
    """Add to what the record says of the cache."""
    if notes:
        record["cache_notes"] = list(dict.fromkeys([*notes, *record.get("cache_notes", ())]))


def _keep_capture(captures: CaseCaptures | None, record: dict[str, Any]) -> None:
    """The case passed: what it captured may serve another run."""
    if captures is not None:
        captures.notes.clear()
        captures.write(record.get("patches") or {})
        _note(record, captures.notes)


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
    stages = Stages(enter, record)
    try:
        # All through: exporters and models import when they run, and patches look their targets up.
        with sibling_imports(run.spec.folder):
            try:
                _run_case(run, case, stages, record, probe, anew=probe is not None)
            except UnusableCapture as unusable:
                _run_anew(run, case, stages, record, None)
                _note(record, [str(unusable)])
            except ExportCheckError as failure:
                if _reused(record) is None:
                    name_cures(failure, case)
                    raise
                try:
                    _run_anew(run, case, stages, record, failure)
                except ExportCheckError as again:
                    name_cures(again, case)
                    raise
    finally:
        stages.stop()


def _run_anew(
    run: SpecRun, case: CaseId, stages: Stages, record: dict[str, Any], failure: ExportCheckError | None
) -> None:
    """The case with what it makes itself: what was made for another case or run fails none."""
    reused, spent = _reused(record), record["durations"]
    record.clear()
    record["durations"] = spent
    _run_case(run, case, stages, record, None, anew=True)
    if failure is not None:
        record["warnings"].append(
            f"with the {reused} it fails at {failure.stage}, with a new one it passes: {failure.message}"
        )


def _reused(record: Mapping[str, Any]) -> str | None:
    """What of a case was not made by it: ``cached conversion``."""
    if record.get("conversion") in ("shared", "cached"):
        return f"{record['conversion']} conversion"
    return "cached capture" if record.get("capture") == "cached" else None


def _run_case(
    run: SpecRun, case: CaseId, stages: Stages, record: dict[str, Any], probe: Probe | None, anew: bool
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
    with Leftovers(observation.model).noted(record):
        _run_observed(run, case, stages, record, probe, anew, exporter, mode, observation, under)


def _run_observed(
    run: SpecRun,
    case: CaseId,
    stages: Stages,
    record: dict[str, Any],
    probe: Probe | None,
    anew: bool,
    exporter: Exporter,
    mode: PatchMode,
    observation: CheckedObservation,
    under: str,
) -> None:
    """The stages after `observe`."""
    spec, graph = run.spec, observation.graph(case.graph)
    tolerances = tolerances_of(spec, case.device, case.dtype)
    stages("patch")
    mode = run.prepared(case, mode, observation, target_of(exporter))
    if diffs := diffs_of(mode, observation.model, target_of(exporter)):
        record["rewritten"] = diffs
    # What eager answers may depend on how often it was asked.
    ask_once = run.share and not graph.stateful
    if rounding := _check_mode(mode, observation, graph, target_of(exporter), tolerances, ask_once):
        record["rounding"] = rounding
    with register_flattening_functions(None), run.mode(under).apply(observation.model, "eager"):
        stages("export")
        changed: list[str] = []
        state = model_state(observation.model, attributes=False)
        watch, captured = CaptureWatch(), CapturedProgram(spec, graph, tolerances, record)
        remains = TraceRemains(observation.model)
        try:
            with explained_by_capture(exporter, graph, tolerances, watch, captured):
                exported, request = _export(
                    exporter,
                    mode,
                    observation,
                    graph,
                    stages,
                    watch,
                    captured,
                    record,
                    probe,
                    run,
                    case,
                    anew,
                )
        finally:
            # A verdict must not depend on what ran before it.
            changed = _changed(observation, graph, state, tolerances)
            if changed:
                run.forget(case.device, case.dtype)
            if left := remains.take_out():
                record["warnings"].append(
                    f"the trace leaves fake tensors or symbolic sizes in {', '.join(left[:4])}, which a "
                    "later export or call would take for its own: they are taken out here; elsewhere export "
                    "in a process of its own, or compute in every call what is kept there"
                )
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
        if request.captures is not None:
            _note(record, request.captures.notes)  # Beside those of the conversion.
        if isinstance(exported.program, KeptCapture):
            fail_if_frozen(exported.program.facts.dims, graph, watch, ExportError, record)
        elif isinstance(exported.program, torch.export.ExportedProgram):
            own = program_dims(exported.program, request.input_paths)
            fail_if_frozen(own, graph, watch, ExportError, record)
        elif (declared := onnx_input_dims(exported.program)) is not None:
            stages("convert")
            dims = onnx_dims(declared, exported.input_names)
            fail_if_frozen(dims, graph, watch, ConvertError, record)
        if watch.missing:
            record["warnings"].append(f"comparisons of sizes cannot be read: there is no {watch.missing}")
        outcome = None
        if not anew and ask_once and run.outcomes.keep:
            outcome = run.outcomes.of(case, graph, exported, request, watch)
            if outcome is not None and (known := outcome.known()) is not None:
                record["warnings"] += known.pop("warnings")
                record.update(known)
                stages("resize")
                _keep_capture(request.captures, record)
                return
        seen, warned = set(record), len(record["warnings"])
        stages("session")
        if isinstance(exported.program, KeptCapture):
            exported.program = _loaded(exported.program)
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
                with explained_by(exported):
                    refuse_baked_inputs(graph, absent, tolerances)
        comparisons = watch.comparisons(graph.shapes)
        by_masks = explained_by_masks(spec, graph, session, tolerances)
        with explained_by_captured(captured), by_masks, explained_by(exported):
            check_observed_calls(spec, graph, session, tolerances, stages, record, comparisons)
        read = inputs_by_output(exported, request, session)
        by_any = None if read is None else frozenset[str]().union(*read.values())
        with explained_by(exported):
            if read is not None:
                check_unread_inputs(spec, graph, session, read, tolerances, record, captured.at)
            check_uniform_inputs(spec, graph, session, by_any, tolerances, record, captured.at)
        stages("resize")
        captures = request.captures
        try:
            with explained_by(exported):
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
                outcome, captures = None, None
        _keep_capture(captures, record)
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
