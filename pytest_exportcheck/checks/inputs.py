"""Inputs that a program has not, or that none of its outputs depends on: eager must not depend on them.

The observed calls do not show it where they all pass the same values: a program without a mask has the right
numbers in every call that masks nothing. So eager is called with other values there.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import CompareError, ConvertError, ExportCheckError, RunError
from ..exporters.base import Exported, ExportRequest, plain_copy
from ..exporters.dependence import paths_by_output
from ..observe.observation import GraphObservation, warn_of_spec
from ..observe.records import RecordedCall
from ..observe.targets import Target
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths
from ..runtimes.base import Session
from ..runtimes.onnx_runtime import OnnxRuntimeSession
from ..spec import ModelSpec
from ..tracebacks import one_line
from .compare import LeafComparison, Tolerances, compare_leaves, table
from .moving import kept_generators
from .numbers import Leaves, _inputs_by_path, _run, _summary
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded

__all__ = [
    "LOOK_FOR",
    "check_unread_inputs",
    "copied_target",
    "inputs_by_output",
    "is_unread",
    "refuse_baked_inputs",
    "undisturbed",
]

#: How the message of such a failure begins.
_UNREAD = "no output of the program depends on "

#: What it says, after the outputs, where others do.
_NOT_ON = re.compile(r"outputs? [^\n]* of the program (does|do) not depend on ")

#: How many inputs a message names.
_MOST = 4

#: Of so many sets of inputs that single outputs do not depend on, so many other values are tried: those that
#: depend on most inputs first. In a decoder each layer's keys have a set of their own.
_SETS, _TRIES = 8, 2

LOOK_FOR = (
    "look for code that asks whether the model is exported (torch.compiler.is_compiling, "
    "torch.compiler.is_exporting, torch.jit.is_tracing, torch.onnx.is_in_onnx_export), and for values that "
    "become Python numbers"
)


def is_unread(message: str) -> bool:
    """Whether `message` is of such a failure: with the observed values the program is right."""
    return message.startswith(_UNREAD) or _NOT_ON.match(message) is not None


def _is_index(tensor: torch.Tensor) -> bool:
    """Whether a value out of range may end the process: a GPU checks indices by assertions."""
    return tensor.is_cuda and not (tensor.is_floating_point() or tensor.is_complex())


def _all_of_one(tensor: torch.Tensor) -> torch.Tensor | None:
    if bool(tensor.ne(0).any()):
        return torch.zeros_like(tensor)
    return None if _is_index(tensor) and tensor.dtype is not torch.bool else torch.ones_like(tensor)


def _every_second(tensor: torch.Tensor) -> torch.Tensor | None:
    """Part of a mask stays: where nothing is left to attend to, eager's numbers may mean nothing."""
    other = _all_of_one(tensor)
    if other is None or tensor.numel() < 2:
        return None
    kept = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 2 == 0
    return torch.where(kept, tensor, other)


def _reversed(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.flatten().flip(0).reshape(tensor.shape) if tensor.dim() else None


def _larger(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if tensor.dtype is torch.bool or _is_index(tensor) else tensor + 1


def _smaller(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if tensor.dtype is torch.bool or _is_index(tensor) else tensor - 1


#: What is done to the values of an input -> other values that may be valid there; ``None``: there are none.
_OTHERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "every second value 0 (or 1, where all were 0)": _every_second,
    "all values 0 (or 1, where all were 0)": _all_of_one,
    "the values in reverse order": _reversed,
    "each value larger by 1": _larger,
    "each value smaller by 1": _smaller,
}


def _other(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    """What `make` makes of `tensor`, if it is another one."""
    if tensor.is_quantized or tensor.layout is not torch.strided or not tensor.numel():
        return None
    made = make(tensor)
    return None if made is None or torch.equal(made, tensor) else made


def _changed(
    arguments: Mapping[str, Any], paths: Sequence[str], make: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, Any] | None:
    """`arguments` with other values in the tensors at `paths`; ``None`` if nothing there can be changed."""
    changed, any_changed = dict(arguments), False
    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        for at, (path, leaf) in enumerate(flatten_with_paths(value, name)):
            other = _other(leaf, make) if path in paths and isinstance(leaf, torch.Tensor) else None
            if other is not None:
                leaves[at], any_changed = other, True
        changed[name] = _pytree.tree_unflatten(leaves, spec)
    return changed if any_changed else None


def refuse_baked_inputs(graph: GraphObservation, absent: Sequence[str], tolerances: Tolerances) -> None:
    """See whether eager reads the inputs at the paths `absent`, which a program has not.

    Raises
    ------
    ConvertError
        Other values there change what eager returns: the program has the values of the example inside.
    """
    arguments = graph.example.arguments
    expected = flatten_with_paths(clone_tree(graph.eager(arguments)))
    for path in absent:
        for make in _OTHERS.values():
            try:
                changed = _changed(arguments, [path], make)
                got = None if changed is None else flatten_with_paths(graph.eager(changed))
            except (Exception, SystemExit):
                # Values that eager refuses: it reads them, which says nothing of the results.
                continue
            if got is not None and not all(r.ok for r in compare_leaves(expected, got, tolerances)):
                raise ConvertError(
                    f"the program has no input for {path}, and eager's outputs depend on it: "
                    "its values were baked into the program"
                )


@dataclass(frozen=True)
class _Difference:
    """Eager depends on an input, the program does not.

    Attributes
    ----------
    how:
        What was done to its values.
    results:
        The program against eager, then.
    """

    how: str
    results: list[LeafComparison]
    arguments: Mapping[str, Any]
    expected: Leaves


@dataclass(frozen=True)
class _Asked:
    """What other values of an input have shown.

    Attributes
    ----------
    read:
        The program does depend on it.
    refusal:
        Why nothing is known of eager; ``""`` where something is.
    """

    difference: _Difference | None = None
    read: bool = False
    refusal: str = ""


def inputs_by_output(
    exported: Exported, request: ExportRequest, session: Session
) -> dict[str, frozenset[str]] | None:
    """Path of an output -> paths of the inputs that it depends on; ``None`` if it cannot be looked into."""
    if isinstance(exported.program, torch.export.ExportedProgram):
        paths = request.output_paths
        read = paths_by_output(exported.program, request.input_paths)
    elif isinstance(session, OnnxRuntimeSession):
        paths = exported.output_paths
        by_name = {name: path for path, name in exported.input_names.items()}
        read = [frozenset(by_name[n] for n in names if n in by_name) for names in session.read_inputs]
    else:
        return None
    if len(paths) != len(read):
        # What belongs to which output is not known: each counts for all.
        return dict.fromkeys(paths, frozenset[str]().union(*read))
    found: dict[str, frozenset[str]] = {}
    for path, inputs in zip(paths, read, strict=True):
        # An output without a path is none of the model's.
        if path:
            found[path] = found.get(path, frozenset()) | inputs
    return found


def check_unread_inputs(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    read: Mapping[str, frozenset[str]],
    tolerances: Tolerances,
    record: dict[str, Any],
    captured: Callable[[Mapping[str, Any], Leaves], list[str]],
) -> None:
    """See whether eager's outputs depend on inputs that those of the program do not depend on.

    To be called when the program agrees with eager on every observed call. Nothing is run if every output
    depends on every input.

    Parameters
    ----------
    read:
        As `inputs_by_output` returns it.
    captured:
        What the captured program does with these arguments, for details.

    Raises
    ------
    CompareError
        Other values there change what eager returns, and the program does not follow.
    """
    inputs = [leaf.path for leaf in graph.shapes.tensors()]
    by_any = frozenset[str]().union(*read.values())
    unread = [path for path in inputs if path not in by_any]
    record["unused_inputs"] = list(unread)
    if unread:
        _judge_unread(spec, graph, session, unread, tolerances, record, captured)
    _judge_dropped(spec, graph, session, read, [p for p in inputs if p in by_any], tolerances, captured)


def _judge_unread(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    unread: Sequence[str],
    tolerances: Tolerances,
    record: dict[str, Any],
    captured: Callable[[Mapping[str, Any], Leaves], list[str]],
) -> None:
    asked = _ask(spec, graph, session, unread, tolerances)
    found = {path: each.difference for path, each in asked.items() if each.difference is not None}
    if found:
        first = next(iter(found.values()))
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        them, their = ("it", "its") if len(found) == 1 else ("them", "their")
        raise CompareError(
            f"{_UNREAD}{', '.join(list(found)[:_MOST])}{more}, and eager's "
            f"outputs depend on {them}: {their} values were baked into the program, or it was exported "
            "without the code that reads them",
            details=[
                f"with {first.how} in {next(iter(found))}: {_summary(first.results, tolerances)} "
                f"({session.description} against eager)",
                *table(first.results),
                *captured(first.arguments, first.expected),
                "the observed calls agree, as no value there makes a difference in them",
                LOOK_FOR,
            ],
        )
    unused = [path for path in unread if not asked[path].read]
    record["unused_inputs"] = unused
    unknown = {path: asked[path].refusal for path in unused if asked[path].refusal}
    if unknown:
        record["unused_inputs_not_judged"] = list(unknown)
    for note in _notes(unused, unknown):
        record.setdefault("warnings", []).append(note)
        warn_of_spec(spec, note, graph.name)


def _judge_dropped(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    read: Mapping[str, frozenset[str]],
    inputs: Sequence[str],
    tolerances: Tolerances,
    captured: Callable[[Mapping[str, Any], Leaves], list[str]],
) -> None:
    """Of inputs that some outputs depend on: see whether in eager others do too."""
    outputs: dict[tuple[str, ...], list[str]] = {}
    for path, known in read.items():
        outputs.setdefault(tuple(each for each in inputs if each not in known), []).append(path)
    sets = sorted((each for each in outputs if each), key=len)[:_SETS]
    target = copied_target(graph) if sets else None
    if not isinstance(target, Target):
        return
    with undisturbed():
        for paths in sets:
            position = next(filter(None.__ne__, (_call_to_change(graph, path) for path in paths)), None)
            if position is None:
                continue
            question = _Question(spec, graph.calls[position], target, graph, session, tolerances)
            found = question.of_outputs(paths, outputs[paths])
            if found is None:
                continue
            single = ((path, question.of_outputs([path], outputs[paths])) for path in paths)
            path, found = next(((p, each) for p, each in single if each), (", ".join(paths[:_MOST]), found))
            failed = [result.path for result in found.results if not result.ok]
            named, does = ("output", "does") if len(failed) == 1 else ("outputs", "do")
            names = ", ".join(failed[:_MOST])
            raise CompareError(
                f"{named} {names} of the program {does} not depend on {path}, and eager's {does}: "
                "its values were baked into the program, or it was exported without the code that reads them",
                details=[
                    f"with {found.how} in {path}: {_summary(found.results, tolerances)} "
                    f"({session.description} against eager)",
                    *table(found.results),
                    *captured(found.arguments, found.expected),
                    "the observed calls agree, as no value there makes a difference in them",
                    LOOK_FOR,
                ],
            )


def _notes(unused: Sequence[str], unknown: Mapping[str, str]) -> list[str]:
    """What a person should know of a program that does not read an input."""
    neither = [path for path in unused if path not in unknown]
    notes = []
    if neither:
        notes.append(
            f"no output depends on the values of {_listed(neither)}, neither of the program nor of eager, "
            "which was called with other values there"
        )
    if unknown:
        notes.append(
            f"no output of the program depends on the values of {_listed(list(unknown))}; whether eager's "
            f"outputs do is not known: {next(iter(unknown.values()))}"
        )
    return notes


def _listed(paths: Sequence[str]) -> str:
    more = f" and {counted(len(paths) - _MOST, 'more input')}" if len(paths) > _MOST else ""
    return ", ".join(paths[:_MOST]) + more


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers go on as they would; nothing is compiled for these values; no warnings."""
    with kept_generators(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _ask(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    unread: Sequence[str],
    tolerances: Tolerances,
) -> dict[str, _Asked]:
    """By path."""
    target = copied_target(graph)
    if isinstance(target, str):
        return dict.fromkeys(unread, _Asked(refusal=target))
    by_call: dict[int, list[str]] = {}
    asked = {}
    for path in unread:
        position = _call_to_change(graph, path)
        if position is None:
            asked[path] = _Asked(refusal="there is no value of it in any call")
        else:
            by_call.setdefault(position, []).append(path)
    with undisturbed():
        for position, paths in by_call.items():
            question = _Question(spec, graph.calls[position], target, graph, session, tolerances)
            asked.update(question.ask(paths))
    return asked


def copied_target(graph: GraphObservation) -> Target | str:
    """What one call leaves in the model stays in a copy of it; or why there is none."""
    weights = {id(each): each for each in graph.target.module.parameters()}
    try:
        return replace(graph.target, module=plain_copy(graph.target.module, weights))
    except Exception as error:
        return f"the model cannot be copied ({one_line(error)})"


def _call_to_change(graph: GraphObservation, path: str) -> int | None:
    """Position of the call with most values at `path`, one that passes them itself if there is any."""
    best, most = None, (False, 0)
    for position, call in enumerate(graph.calls):
        leaf = _inputs_by_path(graph.shapes.complete(call)).get(path)
        count = leaf.numel() if isinstance(leaf, torch.Tensor) else 0
        own = path not in graph.shapes.missing(call)
        if count and (own, count) > most:
            best, most = position, (own, count)
    return best


class _Question:
    """One observed call with other values in some inputs, of eager and of the program."""

    def __init__(
        self,
        spec: ModelSpec,
        call: RecordedCall,
        target: Target,
        graph: GraphObservation,
        session: Session,
        tolerances: Tolerances,
    ) -> None:
        self._spec, self._session, self._tolerances = spec, session, tolerances
        self._arguments = graph.shapes.complete(call)
        self._target = target
        self._expected = call.output_leaves()

    def ask(self, paths: Sequence[str]) -> dict[str, _Asked]:
        """By path."""
        problem = self._disagrees()
        if problem:
            return dict.fromkeys(paths, _Asked(refusal=problem))
        # All together first: what none of them changes, no single one does.
        if len(paths) > 1 and self._ask(paths) == _Asked():
            return dict.fromkeys(paths, _Asked())
        return {path: self._ask([path]) for path in paths}

    def of_outputs(self, paths: Sequence[str], outputs: Sequence[str]) -> _Difference | None:
        """Where `outputs` of eager depend on the inputs at `paths`, and those of the program do not."""
        if self._disagrees():
            return None
        tries = 0
        for how, make in _OTHERS.items():
            try:
                changed = _changed(self._arguments, paths, make)
                got = None if changed is None else _only(self._eager(changed), outputs)
            except (Exception, SystemExit):
                # Values that eager refuses show nothing.
                continue
            if changed is None or got is None:
                continue
            if self._compare(changed, got, _only(self._expected, outputs)) is False:
                found = self._against_program(changed, got, how, outputs)
                if found is not None and found.difference is not None:
                    return found.difference
            tries += 1
            if tries == _TRIES:
                break
        return None

    def _disagrees(self) -> str:
        """Why other values would show nothing: eager does not answer the call as it did."""
        try:
            again = self._eager(self._arguments)
        except (Exception, SystemExit) as error:
            return f"a copy of the model refuses the call ({one_line(error)})"
        differs = self._compare(self._arguments, self._expected, again) is False
        return "a copy of the model answers the call otherwise" if differs else ""

    def _eager(self, arguments: Mapping[str, Any]) -> Leaves:
        return flatten_with_paths(clone_tree(self._target.eager(arguments)))

    def _compare(self, arguments: Mapping[str, Any], expected: Leaves, got: Leaves) -> bool | None:
        """Whether they agree; ``None`` if the spec's rules say nothing of them."""
        try:
            where = rules_of_call(self._spec, _inputs_by_path(arguments), expected, "compare")
            return all(each.ok for each in compare_leaves(expected, got, self._tolerances, where))
        except ExportCheckError:
            # A mask of the spec's that fits no more, a comparison of the user's that judges nothing.
            return None

    def _ask(self, paths: Sequence[str]) -> _Asked:
        refusals, same = [], False
        for how, make in _OTHERS.items():
            try:
                changed = _changed(self._arguments, paths, make)
                got = None if changed is None else self._eager(changed)
            except (Exception, SystemExit) as error:
                refusals.append(f"eager refuses other values there ({one_line(error)})")
                continue
            if changed is None or got is None:
                continue
            agrees = self._compare(changed, got, self._expected)
            if agrees is None:
                refusals.append("what the spec compares by judges nothing at other values there")
                continue
            if agrees:
                same = True
                continue
            if len(paths) > 1:
                return _Asked(read=True)
            found = self._against_program(changed, got, how)
            if found is not None:
                return found
            refusals.append("the program refuses other values there")
        if len(paths) > 1 and refusals:
            return _Asked(refusal=refusals[0])
        return _Asked() if same else _Asked(refusal=(*refusals, "no other values can be made of it")[0])

    def _against_program(
        self, changed: Mapping[str, Any], expected: Leaves, how: str, outputs: Sequence[str] | None = None
    ) -> _Asked | None:
        """Eager follows: does the program? ``None`` where nothing can be said."""
        try:
            got = _run(self._session, changed, "other values", RunError).outputs
            got = got if outputs is None else _only(got, outputs)
            where = rules_of_call(self._spec, _inputs_by_path(changed), expected, "compare")
            eager = MovedEager(self._target, lambda: changed)
            results = compare_rounded(expected, got, self._tolerances, where, eager)
        except ExportCheckError:
            return None
        if all(each.ok for each in results):
            return _Asked(read=True)
        if self._disagrees():
            # It is not for these values that it answers otherwise.
            return None
        return _Asked(_Difference(how, results, changed, expected))


def _only(leaves: Leaves, paths: Sequence[str]) -> Leaves:
    return [(path, leaf) for path, leaf in leaves if path in paths]
