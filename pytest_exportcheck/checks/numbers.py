"""A program against eager on every observed call."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import COMPLEX_OUTPUT, CompareError, ExportCheckError, ObserveError, RunError
from ..exporters.base import split_constants
from ..exporters.guards import Comparison
from ..observe.observation import GraphObservation
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths
from ..runtimes.base import Session, WritesInputs
from ..spec import ModelSpec
from ..spec.names import choices
from ..tracebacks import one_line, user_lines
from .choices import offer_ties
from .compare import LeafComparison, Tolerances, compare_leaves, table
from .complex_parts import given_in_parts
from .layout import lies_otherwise
from .padding import expand_mask, rules_of_call
from .rounding import MovedEager, compare_rounded, note_rounding
from .shortage import shortage
from .state import training_modules
from .thresholds import decided_lines
from .tight import too_tight
from .writes import WriteWatch, in_place

__all__ = ["blame_stand_ins", "check_observed_calls", "refuse_unused_rules", "tolerances_of"]

Leaves = list[tuple[str, Any]]


def tolerances_of(spec: ModelSpec, device: str, dtype: str) -> Tolerances:
    """The tolerances of a case: per device before per dtype before the general ones."""
    given = spec.tolerance
    layers = [given.devices.get(device), given.dtypes.get(dtype), given]  # type: ignore[call-overload]
    atol = next((layer.atol for layer in layers if layer is not None and layer.atol is not None), None)
    rtol = next((layer.rtol for layer in layers if layer is not None and layer.rtol is not None), None)
    outputs = {path: {"atol": bounds.atol, "rtol": bounds.rtol} for path, bounds in given.outputs.items()}
    return Tolerances(
        atol, rtol, outputs, getattr(torch, dtype, None), _places_of_tolerances(spec, device, dtype)
    )


def _places_of_tolerances(spec: ModelSpec, device: str, dtype: str) -> dict[str, str]:
    given = spec.tolerance
    layers = [
        (("tolerance", "devices", device), given.devices.get(device)),  # type: ignore[call-overload]
        (("tolerance", "dtypes", dtype), given.dtypes.get(dtype)),  # type: ignore[call-overload]
        (("tolerance",), given),
    ]
    bounds: list[tuple[tuple[str, ...], str, Any]] = [
        (("tolerance", "outputs", path), path, of) for path, of in given.outputs.items()
    ]
    bounds += [(where, "", layer) for where, layer in layers if layer is not None]
    places: dict[str, str] = {}
    for key in ("atol", "rtol"):
        for where, path, layer in bounds:
            if getattr(layer, key) is not None:
                places.setdefault(path, spec.place(*where, key))
    return places


def _inputs_by_path(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {path: leaf for name, value in arguments.items() for path, leaf in flatten_with_paths(value, name)}


@dataclass(frozen=True)
class Ran:
    """What a program did.

    Attributes
    ----------
    after:
        Path -> what is in each input afterwards.
    written:
        The inputs that it wrote to in place.
    """

    outputs: Leaves
    after: dict[str, Any]
    written: frozenset[str]


def _run(
    session: Session,
    arguments: Mapping[str, Any],
    what: str,
    error_class: type[ExportCheckError],
) -> Ran:
    tensors = clone_tree(split_constants(arguments)[0])
    run = session.run_in_place if isinstance(session, WritesInputs) else session.run
    watch = WriteWatch(tensors)
    try:
        outputs = run(tensors)
        return Ran(outputs, _inputs_by_path(tensors), frozenset(watch.written()))
    except ExportCheckError as error:
        raise error_class(f"{what}: {error.message}", details=error.details) from error
    except (Exception, SystemExit) as error:
        text = str(error).strip().splitlines() or [""]
        short = shortage(error)
        fails = f"fails on {what}" if short is None else f"has no memory for {what}{short}"
        raise error_class(
            f"{session.description} {fails}: {type(error).__name__}: {text[0]}", details=text[1:12]
        ) from error


def add_writes(
    session: Session, expected: Leaves, ran: Ran, arguments: Mapping[str, Any], by_eager: Mapping[str, Any]
) -> tuple[Leaves, Leaves]:
    """What is compared, of eager and of the program: outputs, and the inputs that one of them wrote to.

    Only of a program that can write to its inputs. Eager leaves an input that is not in `by_eager` as it was
    given.
    """
    if not isinstance(session, WritesInputs):
        return expected, ran.outputs
    given = _inputs_by_path(arguments)
    paths = [*by_eager, *(path for path in ran.after if path in ran.written and path not in by_eager)]
    return (
        [*expected, *((in_place(path), by_eager.get(path, given.get(path))) for path in paths)],
        [*ran.outputs, *((in_place(path), ran.after[path]) for path in paths if path in ran.after)],
    )


def _only_padding(
    expected: Leaves,
    got: Leaves,
    inputs: Mapping[str, Any],
    tolerances: Tolerances,
    eager: MovedEager | None = None,
) -> str | None:
    """A sentence if the difference is only where attention_mask is 0, ``None`` otherwise."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or bool(mask.bool().all()):
        return None
    where = {}
    for path, leaf in expected:
        if isinstance(leaf, torch.Tensor):
            for axis in (1, 2):
                expanded = expand_mask(mask, leaf.shape, axis)
                # Keys and values have heads on axis 1, the positions on axis 2.
                if expanded is not None and (axis == 2) == (leaf.dim() == 4):
                    where[path] = expanded
                    break
    results = compare_rounded(expected, got, tolerances, where, eager)
    if not all(result.ok for result in results):
        return None
    worst = max((result.max_abs for result in results), default=0.0)
    paths = [path for path in where if any(result.path == path and result.note for result in results)]
    return (
        f"they differ only where attention_mask is 0 (elsewhere max abs {worst:.1e}); "
        "to compare the other positions only:\n"
        "  compare: {"
        + ", ".join(
            f"{path}: {{where: attention_mask"
            + (", axis: 2}" if len(dict(expected)[path].shape) == 4 else "}")
            for path in paths
        )
        + "}"
    )


def _summary(results: Sequence[LeafComparison], tolerances: Tolerances) -> str:
    bad = [result for result in results if not result.ok]
    bounds = {(result.atol, result.rtol) for result in bad if not result.reason}
    tolerance = " differ"
    if len(bounds) == 1:
        atol, rtol = next(iter(bounds))
        tolerance = f" outside atol={atol:.1e} rtol={rtol:.1e}"
    return f"{len(bad)} of {counted(len(results), 'output')}{tolerance}"


def _merge(worst: dict[str, dict[str, Any]], results: Sequence[LeafComparison]) -> None:
    for result in results:
        known = worst.get(result.path)
        if known is None or (known["ok"] and not result.ok) or result.max_abs > known["max_abs"]:
            worst[result.path] = result.to_record()


def blame_stand_ins(graph: GraphObservation, tolerances: Tolerances) -> None:
    """After a failure: where eager itself does not take the stand-ins for missing arguments, say that.

    Every call is asked, not only the one that failed: the program may have been exported from another one.

    Raises
    ------
    ObserveError
        Eager refuses the completed arguments of a call, or answers otherwise than in the recorded call.
    """
    for call in graph.calls:
        missing = graph.shapes.missing(call)
        if not missing:
            continue
        what = (
            f"call {call.index} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}; "
            "with what stands in "
            "for it (observe.value_if_missing, or an empty cache) eager itself "
        )
        advice = "give another stand-in, or put the calls into groups with observe.graphs"
        try:
            again = flatten_with_paths(graph.eager(graph.shapes.complete(call)))
        except Exception as error:
            raise ObserveError(
                f"{what}fails: {one_line(error)}; {advice}", details=user_lines(error)
            ) from error
        results = compare_leaves(call.output_leaves(), again, tolerances)
        if not all(result.ok for result in results):
            raise ObserveError(f"{what}answers differently; {advice}", details=table(results))


def blame_train_mode(graph: GraphObservation, details: list[str]) -> None:
    """After a failure of a program that keeps no state: where modules in train mode change theirs, say that.

    Batch normalization of such a module is by the batch in eager, and by the running statistics in an ONNX
    model.

    Raises
    ------
    ObserveError
        A module in train mode changes parameters or buffers of its own during a call.
    """
    training = set(training_modules(graph.target.module))
    # "buffer `bn.running_mean`"
    owners = {label: label.split("`")[1].rpartition(".")[0] for label in sorted(graph.stateful)}
    changed = [label for label, owner in owners.items() if owner in training]
    if not changed:
        return
    modules = list(dict.fromkeys(f"`{owners[label]}`" if owners[label] else "the model" for label in changed))
    raise ObserveError(
        f"{', '.join(modules[:4])}{' and more' if len(modules) > 4 else ''} "
        f"{'is' if len(modules) == 1 else 'are'} in train mode though eval() was called on the model, and a "
        f"call changes {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}: the program keeps "
        "no state; no exporter is blamed, put the model into eval mode",
        details=details,
    )


def _refuse_blind_masks(spec: ModelSpec, compared: Mapping[str, bool]) -> None:
    """`compared`: path of an output with a ``where`` -> whether any position of any call was compared.

    Raises
    ------
    ObserveError
        Of an output nothing was compared: a pass would say nothing.
    """
    blind = [path for path, any_position in compared.items() if not any_position]
    if blind:
        masks = ", ".join(dict.fromkeys(rule.where for rule in spec.compare.values() if rule.where))
        raise ObserveError(
            f"nothing of {', '.join(blind[:3])}{' and more' if len(blind) > 3 else ''} is compared: "
            f"{masks} (compare: where) is 0 everywhere, in every call"
        )


def refuse_unused_rules(spec: ModelSpec, graphs: Collection[GraphObservation]) -> None:
    """A rule of the spec that is about no output of any call is a mistake: what it says is not done.

    Raises
    ------
    ObserveError
        A pattern of ``compare`` or ``tolerance.outputs`` matches nothing, or no call has the mask of a rule.
    """
    calls = [call for graph in graphs for call in graph.calls]
    outputs = list(dict.fromkeys(path for call in calls for path, _ in call.output_leaves()))
    outputs += [in_place(path) for graph in graphs for paths in graph.writes.values() for path in paths]
    inputs = dict.fromkeys(path for graph in graphs for path in graph.shapes.leaves)
    rules = [("compare", pattern) for pattern in spec.compare]
    for where in [*rules, *(("tolerance", "outputs", pattern) for pattern in spec.tolerance.outputs)]:
        if not any(fnmatchcase(path, where[-1]) for path in outputs):
            raise ObserveError(
                f"{spec.place(*where)}: no output of any call is called "
                f"{where[-1]!r}{choices(where[-1], outputs)}"
            )
    for pattern, rule in spec.compare.items():
        if rule.where and rule.where not in inputs:
            raise ObserveError(
                f"{spec.place('compare', pattern, 'where')}: no call has an input {rule.where!r}"
                f"{choices(rule.where, list(inputs))}"
            )


def check_observed_calls(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    tolerances: Tolerances,
    enter: Any,
    record: dict[str, Any],
    comparisons: Sequence[Comparison] = (),
) -> None:
    """Run the program on every observed call and compare with what eager returned.

    Parameters
    ----------
    comparisons:
        What the capture decided by the sizes of its example, to name what a failure is due to.

    Raises
    ------
    RunError, CompareError
        The first call that fails; the record has the worst error of every output up to there.
    ObserveError
        The spec is to blame: a stand-in, or a mask that leaves nothing to compare.
    ComparisonError
        A comparison of the user's own judges nothing.
    """
    worst: dict[str, dict[str, Any]] = {}
    record["calls"] = len(graph.calls)
    compared: dict[str, bool] = {}
    by_noise: CompareError | None = None
    for position, call in enumerate(graph.calls):
        what = f"call {position + 1} of {len(graph.calls)}" + (f" ({graph.name})" if graph.name else "")
        decided = functools.partial(
            decided_lines, comparisons, graph.example.sizes, graph.shapes.sizes.get(call.index, {})
        )
        enter("run")
        try:
            arguments = graph.shapes.complete(call)
        except ObserveError as error:
            raise RunError(error.message, details=error.details) from error
        try:
            ran = _run(session, arguments, what, RunError)
        except RunError as error:
            blame_stand_ins(graph, tolerances)
            error.details += decided([error.message])
            raise
        enter("compare")
        expected, got = add_writes(
            session, call.output_leaves(), ran, arguments, graph.writes.get(call.index, {})
        )
        inputs = _inputs_by_path(arguments)
        where = rules_of_call(spec, inputs, expected, "compare")
        eager = MovedEager.of(graph.target, call)
        results = compare_rounded(expected, got, tolerances, where, eager)
        for path, leaf in expected:
            mask = where.get(path)
            if isinstance(mask, torch.Tensor):
                compared[path] = compared.get(path, False) or not leaf.numel() or bool(mask.any())
        _merge(worst, results)
        record["outputs"] = list(worst.values())
        note_rounding(record, results, what)
        if not all(result.ok for result in results):
            blame_stand_ins(graph, tolerances)
            details = table(results)
            said = f"{_summary(results, tolerances)} ({session.description} against eager), {what}"
            tight = too_tight(results)
            if tight.text:
                # What another call shows may be the program's fault.
                by_noise = by_noise or CompareError(tight.text + said, details=details, facts=tight.facts)
                continue
            if not isinstance(session, WritesInputs):
                blame_train_mode(graph, details)
            if parts := given_in_parts(results, expected, got, tolerances):
                raise CompareError(
                    f"{counted(len(parts), 'output is', 'outputs are')} complex ({', '.join(parts[:4])}"
                    f"{' and more' if len(parts) > 4 else ''}), which ONNX has not: the program gives the "
                    f"right parts, as torch.view_as_real does ({session.description} against eager), {what}",
                    details=details,
                    facts={COMPLEX_OUTPUT: parts},
                )
            padding = None if where else _only_padding(expected, got, inputs, tolerances, eager)
            if padding:
                details.extend(padding.splitlines())
            details += offer_ties(session, results, expected, got, inputs, tolerances, where)
            details += lies_otherwise(inputs, _inputs_by_path(graph.example.arguments))
            details += decided()
            raise CompareError(said, details=details)
    if by_noise is not None:
        raise by_noise
    _refuse_blind_masks(spec, compared)
