"""The spec's ``compare`` rules for one call: positions that count, ties, a comparison of the user's own.

Outputs at padded positions may be garbage in one runtime and zeros in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import ObserveError
from ..spec import ModelSpec
from ..spec.names import choices
from .own import Own, own_comparisons
from .ties import Ties

__all__ = ["expand_mask", "rules_of_call", "where_masks"]

Leaves = Sequence[tuple[str, Any]]


def expand_mask(mask: torch.Tensor, shape: Sequence[int], axis: int) -> torch.Tensor | None:
    """`mask` (batch, length) as booleans of `shape`: batch on axis 0, the last positions on `axis`.

    ``None`` if the sizes do not fit. A mask is longer than the output of a decoding step, whose positions are
    the last ones.
    """
    if mask.dim() != 2 or len(shape) <= axis or shape[0] != mask.shape[0] or mask.shape[1] < shape[axis]:
        return None
    kept = mask.to("cpu").bool()[:, mask.shape[1] - shape[axis] :]
    view = [1] * len(shape)
    view[0], view[axis] = shape[0], shape[axis]
    return kept.reshape(view).expand(tuple(shape))


def rules_of_call(
    spec: ModelSpec, inputs: Mapping[str, Any], outputs: Leaves, stage: str
) -> dict[str, torch.Tensor | Ties | Own]:
    """Path of an output -> by what rule of the spec's ``compare`` it is judged, on one call.

    Parameters
    ----------
    inputs, outputs:
        Of the call, by path; eager's.
    stage:
        Which runs, for what goes wrong in a comparison of the user's own.

    Raises
    ------
    ObserveError
        See `where_masks`.
    ComparisonError
        A comparison of the user's own cannot be loaded.
    """
    return {**where_masks(spec.compare, inputs, outputs), **own_comparisons(spec, outputs, stage)}


def where_masks(
    rules: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Leaves
) -> dict[str, torch.Tensor | Ties]:
    """Path of an output -> positions to compare, or what its indices select from, by the spec's ``compare``
    rules (patterns of paths; the first that matches).

    Raises
    ------
    ObserveError
        A mask that does not fit the output; scores that are neither an input nor an output of the call, or
        that the output does not index.
    """
    found: dict[str, torch.Tensor | Ties] = {}
    for path, leaf in outputs:
        if not isinstance(leaf, torch.Tensor):
            continue
        for pattern, rule in rules.items():
            if fnmatchcase(path, pattern):
                if rule.ties:
                    found[path] = _ties(pattern, rule, path, leaf, inputs, outputs)
                elif rule.where and (mask := _mask(pattern, rule, path, leaf, inputs)) is not None:
                    found[path] = mask
                break
    return found


def _mask(
    pattern: str, rule: Any, path: str, leaf: torch.Tensor, inputs: Mapping[str, Any]
) -> torch.Tensor | None:
    mask = inputs.get(rule.where)
    if mask is None:
        # An optional mask that this call does not pass: every position counts.
        return None
    axis = 1 if rule.axis is None else rule.axis
    expanded = expand_mask(mask, leaf.shape, axis) if isinstance(mask, torch.Tensor) else None
    if expanded is None:
        raise ObserveError(
            f"compare.{pattern}: {rule.where} does not fit axis {axis} of {path} {list(leaf.shape)}"
        )
    return expanded


def _ties(
    pattern: str, rule: Any, path: str, leaf: torch.Tensor, inputs: Mapping[str, Any], outputs: Leaves
) -> Ties:
    scores = dict(outputs).get(rule.ties, inputs.get(rule.ties))
    if not isinstance(scores, torch.Tensor):
        names = [name for name, value in (*outputs, *inputs.items()) if isinstance(value, torch.Tensor)]
        raise ObserveError(
            f"compare.{pattern}: ties: no output or input tensor is called {rule.ties!r}"
            f"{choices(rule.ties, names)}"
        )
    ties = Ties(rule.ties, scores.detach().to("cpu"), rule.axis)
    problem = ties.misfit(leaf.detach().to("cpu"))
    if problem:
        raise ObserveError(f"compare.{pattern}: ties: {path} {list(leaf.shape)} {problem}")
    return ties
