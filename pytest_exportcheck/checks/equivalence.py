"""Eager with the patches of a mode against eager without them, on every observed call, before any export.

A patch that changes what the model computes makes every later number mean nothing: a program that agrees with
patched eager is a program of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import ExportCheckError, ObserveError, PatchError
from ..observe import InputObserver
from ..observe.observation import GraphObservation, Observation
from ..observe.targets import find_module
from ..patches.base import PatchMode
from ..patches.engine import Activity
from ..patches.modes import PatchList
from ..plurals import counted
from ..pytrees import flatten_with_paths
from ..spec import build_calls
from ..tracebacks import one_line, user_lines
from .compare import LeafComparison, Tolerances, compare_leaves, table
from .numbers import _inputs_by_path
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded, note_rounding
from .tight import Tight, too_tight

__all__ = ["check_patches"]

Leaves = list[tuple[str, Any]]

#: (position of a call, what it returned without and with the patches) -> the comparison.
Judge = Callable[[int, Leaves, Leaves], list[LeafComparison]]


def check_patches(
    mode: PatchMode,
    observation: Observation,
    graph: GraphObservation,
    target: str,
    tolerances: Tolerances,
    share: bool = False,
) -> list[str]:
    """Refuse a mode that changes an output of an observed call.

    Call it with none of the mode's patches in place and the caches registered. A mode that is observed
    under itself may change what an input is, so its calls are compared with those that the spec's calls make
    without it; there, a cache that it lets grow must end with what the other one holds.

    The rules of the spec's ``compare`` judge here too: they say what counts as the same answer, and a patch
    that breaks that is to blame, not the exporter after it.

    Parameters
    ----------
    target:
        The exporter's target, for patches that are in place on the way to one runtime only.
    share:
        The same patches, on the same calls, need not be compared again for another exporter.

    Returns
    -------
    list
        One sentence for each output that agrees only because rounding moves eager as far.

    Raises
    ------
    PatchError
        An output differs, or a call raises, under the patches; names the patches without which it does not.
    ObserveError
        A rule does not fit an output.
    ComparisonError
        A comparison of the user's own judges nothing.
    """
    model, spec = observation.model, observation.spec
    noted: dict[str, Any] = {}
    moved = [MovedEager.of(graph.target, call) for call in graph.calls]
    recorded = [call.output_leaves() for call in graph.calls]

    def replay() -> list[Leaves]:
        return [flatten_with_paths(graph.eager(call.arguments)) for call in graph.calls]

    def rules(position: int, before: Leaves) -> dict[str, Any]:
        call = graph.calls[position]
        try:
            inputs = _inputs_by_path(graph.shapes.complete(call))
        except ObserveError:
            inputs = call.leaves()  # what it lacks is said where the program is to be fed with it
        return rules_of_call(spec, inputs, before, "patch")

    def judge(position: int, before: Leaves, after: Leaves) -> list[LeafComparison]:
        results = compare_rounded(before, after, tolerances, rules(position, before), moved[position])
        note_rounding(noted, results, f"patches, call {position + 1} of {len(graph.calls)}")
        return results

    def judge_grown(position: int, before: Leaves, after: Leaves) -> list[LeafComparison]:
        return compare_leaves(before, _cut(before, after), tolerances, rules(position, before))

    # What was compared before, and which outputs only rounding explained.
    settled_before: list[tuple[Any, list[str]]] = graph.answers.setdefault("equal under", []) if share else []
    here, there = _what_is_done(mode, model, "eager"), _what_is_done(mode, model, target)
    if there is not None:
        for done, rounding in settled_before:
            if done == (here, there):
                return rounding
    if mode.observed_under_itself:
        if here is None or all(done != (here,) for done, _ in settled_before):
            plain = _spec_calls(observation, graph)

            def observe_again() -> list[Leaves]:
                return _spec_calls(observation, graph)

            _refuse(mode, model, "eager", plain, observe_again, judge_grown, graph)
            settled_before.append(((here,), []))
        with mode.apply(model, "eager") as outer:
            # These cannot be left out inside the block, and were compared above.
            settled = frozenset(outer.patches) if isinstance(outer, Activity) else frozenset()
            _refuse(mode, model, target, recorded, replay, judge, graph, settled)
    else:
        _refuse(mode, model, target, recorded, replay, judge, graph)
    rounded = list(noted.get("rounding", ()))
    settled_before.append(((here, there), rounded))
    return rounded


def _what_is_done(mode: PatchMode, model: torch.nn.Module, target: str) -> tuple[Any, ...] | None:
    """What the mode puts in place, to be compared with another; ``None`` where it does not tell."""
    if not isinstance(mode, PatchList) or type(mode).apply is not PatchList.apply:
        return None
    return (mode.observed_under_itself, *mode.patches(model, target))


def _spec_calls(observation: Observation, graph: GraphObservation) -> list[Leaves]:
    """Outputs of the graph's calls when the spec's calls are made from the start, under what is in place."""
    spec, model = observation.spec, observation.model
    observed = next(one for one in spec.observe.targets.values() if graph.name in one.graph_names)
    module = find_module(spec, observed, model)
    # Up to the last that is needed: under the mode other calls may be those that show most.
    count = 1 + max(call.index for call in graph.calls)
    observer = InputObserver()
    with observer(module, store_n_calls=count, method_name=observed.method):
        previous: Any = None
        for plan in build_calls(spec, observation.device, observation.dtype):
            previous = plan.run(model, previous)
    made = {call.number: call for call in observer.info.calls}
    missing = [call.index for call in graph.calls if call.index not in made]
    if missing:
        raise PatchError(
            f"call {missing[0]} is made under the patch mode and not without it "
            f"({counted(len(made), 'call')} instead of {len(graph.calls)} or more)"
        )
    return [made[call.index].output_leaves() for call in graph.calls]


def _refuse(
    mode: PatchMode,
    model: torch.nn.Module,
    target: str,
    expected: Sequence[Leaves],
    run: Callable[[], list[Leaves]],
    judge: Judge,
    graph: GraphObservation,
    settled: frozenset[str] = frozenset(),
) -> None:
    found, activity = _under(mode, model, target, expected, run, judge)
    if not found:
        return
    culprits = list(_culprits(mode, activity, model, target, expected, run, judge, settled))
    named = f"patch {culprits[0]}" if len(culprits) == 1 else f"patch mode {mode.name}"
    message, details, tight = found
    position, text = message
    call = "" if position is None else f" on call {graph.calls[position].index}"
    raise PatchError(
        f"{tight.text}{named} changes what the model computes{call}: {text}",
        details=[
            *([f"without any one of them it does not: {', '.join(culprits)}"] if len(culprits) > 1 else []),
            *details,
            "eager with the patches is compared with eager without them, before any export",
        ],
        facts={"patches": {"changes": culprits}, **tight.facts},
    )


#: ((position of the call, or None if a call raised, one line), details, whether only by a tolerance below
#: eager's own noise); None where nothing differs.
Found = tuple[tuple[int | None, str], list[str], Tight]


def _under(
    mode: PatchMode,
    model: torch.nn.Module,
    target: str,
    expected: Sequence[Leaves],
    run: Callable[[], list[Leaves]],
    judge: Judge,
) -> tuple[Found | None, Activity]:
    """What differs under the mode, and what its patches did."""
    activity = Activity()
    try:
        with mode.apply(model, target) as active:
            if isinstance(active, Activity):
                activity = active
            got = run()
    except PatchError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ExportCheckError):
            return ((None, error.message), error.details, Tight()), activity
        return ((None, f"eager raises {one_line(error)}"), user_lines(error), Tight()), activity
    by_noise: Found | None = None
    for position, (before, after) in enumerate(zip(expected, got, strict=True)):
        results = judge(position, before, after)
        bad = [result for result in results if not result.ok]
        if bad:
            tight = too_tight(results)
            text = f"{len(bad)} of {counted(len(results), 'output')} differ"
            found = (position, text), table(results), tight
            if not tight.text:
                return found, activity
            by_noise = by_noise or found
    return by_noise, activity


def _cut(expected: Leaves, got: Leaves) -> Leaves:
    """`got`, with tensors of a cache that are longer on one axis cut to their end."""
    shapes = {path: leaf.shape for path, leaf in expected if isinstance(leaf, torch.Tensor)}
    cut = []
    for path, leaf in got:
        wanted = shapes.get(path)
        if isinstance(leaf, torch.Tensor) and wanted is not None and ".layers." in f".{path}":
            longer = [
                axis
                for axis in range(leaf.dim())
                if leaf.dim() == len(wanted) and leaf.shape[axis] > wanted[axis]
            ]
            if len(longer) == 1:
                axis = longer[0]
                leaf = leaf.narrow(axis, leaf.shape[axis] - wanted[axis], wanted[axis])
        cut.append((path, leaf))
    return cut


def _culprits(
    mode: PatchMode,
    activity: Activity,
    model: torch.nn.Module,
    target: str,
    expected: Sequence[Leaves],
    run: Callable[[], list[Leaves]],
    judge: Judge,
    settled: frozenset[str],
) -> Iterator[str]:
    """The patches without which nothing differs, of those that were called; else those that differ alone."""
    if not isinstance(mode, PatchList):
        return
    names = list(activity.patches)
    suspects = [name for name in names if activity.calls.get(name, 1) and name not in settled]

    def differs(kept: Sequence[str]) -> bool:
        found, _ = _under(mode.subset(kept), model, target, expected, run, judge)
        return found is not None

    alone = [name for name in suspects if not differs([other for other in names if other != name])]
    if not alone:
        # Several change the result: each of them does so without the others.
        alone = [name for name in suspects if differs([name])]
    yield from alone
