"""What a spec may say of indices that differ, where the program chose among equal values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..runtimes.base import Session
from ..runtimes.choices import Choice
from .compare import LeafComparison, Tolerances, compare_leaf
from .ties import Ties

__all__ = ["offer_ties"]


def offer_ties(
    session: Session,
    results: Sequence[LeafComparison],
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    inputs: Mapping[str, Any],
    tolerances: Tolerances,
    ruled: Collection[str] = (),
) -> list[str]:
    """For the details of a failure: the rule ``ties`` for outputs that are chosen indices.

    Offered where it would pass, or where the values are no output and nothing can be said of them. Where the
    indices select other values, the difference is one, and nothing is offered.

    Parameters
    ----------
    ruled:
        Paths of outputs for which the spec has a rule already.
    """
    choices: Mapping[str, Choice] = getattr(session, "choices", {})
    left, right = dict(expected), dict(got)
    lines = []
    for result in results:
        choice = choices.get(result.path)
        if choice is None or result.ok or result.path in ruled:
            continue
        a, b = left.get(result.path), right.get(result.path)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
            continue
        what = f"{result.path} are the indices of {_NAMES.get(choice.operator, choice.operator)}"
        if not choice.values:
            lines.append(
                f"{what} of values that are no output: where such values are equal, any of their indices is "
                "right. To have what they select compared, return the values too, and say "
                f"compare: {{{result.path}: {{ties: NAME OF THE VALUES}}}}"
            )
            continue
        rule = _passing_rule(
            result.path, a, b, choice.values, left.get(choice.values, inputs.get(choice.values)), tolerances
        )
        if rule:
            lines.append(
                f"{what} of {choice.values}, and select equal values where they differ: to compare what they "
                f"select, say compare: {{{result.path}: {rule}}}"
            )
    return lines


_NAMES = {"ArgMax": "an argmax", "ArgMin": "an argmin", "TopK": "a top-k or a sort"}


def _passing_rule(
    path: str, expected: torch.Tensor, got: torch.Tensor, name: str, values: Any, tolerances: Tolerances
) -> str:
    """The rule of the spec, with the axis if it is not the last; empty if none passes."""
    if not isinstance(values, torch.Tensor):
        return ""
    values, expected = values.detach().to("cpu"), expected.detach().to("cpu")
    for axis in (None, *range(values.dim())):
        ties = Ties(name, values, axis)
        if not ties.misfit(expected) and compare_leaf(path, expected, got, tolerances, ties).ok:
            return f"{{ties: {name}}}" if axis is None else f"{{ties: {name}, axis: {axis}}}"
    return ""
