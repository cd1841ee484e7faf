"""How far eager itself moves when its operators round otherwise: Monte Carlo arithmetic.

A runtime sums in another order than eager. Where a model subtracts large numbers from each other, what is
left is mostly rounding, and two right programs differ by more than any tolerance that is relative to the
output. Eager is replayed with what its operators return moved at random by a unit in the last place: its
outputs spread over what rounding alone can do. The idea is that of D. S. Parker, "Monte Carlo Arithmetic",
UCLA CSD-970002 (1997).

Nothing is run unless a comparison of numbers has failed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..exporters.base import plain_copy
from ..observe.records import RecordedCall
from ..observe.targets import Target
from ..pytrees import clone_tree, flatten_with_paths
from .compare import LeafComparison, compare_leaf, compare_leaves
from .moving import Moving, is_rounded, kept_generators
from .own import Own
from .ties import Ties
from .tolerance import Tolerances, size_of
from .trace import address
from .writes import WriteWatch, in_place

__all__ = ["MovedEager", "compare_rounded", "note_rounding"]

#: So many replays of eager; after the first few it is seen whether more of them can help.
_REPLAYS, _FIRST, _HOPELESS = 12, 3, 8.0

#: Longer replays would take the time of the stage, and end a failure as a timeout.
_SECONDS = 240

#: So many times the largest move over the replays is allowed: a runtime may be further off than they are (up
#: to twice, over cancellations in sums, products and normalizations of 64 to 4096 terms).
_FACTOR = 4.0

#: A move counts that is what is left of larger numbers (`Moving.limit`), or for which what is allowed is at
#: most this share of the output. Larger ones are of an ill-conditioned eager, or of one near a branch: a
#: fault could hide in what is allowed.
_OF_OUTPUT = 0.05

#: So many of the replays, moved by so many units instead of one, must move so many times as far, within a
#: factor (cancellation: 6.3 to 8.3 times): a branch or an angle that rounding decides has no such measure.
_STRONG_ONES, _STRONG, _WITHIN = 6, 8.0, 2.0

#: Where rounding decides for so many elements, the root mean square of their errors is at most so many times
#: that of the moves, and so is that of errors by moves, in which the largest do not outweigh all others: a
#: fault is in all of them (right programs: up to 1.1 for running sums, 0.6 for others).
_MANY, _AS_A_WHOLE = 16, 2.0


class MovedEager:
    """One call of eager, again with results that are rounded otherwise. Nothing runs until it is asked for.

    A copy of the module is called, so that what a call keeps (a counter, a table) stays as it was.

    Parameters
    ----------
    arguments:
        Makes the arguments of the call, by name.

    Attributes
    ----------
    plain:
        Path of an output, or of an input that was written to -> what is in it when nothing is moved.
    replays:
        How many there are.
    problem:
        Why there are no replays.
    """

    def __init__(self, target: Target, arguments: Callable[[], Mapping[str, Any]]) -> None:
        self._target = target
        self._arguments = arguments
        self.plain: dict[str, torch.Tensor] = {}
        # By path, over the replays: the largest move of each element, and the sum of the squares.
        self._moves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.replays = 0
        # By path, over replays of one strength and of the other: the sum of the squares of all moves.
        self._energy: dict[float, dict[str, float]] = {1.0: {}, _STRONG: {}}
        # By path, the largest moves of the real and the imaginary parts of a complex output.
        self._parts: dict[str, torch.Tensor] = {}
        # By path, the largest move of each element over the strong replays.
        self._strong: dict[str, torch.Tensor] = {}
        self._limit = 0.0
        self.problem = ""

    @classmethod
    def of(cls, target: Target, call: RecordedCall) -> MovedEager:
        """Of an observed call."""
        return cls(target, lambda: call.arguments)

    def replay(self, count: int) -> bool:
        """Have `count` replays or more; False if eager cannot be replayed."""
        if self.problem:
            return False
        try:
            # What torch.compile makes of a call under a mode would be used for later calls, without one.
            with kept_generators(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not self.plain:
                    self.plain = self._call()
                while self.replays < count:
                    began = time.perf_counter()
                    self._add(self._call(self.replays + 1))
                    if (time.perf_counter() - began) * (_REPLAYS + _STRONG_ONES) > _SECONDS:
                        raise TimeoutError(f"the replays would take more than {_SECONDS} s")
                if count == _REPLAYS and not self._energy[_STRONG]:
                    for seed in range(1, _STRONG_ONES + 1):
                        moves = self._moves_of(self._call(seed, _STRONG))
                        self._weigh(moves, _STRONG)
                        for path, move in moves.items():
                            self._strong[path] = move.maximum(self._strong.get(path, move))
        except Exception as error:
            # A module that cannot be copied, a branch in which moved values end in an error.
            self.problem = f"{type(error).__name__}: {error}"
            return False
        return True

    def _call(self, seed: int | None = None, strength: float = 1.0) -> dict[str, torch.Tensor]:
        module = self._target.module
        # Buffers are copied, weights are shared.
        weights = {id(each): each for each in module.parameters()}
        mode = Moving(frozenset(filter(None, map(address, weights.values()))), seed, strength)
        copied = plain_copy(module, weights)
        target = replace(self._target, module=copied)
        arguments = clone_tree(dict(self._arguments()))
        watch = WriteWatch(arguments)
        with mode:
            outputs = target.call(arguments)
        self._limit = max(self._limit, mode.limit)
        leaves = [*flatten_with_paths(outputs), *((in_place(p), v) for p, v in watch.written().items())]
        count = Counter(path for path, _ in leaves)
        return {
            path: leaf.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
            for path, leaf in leaves
            if count[path] == 1 and is_rounded(leaf)
        }

    def _moves_of(self, moved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moves = {}
        for path, plain in self.plain.items():
            other = moved.get(path)
            if other is not None and (other.shape, other.dtype) == (plain.shape, plain.dtype):
                move = (other - plain).abs()
                move = move.to(torch.promote_types(move.dtype, torch.float32))
                # A number that rounding makes infinite, or NaN; what is not finite anyway must stay as it is.
                move = move.nan_to_num(nan=math.inf, posinf=math.inf)
                moves[path] = move.where(plain.isfinite(), 0.0)
        return moves

    def _weigh(self, moves: Mapping[str, torch.Tensor], strength: float) -> None:
        for path, move in moves.items():
            known = self._energy[strength].get(path, 0.0)
            self._energy[strength][path] = known + float(move.double().square().sum())

    def _add(self, moved: Mapping[str, torch.Tensor]) -> None:
        moves = self._moves_of(moved)
        for path in moves:
            if moved[path].is_complex():
                part = torch.view_as_real(moved[path] - self.plain[path]).abs().double()
                part = part.nan_to_num(nan=math.inf, posinf=math.inf)
                self._parts[path] = part.maximum(self._parts.get(path, part))
        if self.replays < _STRONG_ONES:
            self._weigh(moves, 1.0)
        if not self.replays:
            self._moves = {path: (move, move.square()) for path, move in moves.items()}
        else:
            self._moves = {
                path: (largest.maximum(moves[path]), squares + moves[path].square())
                for path, (largest, squares) in self._moves.items()
                if path in moves
            }
        self.replays += 1

    def _grows(self, path: str) -> bool:
        """Whether the output moves further in the measure in which results do; True if that was not asked."""
        weak, strong = (self._energy[strength].get(path, math.inf) for strength in (1.0, _STRONG))
        if not self._energy[_STRONG]:
            return True
        low, high = ((_STRONG * factor) ** 2 for factor in (1 / _WITHIN, _WITHIN))
        return low * weak <= strong <= high * weak

    def spread(self, path: str, expected: torch.Tensor) -> _Spread | None:
        """How far the output at `path` moves; ``None`` where eager does not answer as before."""
        plain = self.plain.get(path)
        if path not in self._moves or plain is None:
            return None
        largest, squares = self._moves[path]
        limit = torch.zeros_like(largest)
        if self._grows(path):
            # An element that strong replays move no further jumps, by whatever the others move.
            jumps = (
                largest >= self._strong[path] if path in self._strong else torch.zeros_like(largest).bool()
            )
            limit[~jumps] = max(self._limit, _OF_OUTPUT / _FACTOR * size_of(plain))
        found = _Spread(largest, (squares / self.replays).sqrt(), limit, self._parts.get(path))
        # While it is exported, eager is a patched one, which may round otherwise.
        least = found.allowed if plain.shape == expected.shape else None
        return found if compare_leaf(path, expected, plain, Tolerances(), least=least).ok else None


@dataclass(frozen=True)
class _Spread:
    """How far an output moves, by element: at most, and the root mean square. Not negative.

    Attributes
    ----------
    limit:
        By element: a larger one is no rounding.
    parts:
        The largest moves of the real and of the imaginary part (last axis) of a complex output.
    """

    largest: torch.Tensor
    mean: torch.Tensor
    limit: torch.Tensor
    parts: torch.Tensor | None = None

    @property
    def allowed(self) -> torch.Tensor:
        """The error of each element that rounding explains."""
        return (_FACTOR * self.largest).where(self.largest <= self.limit, 0.0).to(torch.float64)


def compare_rounded(
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    tolerances: Tolerances,
    where: Mapping[str, torch.Tensor | Ties | Own] | None,
    eager: MovedEager | None,
) -> list[LeafComparison]:
    """`compare_leaves`; where numbers alone differ, what rounding does to eager itself is allowed.

    The larger of both is allowed, not the sum: where eager hardly moves the tolerance stays what it is.
    """
    results = compare_leaves(expected, got, tolerances, where)
    failed = [result for result in results if not result.ok]
    # What no tolerance makes up for is no rounding.
    if not failed or eager is None or any(each.reason or each.would_need is None for each in failed):
        return results
    left, right = dict(expected), dict(got)
    for count in (_FIRST, _REPLAYS):
        if not eager.replay(count):
            note = f"how far rounding moves eager is not known: {eager.problem}"
            return [each if each.ok else _noted(each, note) for each in results]
        spreads = {result.path: eager.spread(result.path, left[result.path]) for result in failed}
        if all(_is_hopeless(result, spreads[result.path]) for result in failed):
            break
    judged = []
    for result in results:
        spread = None if result.ok else spreads[result.path]
        if spread is not None:
            mask = (where or {}).get(result.path)
            assert not isinstance(mask, Ties | Own)
            result = _judged(result, left[result.path], right[result.path], tolerances, mask, spread)
        judged.append(result)
    return judged


def _is_hopeless(result: LeafComparison, spread: _Spread | None) -> bool:
    assert result.would_need is not None
    return spread is None or result.would_need > _HOPELESS * _FACTOR * float(spread.largest.max())


def _judged(
    result: LeafComparison,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: _Spread,
) -> LeafComparison:
    """The comparison that failed, with what is known of eager's own rounding."""
    assert result.would_need is not None
    moves = float(spread.largest.max())
    result = replace(result, eager_moves=moves)
    said = f"eager itself moves by up to {moves:.1e} when its operators round otherwise"
    again = compare_leaf(result.path, expected, got, tolerances, where, spread.allowed)
    if tolerances.is_given(result.path):
        note = f"{said}; the tolerance is the one of the spec" if again.ok else ""
    elif again.ok and not _is_shifted(result.path, expected, got, tolerances, where, spread):
        note = f"the difference is rounding: {said}"
        result = replace(result, ok=True)
    elif _FACTOR * moves <= result.atol:
        note = ""
    else:
        note = f"{said}, which does not explain the difference"
    return _noted(result, note)


def _noted(result: LeafComparison, note: str) -> LeafComparison:
    return replace(result, note="; ".join(filter(None, [result.note, note])))


def _is_shifted(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: _Spread,
) -> bool:
    """Whether the errors of the elements that rounding decides are too large as a whole, or in one part."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (value.detach().to("cpu", wide).resolve_conj().resolve_neg() for value in (got, expected))
    tolerance = tolerances.of(path, expected)
    plain = tolerances.by_element(path, expected.to("cpu"), tolerance) + tolerance.rtol * b.abs()
    decided = (spread.allowed > plain) & a.isfinite() & b.isfinite()
    if where is not None:
        decided &= where
    if spread.parts is not None:
        # What makes one part uncertain says nothing of the other.
        errors = torch.view_as_real(a - b).abs()[decided]
        allowed = (_FACTOR * spread.parts[decided]).maximum(plain[decided][:, None])
        if bool((errors > allowed).any()):
            return True
    if int(decided.sum()) < _MANY:
        return False
    excess = ((a - b).abs() - plain).clamp_min(0.0)[decided]
    moves = spread.mean[decided].double()
    if float(excess.square().sum()) > _AS_A_WHOLE**2 * float(moves.square().sum()):
        return True
    return float((excess / moves).square().mean()) > _AS_A_WHOLE**2


def note_rounding(record: dict[str, Any], results: Sequence[LeafComparison], what: str) -> None:
    """Put down in the record which outputs agree only because eager itself moves as far."""
    found = [
        f"{what}: {result.path} is off by {result.max_abs:.1e} (atol {result.atol:.1e}), eager itself moves "
        f"by up to {result.eager_moves:.1e} when its operators round otherwise"
        for result in results
        if result.ok and result.eager_moves is not None
    ]
    if found:
        record.setdefault("rounding", []).extend(found)
