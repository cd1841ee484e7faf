"""Inputs whose values never vary within a call, or not along an axis: the program follows eager there too.

With a mask of ones in every call, a program that reads its first column, or adds 0 times the mask, has the
right numbers, at every size. So eager and the program are asked once with one value changed
(`uniform_values.changes`). What eager refuses, or has no number for, is not asked; the record says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CompareError, ExportCheckError, RunError
from ..observe.observation import GraphObservation
from ..observe.targets import Target
from ..pytrees import clone_tree, flatten_with_paths
from ..runtimes.base import Session
from ..spec import ModelSpec
from ..tracebacks import one_line
from .choices import offer_ties
from .compare import LeafComparison, Tolerances, compare_leaf, compare_leaves, table
from .inputs import LOOK_FOR, copied_target, undisturbed
from .numbers import Leaves, _inputs_by_path, _run, _summary, add_writes
from .own import Own
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded
from .ties import Ties
from .tight import too_tight
from .uniform_values import (
    Change,
    Uniform,
    changed_arguments,
    changes,
    find_uniform,
    in_memory_of_its_own,
    is_expanded,
)
from .writes import WriteWatch

__all__ = ["check_uniform_inputs", "is_uniform"]

#: How the message of such a failure begins.
_UNIFORM = "the program does not follow eager where "

#: What is said where they differ at the hidden position alone.
_ELSEWHERE = "agrees elsewhere"

_AGREES = ("agrees", _ELSEWHERE)

#: Of so many inputs, no more.
_MOST = 6


def is_uniform(message: str) -> bool:
    """Whether `message` is of such a failure: with the observed values the program is right."""
    return message.startswith(_UNIFORM)


def check_uniform_inputs(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    read: frozenset[str] | None,
    tolerances: Tolerances,
    record: dict[str, Any],
    captured: Callable[[Mapping[str, Any], Leaves], list[str]],
) -> None:
    """Change a value of each input whose values are equal in every call, or along an axis, in both.

    To be called when the program agrees with eager on every observed call.

    Parameters
    ----------
    read:
        Paths of the inputs that the program depends on; ``None``: not known.
    captured:
        What the captured program does with these arguments, for details.

    Raises
    ------
    CompareError
        Eager answers, and the program says something else.
    """
    uniform = [each for each in find_uniform(graph) if read is None or each.path in read]
    if not uniform:
        return
    record["uniform_inputs"] = noted = []
    target = copied_target(graph)
    with undisturbed():
        for number, each in enumerate(uniform):
            entry = {"path": each.path, "values": each.text}
            noted.append(entry)
            if isinstance(target, str):
                entry["not_judged"] = target
            elif number >= _MOST:
                entry["not_judged"] = f"no more than {_MOST} inputs are changed"
            else:
                _ask(_Question(spec, graph, target, session, tolerances, each), entry, record, captured)


def _ask(
    question: _Question,
    entry: dict[str, Any],
    record: dict[str, Any],
    captured: Callable[[Mapping[str, Any], Leaves], list[str]],
) -> None:
    answer = question.ask()
    if answer.tried:
        entry["tried"] = answer.tried
    if answer.refusal:
        entry["not_judged"] = answer.refusal
    else:
        entry["result"] = answer.result
    if answer.result == _ELSEWHERE:
        record.setdefault("warnings", []).append(
            f"with {answer.tried} the program agrees with eager, but for what is where that hides a position"
        )
    found = answer.difference
    if found is None:
        return
    uniform = question.uniform
    raise CompareError(
        f"{_UNIFORM}{uniform.otherwise}: "
        f"{_summary(found.results, question.tolerances)} ({question.session.description} against eager) with "
        f"{answer.tried} in call {found.position + 1} of {found.calls}",
        details=[
            *table(found.results),
            *found.more,
            *captured(found.arguments, found.expected),
            *(found.told or _in_part(uniform.path)),
            f"a call in observe.calls with values of {uniform.path} that differ shows the same; if nobody "
            f"passes such values, leave {uniform.path} out of the calls: no program has an input for it then",
        ],
    )


def _in_part(path: str) -> tuple[str, ...]:
    return (
        f"the program reads {path}, but not as eager does: a row or column of it, or to no effect; the "
        "observed calls agree, as its values are equal in them",
        LOOK_FOR,
    )


@dataclass(frozen=True)
class _Difference:
    """Eager and the program with a changed value.

    Attributes
    ----------
    position:
        Of the call that was changed, among so many `calls`.
    more:
        Further lines.
    told:
        What it means, where that is not that the program reads a part of the input.
    """

    results: list[LeafComparison]
    arguments: Mapping[str, Any]
    expected: Leaves
    position: int
    calls: int
    more: list[str]
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Answer:
    """What a changed value has shown.

    Attributes
    ----------
    tried:
        The change: ``mask[0, 6] = 0``.
    result:
        ``agrees``, ``agrees elsewhere`` (they differ where the changed mask hides a position, and nowhere
        else), ``no effect`` (on eager, nor on the program) or ``differs``.
    refusal:
        Why nothing is known; ``""`` where something is.
    """

    tried: str = ""
    result: str = ""
    refusal: str = ""
    difference: _Difference | None = None


class _Question:
    """Of one input of a program."""

    def __init__(
        self,
        spec: ModelSpec,
        graph: GraphObservation,
        target: Target,
        session: Session,
        tolerances: Tolerances,
        uniform: Uniform,
    ) -> None:
        self.uniform, self.session, self.tolerances = uniform, session, tolerances
        self._spec, self._graph, self._target = spec, graph, target

    def ask(self) -> _Answer:
        position, wanted = self._call()
        if not wanted:
            return _Answer(refusal="there is no other value that is safe")
        call = self._graph.calls[position]
        given = self._graph.shapes.complete(call)
        known = call.output_leaves()
        tensor = _inputs_by_path(given)[self.uniform.path]
        shape = tensor.shape
        if is_expanded(tensor) and not self._answers_dense(given, known):
            return _Answer(refusal="its values are one in memory, and the model asks how it lies there")
        refusals: list[str] = []
        unseen = hidden = None
        for change in wanted:
            arguments = changed_arguments(given, self.uniform.path, change)
            tried = change.text(self.uniform.path)
            try:
                one = self._one(arguments, known)
            except _NoAnswer as reason:
                refusals.append(f"{tried}: {reason}")
                continue
            result = one.result(change, shape)
            if result in _AGREES:
                return _Answer(tried, result)
            if result == "no effect":
                unseen = unseen or _Answer(tried, result)
            elif result == "hidden":
                hidden = hidden or (tried, one, arguments)
            else:
                as_mask = self._as_mask(change, given, known, shape)
                return as_mask or self._difference(tried, one, arguments, given, position)
        if hidden is not None:
            return self._difference(*hidden, given, position, self._of_hidden(hidden[1]))
        return unseen or _Answer(refusal=refusals[0])

    def _answers_dense(self, given: Mapping[str, Any], known: Leaves) -> bool:
        """Whether eager answers as it did where each value of the input has a place of its own in memory."""
        try:
            expected = self._eager(in_memory_of_its_own(given, self.uniform.path))[0]
        except Exception:
            return False
        # What was written to an input comes behind the outputs.
        paths = {path for path, _ in expected}
        before = [(path, leaf) for path, leaf in known if path in paths]
        return all(each.ok for each in compare_leaves(before, expected, self.tolerances))

    def _of_hidden(self, one: _Compared) -> tuple[str, ...]:
        wrong = [each.path for each in one.results if not each.ok]
        rules = ", ".join(f"{path}: {{where: {self.uniform.path}}}" for path in wrong)
        return (
            f"only the position that this hides differs, and nothing else shows {self.uniform.path}: the "
            "program does not read it as eager does, or what is computed at a hidden position is no matter",
            LOOK_FOR,
            f"where no such position counts, compare the others: compare: {{{rules}}}",
        )

    def _as_mask(
        self, change: Change, given: Mapping[str, Any], known: Leaves, shape: Sequence[int]
    ) -> _Answer | None:
        """Where the program agrees with eager, if 0 is what a mask adds to scores.

        Then there is one other value, minus infinity, and nobody says what eager makes of a third
        (`torch.nn.TransformerEncoder` hides whatever is not 0).
        """
        masked = change.as_mask()
        if masked is None:
            return None
        try:
            one = self._one(changed_arguments(given, self.uniform.path, masked), known)
        except _NoAnswer:
            return None
        result = one.result(masked, shape)
        return _Answer(masked.text(self.uniform.path), result) if result in _AGREES else None

    def _call(self) -> tuple[int, list[Change]]:
        """(position of the smallest call in which most can be seen, changes for it)."""
        best, most, found = -1, (False, False, False, 0), list[Change]()
        for position in self.uniform.positions:
            call = self._graph.calls[position]
            leaves = _inputs_by_path(self._graph.shapes.complete(call))
            tensor = leaves[self.uniform.path]
            sizes = [n for leaf in leaves.values() if isinstance(leaf, torch.Tensor) for n in leaf.shape]
            wanted = changes(self.uniform, position, tensor, sizes)
            own = self.uniform.path not in self._graph.shapes.missing(call)
            rows = bool(tensor.dim()) and tensor.shape[0] > 1
            inside = tensor.dim() < 2 or tensor.shape[-1] > 2
            rank = (own, rows, inside, -tensor.numel())
            if wanted and (not found or rank > most):
                best, most, found = position, rank, wanted
        return best, found

    def _one(self, arguments: Mapping[str, Any], known: Leaves) -> _Compared:
        """Eager and the program on `arguments`; raises `_NoAnswer`."""
        try:
            expected, written = self._eager(arguments)
        except (Exception, SystemExit) as error:
            raise _NoAnswer(f"eager refuses it ({one_line(error)})") from error
        if _has_new_nan(expected, known):
            raise _NoAnswer("eager answers NaN")
        try:
            ran = _run(self.session, arguments, "other values", RunError)
        except RunError as error:
            raise _NoAnswer(f"the program refuses it ({error.message})") from error
        left, right = add_writes(self.session, expected, ran, arguments, written)
        try:
            where = rules_of_call(self._spec, _inputs_by_path(arguments), left, "compare")
            moved = MovedEager(self._target, lambda: arguments)
            results = compare_rounded(left, right, self.tolerances, where, moved)
        except ExportCheckError as error:
            # A mask of the spec's that fits no more, a comparison of the user's that judges nothing.
            raise _NoAnswer(f"what the spec compares by judges nothing ({error.message})") from error
        if too_tight(results).text:
            raise _NoAnswer("the tolerance of the spec is below eager's own noise")
        return _Compared(results, left, right, known, where, moved, self.tolerances)

    def _eager(self, arguments: Mapping[str, Any]) -> tuple[Leaves, Mapping[str, torch.Tensor]]:
        copies = clone_tree(dict(arguments))
        watch = WriteWatch(copies)
        return flatten_with_paths(clone_tree(self._target.call(copies))), watch.written()

    def _difference(
        self,
        tried: str,
        one: _Compared,
        arguments: Mapping[str, Any],
        given: Mapping[str, Any],
        position: int,
        told: tuple[str, ...] = (),
    ) -> _Answer:
        """A difference, if eager answers these values, and those of the call, as it did."""
        try:
            again, before = self._eager(arguments)[0], self._eager(given)[0]
        except (Exception, SystemExit) as error:
            return _Answer(refusal=f"eager refuses what it took before ({one_line(error)})")
        outputs = one.expected[: len(again)]
        for expected, got in ((outputs, again), (one.known, before)):
            if not all(each.ok for each in compare_leaves(expected, got, self.tolerances)):
                return _Answer(refusal="eager answers the same values otherwise when it is asked again")
        more = offer_ties(
            self.session,
            one.results,
            one.expected,
            one.got,
            _inputs_by_path(arguments),
            self.tolerances,
            one.where,
        )
        calls = len(self._graph.calls)
        found = _Difference(one.results, arguments, one.expected, position, calls, more, told)
        return _Answer(tried, "differs", difference=found)


class _NoAnswer(Exception):
    """Changed values show nothing; the message says why."""


@dataclass(frozen=True)
class _Compared:
    """Eager (`expected`) and the program (`got`) with changed values; `known`: eager as it was observed."""

    results: list[LeafComparison]
    expected: Leaves
    got: Leaves
    known: Leaves
    where: Mapping[str, torch.Tensor | Ties | Own]
    eager: MovedEager
    tolerances: Tolerances

    def result(self, change: Change, shape: Sequence[int]) -> str:
        """As in `_Answer`; ``hidden``: they differ where `change` hides a position, and nowhere else anything
        is seen of it."""
        if all(each.ok for each in self.results):
            return "agrees" if self.moved(()) else "no effect"
        places = _places(self, change, shape) if change.hidden else {}
        if not places or not self.agrees_at(places):
            return "differs"
        # Where a mask hides a position, its own outputs may be anything, if others show the mask.
        return _ELSEWHERE if self.moved(places) else "hidden"

    def moved(self, places: Mapping[str, torch.Tensor] | tuple[()]) -> bool:
        """Whether the change is seen in what eager returns, at `places` where there are any."""
        paths = {path for path, _ in self.known}
        now = [(path, leaf) for path, leaf in self.expected if path in paths]
        masks = {p: w for p, w in self.where.items() if isinstance(w, torch.Tensor)}
        for path, mask in dict(places).items():
            masks[path] = masks[path] & mask if path in masks else mask
        fits = {p: w for p, w in masks.items() if w.shape == _shape(dict(self.known).get(p))}
        return not all(each.ok for each in compare_leaves(now, self.known, self.tolerances, fits))

    def agrees_at(self, places: Mapping[str, torch.Tensor]) -> bool:
        """Whether the program agrees with eager at `places`."""
        where = {**self.where, **places}
        results = compare_rounded(self.expected, self.got, self.tolerances, where, self.eager)
        return all(each.ok for each in results)


def _shape(leaf: Any) -> torch.Size | None:
    return leaf.shape if isinstance(leaf, torch.Tensor) else None


def _has_new_nan(expected: Leaves, known: Leaves) -> bool:
    before = {path: _nans(leaf) for path, leaf in known}
    return any(_nans(leaf) and not before.get(path, False) for path, leaf in expected)


def _nans(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and bool(leaf.isnan().any())


def _places(one: _Compared, change: Change, shape: Sequence[int]) -> dict[str, torch.Tensor]:
    """Path of an output that differs -> everything but the place that the change hides there.

    Which axes are the rows and the positions is not known: of those that fit, the ones under which least
    differs. Empty where the place cannot be found in an output.
    """
    got, found = dict(one.got), {}
    for result in one.results:
        if result.ok:
            continue
        expected, other = dict(one.expected).get(result.path), got.get(result.path)
        rule = one.where.get(result.path)
        if _shape(expected) != _shape(other) or _shape(expected) is None or isinstance(rule, Ties | Own):
            return {}
        assert isinstance(expected, torch.Tensor)
        masks = [mask if rule is None else mask & rule for mask in _hiding(change, shape, expected.shape)]
        if not masks:
            return {}
        found[result.path] = min(
            masks,
            key=lambda mask: compare_leaf(result.path, expected, other, one.tolerances, mask).outside,
        )
    return found


def _hiding(change: Change, shape: Sequence[int], of: Sequence[int]) -> list[torch.Tensor]:
    """Booleans of the shape `of` that are false at the changed place, for each way in which axes may fit.

    The last positions of a mask are those of an output that is shorter (a decoding step, strided frames).
    """
    found = []
    for axes in itertools.permutations(range(len(of)), len(shape)):
        *rows, axis = axes
        start = change.index[-1] - (shape[-1] - of[axis])
        stop = start + change.count
        if stop <= 0 or of[axis] > shape[-1] or any(of[a] != n for a, n in zip(rows, shape, strict=False)):
            continue
        mask = torch.ones(tuple(of), dtype=torch.bool)
        index: list[Any] = [slice(None)] * len(of)
        for a, i in zip(rows, change.index, strict=False):
            index[a] = i
        index[axis] = slice(max(start, 0), stop)
        mask[tuple(index)] = False
        found.append(mask)
    return found
