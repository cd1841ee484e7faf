"""Matrices whose two axes are one symbol, at another size: a causal mask stays causal.

Grown axis by axis, as everything else is, the rows of a causal mask would begin again after the last.
"""

from __future__ import annotations

import torch

from ..pytrees.cloning import is_wrapper
from ..pytrees.strides import in_layout_of
from .shapes import TensorLeaf

__all__ = ["square_axes", "with_side"]


#: Those for which torch has all that is done here.
_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)

#: A triangle of fewer elements is no proof of one that is constant.
_LEAST_SIDE = 3


def square_axes(leaf: TensorLeaf) -> tuple[int, int] | None:
    """The two dynamic axes of one and the same dim; ``None`` where there are none, or more than two."""
    found = [
        axes
        for dim in dict.fromkeys(leaf.dynamic.values())
        if len(axes := [axis for axis, other in leaf.dynamic.items() if other == dim]) > 1
    ]
    return (found[0][0], found[0][1]) if len(found) == 1 and len(found[0]) == 2 else None


def with_side(tensor: torch.Tensor, axes: tuple[int, int], size: int) -> torch.Tensor | None:
    """`tensor` with sides of `size` for its matrices along `axes`, which are square; ``None``: no structure.

    * Where an element depends on the distance from the diagonal only (causal masks, windows, the identity,
      relative positions), so does it in what is made; beyond the distances that are known it is as at the
      farthest.
    * Where all elements above or below the diagonal are equal, or the matrix is symmetric, rows and columns
      are repeated or left out alike, and what was equal beyond the diagonal is: blocks stay blocks.
    """
    if tensor.layout is not torch.strided or is_wrapper(tensor) or tensor.dtype not in _DTYPES:
        return None
    side = tensor.shape[axes[0]]
    if side < 2 or size < 1 or tensor.shape[axes[1]] != side or not tensor.numel():
        return None
    matrices = tensor.movedim(axes, (-2, -1))
    made = _by_distance(matrices, size)
    if made is None:
        made = _alike(matrices, size)
    return None if made is None else in_layout_of(made.movedim((-2, -1), axes), tensor)


def _by_distance(matrices: torch.Tensor, size: int) -> torch.Tensor | None:
    side = matrices.shape[-1]
    if not _equal(matrices[..., 1:, 1:], matrices[..., :-1, :-1]):
        return None
    # Of distance -(side - 1), ..., -1 (above the diagonal), 0, ..., side - 1.
    known = torch.cat([matrices[..., 0, :].flip(-1), matrices[..., 1:, 0]], dim=-1)
    place = torch.arange(size, device=matrices.device)
    distance = (place[:, None] - place[None, :]).clamp(1 - side, side - 1) + side - 1
    return known[..., distance]


def _alike(matrices: torch.Tensor, size: int) -> torch.Tensor | None:
    side, device = matrices.shape[-1], matrices.device
    below = torch.ones(side, side, dtype=torch.bool, device=device).tril(-1)
    constant = {
        half: _constant(matrices[..., mask]) if side >= _LEAST_SIDE else None
        for half, mask in (("above", below.T), ("below", below))
    }
    if not any(value is not None for value in constant.values()) and not _equal(matrices, matrices.mT):
        return None
    index = ((torch.arange(size, device=device) + 0.5) * side / size).long()
    made = matrices[..., index[:, None], index[None, :]]
    below = torch.ones(size, size, dtype=torch.bool, device=device).tril(-1)
    for half, mask in (("above", below.T), ("below", below)):
        value = constant[half]
        if value is not None:
            made = torch.where(mask, value[..., None, None], made)
    return made


def _constant(rows: torch.Tensor) -> torch.Tensor | None:
    """What all of the last axis are, row by row; ``None`` if they differ in any."""
    return rows[..., 0] if _equal(rows, rows[..., :1].expand(rows.shape)) else None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
