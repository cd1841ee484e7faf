"""A program that is wrong in the padded calls and in no other: it does not read the mask, or otherwise.

Asked after a failure only. That the calls fall apart in this way may be chance, as they differ in sizes too:
so one of them is made once more with nothing masked. Where all calls are padded that call alone is asked, and
the program must answer it as before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree

from ..exporters.base import plain_copy
from ..observe.observation import GraphObservation
from ..pytrees import clone_tree, flatten_with_paths
from ..spec import ModelSpec
from .compare import Tolerances, compare_leaves
from .moving import kept_generators
from .numbers import Leaves, _inputs_by_path, _only_padding
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded

__all__ = ["mask_lines"]

#: What a program answers to (arguments by name), where it answers.
Answer = Callable[[dict[str, Any]], Leaves]


def mask_lines(spec: ModelSpec, graph: GraphObservation, tolerances: Tolerances, answer: Answer) -> list[str]:
    """For the details of a failure on observed calls: a line, or none where they show no such thing.

    Parameters
    ----------
    answer:
        Of the program that failed.
    """
    if graph.stateful:
        return []
    with contextlib.suppress(Exception), kept_generators(), warnings.catch_warnings():
        # Whatever raises shows nothing; a word more must not cost the failure.
        warnings.simplefilter("ignore")
        return _lines(_Calls(spec, graph, tolerances, answer))
    return []


class _Calls:
    """The observed calls of a graph, and what the program makes of them.

    Attributes
    ----------
    arguments:
        Of each call, by name.
    """

    def __init__(
        self, spec: ModelSpec, graph: GraphObservation, tolerances: Tolerances, answer: Answer
    ) -> None:
        self._spec, self._graph, self._tolerances, self._answer = spec, graph, tolerances, answer
        self.arguments = [graph.shapes.complete(call) for call in graph.calls]

    def padded(self) -> dict[str, list[bool]]:
        """Path of a mask, which is 0 or 1 in every call -> of each call, whether it has a 0."""
        inputs = [_inputs_by_path(arguments) for arguments in self.arguments]
        found = {}
        for path in inputs[0]:
            values = [each.get(path) for each in inputs]
            if "mask" in path.rpartition(".")[2] and all(map(_is_mask, values)):
                found[path] = [not bool(value.bool().all()) for value in values if value is not None]
        return found

    def agrees(self, position: int, masks: Iterable[str]) -> bool | None:
        """Whether the program answers a call as eager did; ``None``: all but where one of `masks` is 0."""
        call, arguments = self._graph.calls[position], self.arguments[position]
        eager = MovedEager.of(self._graph.target, call)
        expected, got = call.output_leaves(), self._answer(dict(arguments))
        inputs = _inputs_by_path(arguments)
        if self._same(arguments, expected, got, eager):
            return True
        padding = ({"attention_mask": inputs[path]} for path in masks)
        if any(_only_padding(expected, got, each, self._tolerances, eager) for each in padding):
            return None
        return False

    def agrees_unmasked(self, position: int, masks: Sequence[str]) -> bool:
        """The same of a call with all ones in `masks`, and of eager's answer to that."""
        arguments = _with_ones(self.arguments[position], masks)
        weights = {id(each): each for each in self._graph.target.module.parameters()}
        # What the call leaves in the model stays in a copy of it.
        target = replace(self._graph.target, module=plain_copy(self._graph.target.module, weights))
        expected = flatten_with_paths(clone_tree(target.eager(arguments)))
        got = self._answer(dict(arguments))
        return self._same(arguments, expected, got, MovedEager(target, lambda: arguments))

    def unread(self, position: int, masks: Sequence[str]) -> bool:
        """Whether the program answers the same to all ones in `masks`."""
        arguments = self.arguments[position]
        got, other = (self._answer(each) for each in (dict(arguments), _with_ones(arguments, masks)))
        where = rules_of_call(self._spec, _inputs_by_path(arguments), got, "compare")
        return all(each.ok for each in compare_leaves(got, other, self._tolerances, where))

    def _same(self, arguments: Mapping[str, Any], expected: Leaves, got: Leaves, eager: MovedEager) -> bool:
        where = rules_of_call(self._spec, _inputs_by_path(arguments), expected, "compare")
        return all(each.ok for each in compare_rounded(expected, got, self._tolerances, where, eager))


def _lines(calls: _Calls) -> list[str]:
    padded = {path: each for path, each in calls.padded().items() if any(each)}
    apart = {path: each for path, each in padded.items() if not all(each)}
    return _told_apart(calls, apart) or _in_every_call(calls, [path for path in padded if path not in apart])


def _told_apart(calls: _Calls, padded: dict[str, list[bool]]) -> list[str]:
    """Of masks that have zeros in some calls and none in others."""
    # Nothing is run where no mask tells calls apart, nor when none does any more.
    count = len(calls.arguments)
    agrees: list[bool] = []
    while padded and len(agrees) < count:
        answer = calls.agrees(len(agrees), padded)
        if answer is None:
            return []
        padded = {path: each for path, each in padded.items() if each[len(agrees)] is not answer}
        agrees.append(answer)
    masks = list(padded)
    if not masks or not calls.agrees_unmasked(first := agrees.index(False), masks):
        return []
    differ = agrees.count(False)
    return [
        f"the calls with zeros in {', '.join(masks)} differ ({differ} of {count}), those with ones only "
        f"agree ({count - differ} of {count}), and call {first + 1} agrees too with ones there"
    ]


def _in_every_call(calls: _Calls, masks: list[str]) -> list[str]:
    """Of masks that have zeros in every call: no call shows what the program makes of ones.

    That one agrees with ones is not enough: where 1 means "left out", ones hide other faults.
    So its answer must be the one that it gave to the mask with zeros, too.
    """
    count = len(calls.arguments)
    if not masks or any(calls.agrees(position, masks) is not False for position in range(count)):
        return []
    for some in [[each] for each in masks] + ([masks] if len(masks) > 1 else []):
        if calls.unread(0, some) and calls.agrees_unmasked(0, some):
            names = ", ".join(some)
            if count == 1:
                return [f"the only call has zeros in {names} and differs; it agrees with ones there"]
            return [f"all {count} calls have zeros in {names} and differ; call 1 agrees with ones there"]
    return []


def _is_mask(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 0
        and not value.is_complex()
        and bool(((value == 0) | (value == 1)).all())
    )


def _with_ones(arguments: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    changed = dict(arguments)
    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        for at, (path, leaf) in enumerate(flatten_with_paths(value, name)):
            if path in paths:
                leaves[at] = torch.ones_like(leaf)
        changed[name] = _pytree.tree_unflatten(leaves, spec)
    return changed
