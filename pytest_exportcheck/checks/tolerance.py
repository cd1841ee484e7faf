"""How far an output may be from eager's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

__all__ = ["Tolerance", "Tolerances", "below_fill_values", "size_of"]

#: dtype -> (atol, rtol). For floats, atol is relative to the largest absolute value of the output (see
#: `Tolerances`): tiny random models have tiny outputs, and a fixed atol would hide every error in them. Over
#: 500 float32 runs of 57 families every right one was below 5e-6, the smallest real error was 1.5e-3.
_DEFAULTS: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (4e-3, 1e-2),
    torch.bfloat16: (3e-2, 5e-2),
    torch.complex64: (1e-5, 1e-4),
    torch.complex128: (1e-9, 1e-9),
}

#: Where a slice along an axis (a channel, a row) has at least so many values and all of them are smaller than
#: the output by more than this factor, the default atol is scaled by the slice instead: the scores beside the
#: box coordinates of a detector. The factor leaves room for what cancels out within a slice, the count makes
#: a slice whose values are small by chance as good as impossible.
_SLICE_VALUES, _SLICE_FACTOR = 16, 10.0

#: A slice whose values are all below so many roundings of the output's size would be zero but for rounding
#: (the imaginary parts of the transform of a symmetric signal): its atol is not below that.
_ROUNDINGS = 8

#: An output whose values are all below so many roundings of 1 would be zero but for rounding (the mean of
#: what layer normalization returns, a sum of probabilities less 1): its atol is not below that. Half
#: precision has outputs of that size.
_ROUNDINGS_OF_ONE = 4

#: The default atol is not scaled below this share, nor above this multiple, of the value in `_DEFAULTS`. The
#: lower end leaves room for outputs that would be zero but for rounding.
_SCALE = (1e-3, 1e3)


@dataclass(frozen=True)
class Tolerance:
    """``|a - b| <= atol + rtol * |b|``."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class Tolerances:
    """What a spec asks for.

    Attributes
    ----------
    atol, rtol:
        For every float output; ``None``: the default of its dtype, atol scaled to the size of the output.
    outputs:
        Pattern of paths (``logits``, ``cache.*``) -> ``{"atol": ..., "rtol": ...}``; the first match wins.
    computed_in:
        The dtype of the case. An output of a finer dtype was cast to it at the end (``logits.float()``) and
        is as exact as what it was computed from.
    places:
        Pattern of `outputs`, ``""`` for the general ones -> where the spec says it, for messages.
    """

    atol: float | None = None
    rtol: float | None = None
    outputs: Mapping[str, Mapping[str, float | None]] | None = None
    computed_in: torch.dtype | None = None
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    def is_given(self, path: str) -> bool:
        """Whether the tolerance of an output is somebody's word."""
        return self._given(path) != (None, None)

    def place_of(self, path: str) -> str:
        """Where somebody says how far an output may be off: its atol, or else its rtol; empty if unknown."""
        general = self.places.get("", "")
        for pattern, given in (self.outputs or {}).items():
            if fnmatchcase(path, pattern):
                own = given.get("atol") is not None or (self.atol is None and given.get("rtol") is not None)
                return self.places.get(pattern, "") if own else general
        return general

    def of(self, path: str, expected: torch.Tensor) -> Tolerance:
        """The tolerance for one output as a whole."""
        atol, rtol = self._given(path)
        if not (expected.is_floating_point() or expected.is_complex()):
            return Tolerance(0.0, 0.0)
        default_atol, default_rtol, _ = self._default(expected)
        if atol is None:
            atol = default_atol * _clamped(size_of(expected), self._least(expected))
        return Tolerance(atol, default_rtol if rtol is None else rtol)

    def by_element(self, path: str, expected: torch.Tensor, whole: Tolerance) -> torch.Tensor | float:
        """The atol of every element, as something that broadcasts; `whole` is what `of` returned."""
        if self._given(path)[0] is not None:
            return whole.atol
        atol, _, eps = self._default(expected)
        return _slice_sizes(expected, _ROUNDINGS * eps, atol, self._least(expected)) * atol

    def _least(self, expected: torch.Tensor) -> float:
        """What the default atol is scaled by where the output is zero but for rounding."""
        atol, _, eps = self._default(expected)
        zero = eps < 1e-5 and size_of(expected) <= _ROUNDINGS_OF_ONE * eps
        return _ROUNDINGS_OF_ONE * eps / atol if zero else 0.0

    def _given(self, path: str) -> tuple[float | None, float | None]:
        atol, rtol = self.atol, self.rtol
        for pattern, given in (self.outputs or {}).items():
            if fnmatchcase(path, pattern):
                atol = atol if given.get("atol") is None else given["atol"]
                rtol = rtol if given.get("rtol") is None else given["rtol"]
                break
        return atol, rtol

    def _default(self, expected: torch.Tensor) -> tuple[float, float, float]:
        """(atol, rtol, distance from 1 to the next number) of the coarser dtype."""
        dtypes = [dtype for dtype in (expected.dtype, self.computed_in) if dtype in _DEFAULTS]
        known = [(*_DEFAULTS[dtype], float(torch.finfo(dtype).eps)) for dtype in dtypes if dtype is not None]
        return max(known, default=(1e-5, 1e-4, float(torch.finfo(torch.float32).eps)))


def _clamped(size: float, least: float) -> float:
    return min(max(size, _SCALE[0], least), _SCALE[1])


#: Elements of nearly one size (within `_BAND`) that stand off from all smaller ones by this factor are fill
#: values (the -3e38 of masked logits, or -1e4 with a logit added), not the size of the output: scaled by
#: them, the tolerance would hide every error. Large values of many sizes are the output itself.
_FILL, _BAND = 1e3, 0.9


def size_of(tensor: torch.Tensor) -> float:
    """Largest absolute value of `tensor`, infinities, NaN and fill values left out; 0 if there is none."""
    flat = tensor.detach().flatten().abs().to(torch.float64)
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    if not flat.numel():
        return 0.0
    while (below := below_fill_values(flat)) is not None:
        flat = below
    return float(flat.max())


def below_fill_values(sizes: torch.Tensor) -> torch.Tensor | None:
    """The absolute values below the largest ones, where these stand off as fill values do; else ``None``."""
    top = sizes.max()
    below = sizes[sizes < top * _BAND]
    return below if below.numel() and top > _FILL * below.max() else None


def _slice_sizes(expected: torch.Tensor, rounding: float, atol: float, least: float) -> torch.Tensor:
    """What `atol`, the default, is scaled by, for each element: the size of the output, less in small slices.

    `rounding`: a slice below this share of the output's size is zero but for rounding; `least`: of the whole.
    """
    size = size_of(expected)
    values = expected.detach().abs().to(torch.float64)
    values = values.where(torch.isfinite(values) & (values <= size), 0.0)
    scale = torch.full((), _clamped(size, least), dtype=torch.float64)
    for axis in range(values.dim()):
        others = [other for other in range(values.dim()) if other != axis]
        if not others or values.shape[axis] < 2:
            continue
        enough = (values > 0).sum(others, keepdim=True) >= _SLICE_VALUES
        largest = values.amax(others, keepdim=True)
        bound = torch.full_like(largest, max(_SCALE[0], least))
        # A tensor of float64: as a plain number it would be cast to float32, and overflow.
        bound[largest <= rounding * size] = rounding * size / atol
        largest = (largest * _SLICE_FACTOR).clamp(max=_SCALE[1]).maximum(bound)
        scale = torch.minimum(scale, largest.where(enough, math.inf))
    return scale
