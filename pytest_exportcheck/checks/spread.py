"""How far an output spreads over replays of eager whose operators round otherwise, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .tolerance import size_of

__all__ = ["ALLOWED", "STRONG", "Moves", "Spread"]

#: So many times the largest move over the replays is allowed: a runtime may be further off than they are (up
#: to twice, over cancellations in sums, products and normalizations of 64 to 4096 terms).
ALLOWED = 4.0

#: A move counts that is what is left of larger numbers (`Moving.limit`), or for which what is allowed is at
#: most this share of the output. Larger ones are of an ill-conditioned eager, or of one near a branch: a
#: fault could hide in what is allowed.
_OF_OUTPUT = 0.05

#: Results that are moved by so many units instead of one must move the elements of an output so many times as
#: far, half of those that do not jump, within a factor (cancellation: 6.3 to 8.3 times): a branch or an angle
#: that rounding decides has no such measure. Not by the sum of all moves: a few near a branch outweigh it.
STRONG, _WITHIN = 8.0, 2.0

#: An element jumps, whatever the others do, that moves no more than so many times as far, at most and as the
#: root of the mean square.
_JUMPS_AT_MOST, _JUMPS = 1.1, 1.5

#: Near the end of the domain of a function moves grow as a root or a logarithm does. An element is believed
#: there whose values lie so many times as far apart (a root: 2.8 times), by what is at most this share of the
#: output.
_GROWS_AT_BOUND, _OF_OUTPUT_AT_BOUND = 1.1, 0.25

#: Where so many elements may be finite or not, the share of those that are not is at most half way from the
#: largest share in a replay to all: a fault makes all of them so.
_MANY = 16

_FINITE, _FINITE_OR_NAN = 1, 3


def _all_bits(kinds: torch.Tensor) -> int:
    return sum(bit for bit in (1, 2, 4, 8) if bool((kinds & bit).any()))


def _kinds(values: torch.Tensor) -> torch.Tensor:
    """What each element is, one bit each (uint8): finite, NaN, an infinity, the other one."""
    if values.is_complex():
        return torch.where(values.isfinite(), _FINITE, 2).to(torch.uint8)
    found = torch.full(values.shape, _FINITE, dtype=torch.uint8)
    for bit, positions in ((2, values.isnan()), (4, values == math.inf), (8, values == -math.inf)):
        found[positions] = bit
    return found


class Moves:
    """What replays make of one output; nothing of a replay itself is kept.

    Parameters
    ----------
    plain:
        The output when nothing is moved, on the CPU: floating or complex.
    """

    def __init__(self, plain: torch.Tensor) -> None:
        self._plain = plain
        self._is_finite = plain.isfinite()
        self._replays = {1.0: 0, STRONG: 0}
        zero = torch.zeros(plain.shape, dtype=torch.promote_types(plain.abs().dtype, torch.float32))
        self._largest = {1.0: zero, STRONG: zero}
        self._squares = {1.0: zero, STRONG: zero}
        #: The largest moves of the real and the imaginary parts of a complex output (last axis).
        self._parts = torch.zeros(*plain.shape, 2, dtype=torch.float64) if plain.is_complex() else None
        #: `_kinds` of the plain call and of all replays, and what the finite values lie between.
        self._seen = _kinds(plain)
        self._always_finite = self._is_finite
        lowest = highest = None
        if not plain.is_complex():
            lowest = plain.where(self._is_finite, math.inf)
            highest = plain.where(self._is_finite, -math.inf)
        self._low, self._high = {1.0: lowest, STRONG: lowest}, {1.0: highest, STRONG: highest}
        self._most_not_finite = int((~self._is_finite).sum())

    def add(self, moved: torch.Tensor, strength: float) -> bool:
        """Take in the output of a replay; False if it has another shape or dtype."""
        plain = self._plain
        if (moved.shape, moved.dtype) != (plain.shape, plain.dtype):
            return False
        is_finite = moved.isfinite()
        both = is_finite & self._is_finite
        zero = self._squares[1.0].new_zeros(())
        move = (moved - plain).abs().to(zero.dtype).where(both, zero)
        # What strong replays take out of the finite numbers moves further than any of them.
        far = move if strength == 1.0 else move.where(is_finite | ~self._is_finite, math.inf)
        self._largest[strength] = far.maximum(self._largest[strength])
        self._squares[strength] = self._squares[strength] + move.square()
        self._replays[strength] += 1
        if self._parts is not None and strength == 1.0:
            parts = torch.view_as_real(moved - plain).abs().double()
            self._parts = parts.where(both[..., None], 0.0).maximum(self._parts)
        self._seen = self._seen | _kinds(moved)
        self._always_finite = self._always_finite & is_finite
        self._most_not_finite = max(self._most_not_finite, int((~is_finite).sum()))
        low, high = self._low[strength], self._high[strength]
        if low is not None and high is not None:
            self._low[strength] = low.minimum(moved.where(is_finite, math.inf))
            self._high[strength] = high.maximum(moved.where(is_finite, -math.inf))
        return True

    def _grow_at_bound(self) -> torch.Tensor:
        """Elements whose values lie further apart, though in no measure."""
        (low, far_low), (high, far_high) = self._low.values(), self._high.values()
        if low is None or far_low is None or high is None or far_high is None:
            return torch.zeros_like(self._is_finite)
        leaves = self._largest[STRONG].isinf()
        return leaves | (far_high - far_low >= _GROWS_AT_BOUND * (high - low))

    def _ends(self, of: dict[float, torch.Tensor | None], largest: bool) -> torch.Tensor | None:
        weak, strong = of.values()
        if weak is None or strong is None:
            return None
        return weak.maximum(strong) if largest else weak.minimum(strong)

    def _growth(self) -> torch.Tensor:
        """How many times as far each element moves when results do; infinite for what moves only then."""
        weak, strong = (
            self._squares[strength].double() / max(self._replays[strength], 1) for strength in (1.0, STRONG)
        )
        return (strong / weak).sqrt().where(weak > 0, math.inf).where(strong > 0, 0.0)

    def spread(self, limit: float, at_bound: bool) -> Spread:
        """What can be said so far.

        Parameters
        ----------
        limit:
            What is left of larger numbers, at most (`Moving.limit`).
        at_bound:
            Whether a function was given numbers at the end of its domain (`Moving.at_bound`).
        """
        largest, strong, size = self._largest[1.0], self._largest[STRONG], size_of(self._plain)
        mean = (self._squares[1.0] / self._replays[1.0]).sqrt()
        believed = torch.zeros_like(largest)
        asked = self._replays[STRONG] > 0
        grows = torch.ones_like(largest).bool()
        if asked:
            growth, grows = self._growth(), strong >= _JUMPS_AT_MOST * largest
            measured = growth[self._always_finite & grows & (largest > 0)]
            middle = float(measured.median()) if measured.numel() else STRONG
            grows &= growth >= _JUMPS
            grows &= STRONG / _WITHIN <= middle <= STRONG * _WITHIN
        believed[grows] = max(limit, _OF_OUTPUT / ALLOWED * size)
        if asked and at_bound:
            bound = max(limit, math.sqrt(limit), _OF_OUTPUT_AT_BOUND / ALLOWED * size)
            at_end = self._grow_at_bound()
            believed[at_end] = bound
            # Weak replays may all have pushed an element against the end (the root of what is clamped at 0);
            # strong ones push it the other way.
            hidden = at_end & strong.isfinite() & (strong > 2 * STRONG * largest)
            largest = (strong / math.sqrt(STRONG)).where(hidden, largest)
            far = (self._squares[STRONG] / self._replays[STRONG] / STRONG).sqrt()
            mean = far.where(hidden, mean)
        return Spread(
            self._plain,
            largest,
            mean,
            believed,
            self._parts,
            self._seen,
            self._ends(self._low, largest=False),
            self._ends(self._high, largest=True),
            self._most_not_finite,
        )


@dataclass(frozen=True)
class Spread:
    """How far an output moves, by element.

    Attributes
    ----------
    plain:
        The output when nothing is moved.
    largest, mean:
        Its moves: at most, and the root mean square. Not negative.
    limit:
        By element: a larger move is no rounding.
    parts:
        The largest moves of the real and of the imaginary part (last axis) of a complex output.
    seen:
        What each element was, at one time or other: finite, NaN, an infinity.
    low, high:
        What its finite values lie between; ``None`` of a complex output.
    most_not_finite:
        How many elements were not finite, at most, in one replay.
    """

    plain: torch.Tensor
    largest: torch.Tensor
    mean: torch.Tensor
    limit: torch.Tensor
    parts: torch.Tensor | None
    seen: torch.Tensor
    low: torch.Tensor | None
    high: torch.Tensor | None
    most_not_finite: int

    @property
    def allowed(self) -> torch.Tensor:
        """The error of each element that rounding explains."""
        explained = (ALLOWED * self.largest).where(self.largest <= self.limit, 0.0).to(torch.float64)
        return explained if self.low is None else explained.maximum(self._across())

    def _across(self) -> torch.Tensor:
        """The error allowed of finite elements that are not always finite: what they are between, twice."""
        assert self.low is not None
        assert self.high is not None
        plain, low, high = self.plain.double(), self.low.double(), self.high.double()
        across = (plain - low).maximum(high - plain) + (high - low)
        return across.where(self.may_cross & plain.isfinite(), 0.0)

    @property
    def may_cross(self) -> torch.Tensor:
        """Elements that are finite in one replay and not in another, or not in the same way."""
        return (self.seen & (self.seen - 1)) != 0

    def excused(self, got: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
        """Elements of `got` that may be finite where eager's are not, or the other way round.

        A value that is not finite was seen there in a replay; a finite one lies between those that were, or
        no further outside than these are apart, or than `tolerance` (by element).
        """
        crosses = self.may_cross
        if self.low is None or self.high is None or not bool(crosses.any()):
            return torch.zeros_like(crosses)
        got = got.detach().to("cpu").resolve_neg()
        kinds = _kinds(got)
        # Between numbers and what is beyond the end of the domain is the end, where others were infinite.
        ends = torch.where((self.seen & _FINITE_OR_NAN) == _FINITE_OR_NAN, _all_bits(self.seen[crosses]), 0)
        seen = self.seen | (ends & ~_FINITE_OR_NAN)
        values, low, high = got.double(), self.low.double(), self.high.double()
        slack = (high - low).maximum(tolerance)
        near = (values >= low - slack) & (values <= high + slack)
        excused = crosses & ((kinds & seen) != 0) & (near | (kinds != _FINITE))
        count = int(crosses.sum())
        never = int(((self.seen & _FINITE) == 0).sum())
        share = (self.most_not_finite - never) / max(count, 1)
        not_finite = int((crosses & (kinds != _FINITE)).sum()) / max(count, 1)
        if count >= _MANY and not_finite > (1 + share) / 2:
            return torch.zeros_like(excused)
        return excused
