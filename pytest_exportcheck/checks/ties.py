"""Indices that may differ where scores are equal: what they select is compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Ties"]


@dataclass(frozen=True, eq=False)
class Ties:
    """What indices (of a top-k, an argmax, a sort) select from.

    Attributes
    ----------
    path:
        Path of the scores, an output or an input of the call.
    scores:
        Those of eager: they judge the choice of a program, whatever it computed itself.
    axis:
        Axis of `scores` that the indices count along; ``None``: the last one, or all of the scores in a row
        for a single index into several axes (``argmax()`` without an axis).
    """

    path: str
    scores: torch.Tensor
    axis: int | None = None

    def _lanes(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """(scores, indices, axis) of one rank, or ``None`` if they do not fit."""
        scores = self.scores
        if self.axis is None and indices.dim() == 0 and scores.dim() > 1:
            scores = scores.flatten()
        axis = -1 if self.axis is None else self.axis
        if not scores.dim() or not -scores.dim() <= axis < scores.dim():
            return None
        axis %= scores.dim()
        if indices.dim() == scores.dim() - 1:
            # An argmax without keepdim.
            indices = indices.unsqueeze(axis)
        if indices.dim() != scores.dim():
            return None
        sizes = zip(indices.shape, scores.shape, strict=True)
        if any(one != other for at, (one, other) in enumerate(sizes) if at != axis):
            return None
        return scores, indices.long(), axis

    def misfit(self, expected: torch.Tensor) -> str:
        """Why `expected`, eager's own indices, cannot be indices into the scores; empty if they can."""
        if expected.is_floating_point() or expected.is_complex() or expected.dtype is torch.bool:
            return f"is {str(expected.dtype).removeprefix('torch.')}, no tensor of indices"
        lanes = self._lanes(expected)
        along = "its last axis" if self.axis is None else f"axis {self.axis}"
        if lanes is None:
            return f"does not index {self.path} {list(self.scores.shape)} along {along}"
        scores, indices, axis = lanes
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < scores.shape[axis]:
            return (
                f"holds {int(indices.min())} to {int(indices.max())}: no indices into {along} of {self.path} "
                f"{list(self.scores.shape)}"
            )
        return ""

    def fault(self, expected: torch.Tensor, got: torch.Tensor) -> tuple[int, str] | None:
        """(flat position, reason) of an index that is wrong whatever the scores: out of range, or twice in a
        lane where eager has none twice. Both are of one shape, and `misfit` is empty."""
        lanes, other = self._lanes(got), self._lanes(expected)
        assert lanes is not None
        assert other is not None
        scores, indices, axis = lanes
        size = scores.shape[axis]
        outside = ((indices < 0) | (indices >= size)).flatten().nonzero()
        if outside.numel():
            at = int(outside[0])
            return at, f"index {int(indices.flatten()[at])} is out of range, {self.path} has {size}"
        again = _repeats(indices, axis) & ~_repeats(other[1], axis).any(axis, keepdim=True)
        twice = again.flatten().nonzero()
        if twice.numel():
            at = int(twice[0])
            return at, f"index {int(indices.flatten()[at])} is there twice"
        return None

    def selected(self, indices: torch.Tensor) -> torch.Tensor:
        """Eager's scores at `indices`, in the shape of `indices`."""
        lanes = self._lanes(indices)
        assert lanes is not None
        scores, aligned, axis = lanes
        return scores.gather(axis, aligned).reshape(indices.shape)


def _repeats(indices: torch.Tensor, axis: int) -> torch.Tensor:
    """True where an index was there before on its lane."""
    order = indices.sort(dim=axis, stable=True)
    previous = order.values.roll(1, axis)
    same = order.values == previous
    if same.shape[axis]:
        same.select(axis, 0).fill_(False)
    return torch.zeros_like(same).scatter(axis, order.indices, same)
