"""Positions that count: outputs at padded positions may be garbage in one runtime and zeros in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import ObserveError

__all__ = ["expand_mask", "where_masks"]


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


def where_masks(
    rules: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Sequence[tuple[str, Any]]
) -> dict[str, torch.Tensor]:
    """Path of an output -> positions to compare, by the spec's ``compare`` rules (patterns of paths).

    Raises
    ------
    ObserveError
        A rule names no input of the call, or a mask that does not fit the output.
    """
    masks = {}
    for path, leaf in outputs:
        if not isinstance(leaf, torch.Tensor):
            continue
        for pattern, rule in rules.items():
            if not fnmatchcase(path, pattern):
                continue
            mask = inputs.get(rule.where)
            if mask is None:
                # An optional mask that this call does not pass: every position counts.
                break
            expanded = expand_mask(mask, leaf.shape, rule.axis) if isinstance(mask, torch.Tensor) else None
            if expanded is None:
                raise ObserveError(
                    f"compare.{pattern}: {rule.where} does not fit "
                    f"axis {rule.axis} of {path} {list(leaf.shape)}"
                )
            masks[path] = expanded
            break
    return masks
