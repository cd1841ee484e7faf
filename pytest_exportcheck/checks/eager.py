"""Eager against itself: what disagrees with itself, or is not all in its outputs, is named before any export.

A right model costs one replay of each call and a look at version counters. Only where something is wrong is a
call replayed again, operator by operator, to say what it is and where.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ObserveError
from ..observe.observation import GraphObservation
from ..observe.records import RecordedCall
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths
from ..tracebacks import one_line, user_lines
from .compare import Tolerances, compare_leaves, table
from .state import (
    differences,
    gradients_of,
    model_state,
    replaced_or_written,
    tensors_of,
    training_modules,
)
from .trace import Event, Trace, first_difference
from .writes import WriteWatch, tensor_leaves

__all__ = ["check_eager"]

#: How many findings of a kind a message lists.
_MOST = 4

_GENERATORS = {
    "torch": "the global generator of torch",
    "cuda": "the global generator of the GPU",
    "random": "Python's `random`",
    "numpy": "numpy's global generator",
}


def _generators(device: torch.device) -> dict[str, Any]:
    """States of the global random generators."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "random": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    return states


def _device(module: torch.nn.Module) -> torch.device:
    return next((tensor.device for _, tensor in tensors_of(module)), torch.device("cpu"))


def check_eager(graph: GraphObservation, tolerances: Tolerances) -> None:
    """Run eager again on every call: a model that disagrees with itself can be held against no exporter.

    What does not show in the outputs of the recorded calls, but is lost in an exported program, becomes a
    warning of the graph: state that the model changes, modules in train mode, random operators, inputs that
    are written to. ``graph.writes`` and ``graph.stateful`` are filled.

    Raises
    ------
    ObserveError
        An output differs from the recorded one, or the replay raises; the message says what it is that
        changes, and where.
    """
    module = graph.target.module
    before, touched = replaced_or_written(module), dict[str, None]()
    generators = _generators(_device(module))
    lost: dict[str, str] = {}
    for call in graph.calls:
        what = f"call {call.index}" + (f" ({graph.name})" if graph.name else "")
        arguments = clone_tree(dict(call.arguments))
        watch = WriteWatch(arguments)
        try:
            again = graph.target.call(arguments)
        except Exception as error:
            found = _explain(graph, call)
            raise ObserveError(
                f"eager replays {what} with {one_line(error)}" + _first(found),
                details=[*found[1:], *user_lines(error)],
            ) from error
        after = replaced_or_written(module)
        # After each call: the last one may leave things as the first one found them.
        touched.update(dict.fromkeys(_touched(before, after)))
        before = after
        results = compare_leaves(call.output_leaves(), flatten_with_paths(again), tolerances)
        if not all(result.ok for result in results):
            found = _explain(graph, call) or _other_conditions(call)
            raise ObserveError(
                f"eager disagrees with itself on {what}{_first(found)}; no exporter is blamed",
                details=[*found[1:], *table(results)],
            )
        written = watch.written()
        if written:
            # Nothing of it is the caller's: the arguments were copies.
            graph.writes[call.index] = written
        for path, how in _lost_inputs(watch.leaves, written, arguments, again).items():
            lost.setdefault(path, how)
    _refuse_empty_outputs(graph)
    notes = _notes_on_state(graph, list(touched), generators)
    if lost:
        notes += _notes_on_inputs(graph, lost)
    graph.shapes.warnings.extend(notes)


def _refuse_empty_outputs(graph: GraphObservation) -> None:
    """A pass would say nothing where no call returns a number, or writes one into its inputs.

    Raises
    ------
    ObserveError
        Every output of every call is ``None`` or has no elements.
    """
    if any(graph.writes.values()):
        return
    for call in graph.calls:
        for _, leaf in call.output_leaves():
            if leaf is not None and not (isinstance(leaf, torch.Tensor) and not leaf.numel()):
                return
    raise ObserveError(
        f"{graph.target.text} returns nothing that can be compared: every output is None or empty in every "
        "call (observe a call whose outputs have elements)"
    )


def _other_conditions(call: RecordedCall) -> list[str]:
    """Why the recorded call may differ from all replays of it."""
    said = "two more replays agree with each other"
    others = "a Python global, autocast, or state that was set before it"
    if not call.lost:
        return [f"{said}: the recorded call ran under other conditions ({others})"]
    more = " and more" if len(call.lost) > _MOST else ""
    return [
        f"{said}: copies of the arguments lack what those of the recorded call had: "
        f"{'; '.join(call.lost[:_MOST])}{more}",
        "a program is fed as the replays are, with tensors of their own; if it is none of that, the recorded "
        f"call ran under other conditions ({others})",
    ]


def _first(found: Sequence[str]) -> str:
    return f": {found[0]}" if found else ""


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _lost_inputs(
    leaves: Mapping[str, torch.Tensor],
    written: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any],
    outputs: Any,
) -> dict[str, str]:
    """Path -> ``written`` or ``replaced``, for inputs that the call changes and that no output carries."""
    carried = {_memory(leaf) for _, leaf in flatten_with_paths(outputs) if isinstance(leaf, torch.Tensor)}
    lost = {path: "written" for path, leaf in written.items() if _memory(leaf) not in carried}
    for path, leaf in tensor_leaves(arguments).items():
        # A cache that appends puts a new tensor into the object that was passed.
        if leaves.get(path) is not leaf and _memory(leaf) not in carried:
            lost.setdefault(path, "replaced")
    return lost


def _notes_on_inputs(graph: GraphObservation, lost: Mapping[str, str]) -> list[str]:
    notes = []
    places = _traced_writes(graph) if "written" in lost.values() else {}
    written = [path for path, how in lost.items() if how == "written"]
    replaced = [path for path, how in lost.items() if how == "replaced"]
    for path in written[:_MOST]:
        place = f" at {places[path]}" if path in places else ""
        notes.append(
            f"input `{path}` is written to in place{place} and no output returns it: an ExportedProgram must "
            "do the same and is compared in it, an ONNX program leaves its inputs alone (return it from the "
            "model if its new value matters)"
        )
    if replaced:
        notes.append(
            f"{_listed(replaced)} of the inputs are replaced during the call and no output returns "
            "what replaces them: no exported program does that (return them if their new values matter)"
        )
    if len(written) > _MOST:
        notes.append(f"... and in place is written to {counted(len(written) - _MOST, 'more input')}")
    return notes


def _traced_writes(graph: GraphObservation) -> dict[str, str]:
    """Path of an input -> the place that writes to it, over all calls that write."""
    places: dict[str, str] = {}
    for call in graph.calls:
        if call.index in graph.writes:
            arguments = clone_tree(dict(call.arguments))
            trace = Trace(graph.target.module, list(tensor_leaves(arguments).items()))
            with trace.follow():
                graph.target.call(arguments)
            places = trace.writes | places
    return places


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(f"`{name}`" for name in names[:_MOST]) + more


def _touched(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Labels of parameters and buffers that were replaced or written to between two looks at them."""
    return [
        label
        for label in {**before, **after}
        if label not in before
        or label not in after
        or before[label][0] is not after[label][0]
        or before[label][1] != after[label][1]
    ]


def _notes_on_state(
    graph: GraphObservation, touched: Sequence[str], generators: Mapping[str, Any]
) -> list[str]:
    """What an agreeing eager does all the same that no exported program can carry on."""
    module, call = graph.target.module, graph.calls[-1]
    notes = []
    if touched:
        old = model_state(module, attributes=False)
        graph.eager(call.arguments)
        found = differences(old, model_state(module, attributes=False))
        # Also what the last call leaves as it found it: another call may not (a growing table).
        graph.stateful = frozenset([*touched, *found])
        notes += [
            f"{sentence} during a call, though no output of the recorded calls shows it: an ONNX program "
            "keeps no state"
            for sentence in list(found.values())[:_MOST]
        ]
        if len(found) > _MOST:
            more = counted(len(found) - _MOST, "more parameter or buffer", "more parameters and buffers")
            notes.append(f"... during a call there also changes what is in {more}")
    training = training_modules(module)
    if training:
        are = "is" if len(training) == 1 else "are"
        notes.append(
            f"{counted(len(training), 'module')} {are} in train mode though eval() was called on the model "
            f"({_listed([name or 'the model' for name in training])}): the program is the one of train mode"
        )
    drawn = [name for name, state in _generators(_device(module)).items() if state != generators.get(name)]
    if drawn:
        events = _traced(graph, call)[0].events
        operators = [_random_text(event) for event in events if event.random]
        notes.append(
            f"{' and '.join(_GENERATORS[name] for name in drawn)} is drawn from during a call, though no "
            "output of the recorded calls shows it" + (f": {operators[0]}" if operators else "")
        )
    return notes


def _traced(graph: GraphObservation, call: RecordedCall) -> tuple[Trace, Exception | None]:
    module = graph.target.module
    trace = Trace(module, [*tensors_of(module), *gradients_of(module)])
    arguments = clone_tree(dict(call.arguments))
    try:
        with trace.follow():
            graph.target.call(arguments)
    except Exception as error:
        return trace, error
    return trace, None


def _random_text(event: Event) -> str:
    if "dropout" in event.name:
        place = event.where() if not event.module else f"in `{event.module}` ({event.place})"
        mode = "training=True" if event.training else "training=True is passed, its module is in eval mode"
        return f"dropout is active {place} ({mode})"
    if event.own_generator:
        return f"{event.name} {event.where()} draws from a generator of its own, which every call moves on"
    return f"{event.name} {event.where()} draws from the global generator"


def _explain(graph: GraphObservation, call: RecordedCall) -> list[str]:
    """What changes between two replays of a call, the cause first where it can be told."""
    module = graph.target.module
    old = model_state(module)
    states = _generators(_device(module))
    first, failed = _traced(graph, call)
    drawn = [name for name, state in _generators(_device(module)).items() if state != states.get(name)]
    changed = differences(old, model_state(module))
    second, _ = _traced(graph, call)
    state = [
        f"{sentence} during a replay of call {call.index}"
        + (f" (at {first.writes[label]})" if label in first.writes else "")
        for label, sentence in changed.items()
    ]
    operators = list(dict.fromkeys(_random_text(event) for event in first.events if event.random))
    python = [
        f"{_GENERATORS[name]} is drawn from during the call" for name in drawn if name in ("random", "numpy")
    ]
    event, sentence = (None, "") if failed else first_difference(first, second)
    kinds = [state, operators, python]
    if event is not None and event.random:
        kinds = [operators, python, state]
    elif not state and python:
        kinds = [python, operators, state]
    found = [
        line
        for kind in kinds
        for line in (*kind[:_MOST], *([f"... and {len(kind) - _MOST} more"] if len(kind) > _MOST else []))
    ]
    if sentence:
        found.append(sentence)
    return found
