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
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..exporters.base import plain_copy
from ..observe.records import RecordedCall
from ..observe.targets import Target
from ..pytrees import clone_tree, flatten_with_paths
from .compare import LeafComparison, compare_leaf, compare_leaves
from .moving import Moving, is_rounded, kept_generators
from .own import Own
from .spread import ALLOWED, STRONG, Moves, Spread
from .ties import Ties
from .tolerance import Tolerances
from .trace import address
from .writes import WriteWatch, in_place

__all__ = ["MovedEager", "compare_rounded", "note_rounding"]

#: So many replays of eager; after the first few it is seen whether more can help. As many have results
#: moved by more (`STRONG`): with half of them, one of a thousand elements that do not jump seems to.
_REPLAYS, _FIRST, _STRONG_ONES, _HOPELESS = 12, 3, 12, 8.0

#: All replays together move no more numbers than this, or there are half of them, or none: what decides is
#: what a call computes, not how long it takes. (On one core it was 4 to 50 ns a number.)
_NUMBERS = 5_000_000_000

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
        How many there are, strong ones left out.
    problem:
        Why there are no replays.
    cut:
        Why there are fewer of them than there should be.
    at_bound:
        Whether a function is given numbers at the end of its domain.
    """

    def __init__(self, target: Target, arguments: Callable[[], Mapping[str, Any]]) -> None:
        self._target = target
        self._arguments = arguments
        self.plain: dict[str, torch.Tensor] = {}
        # By path; what one replay lacks is left out.
        self._moves: dict[str, Moves] = {}
        self.replays = 0
        self._has_strong = False
        self._limit, self.work = 0.0, 0
        self.at_bound = False
        self.problem = ""
        self.cut = ""
        self._half = False

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
                    self._start()
                while self.replays < (count // 2 if self._half and count > _FIRST else count):
                    self._add(self._call(self.replays + 1), 1.0)
                    self.replays += 1
                if count == _REPLAYS and not self._has_strong:
                    for seed in range(1, (_STRONG_ONES // 2 if self._half else _STRONG_ONES) + 1):
                        # Half of the same noise, the other way: no element is pushed to one side in all.
                        self._add(self._call(seed, STRONG if seed % 2 else -STRONG), STRONG)
                    self._has_strong = True
        except Exception as error:
            # A module that cannot be copied, a branch in which moved values end in an error.
            self.problem = f"{type(error).__name__}: {error}"
            return False
        return True

    @property
    def least(self) -> float:
        """A move that may be, though few replays show none: that of a root of nothing but rounding."""
        return math.sqrt(self._limit) if self.at_bound else 0.0

    def _start(self) -> None:
        """Call eager as it is, and see what a replay costs.

        Raises
        ------
        OverflowError
            It moves too many numbers.
        """
        self.plain = self._call()
        self._moves = {path: Moves(plain) for path, plain in self.plain.items()}
        count, half = _REPLAYS + _STRONG_ONES, (_REPLAYS + _STRONG_ONES) // 2
        if self.work * count > _NUMBERS:
            self._half = True
            said = f"{count} replays would move {self.work * count:.1e} numbers, at most {_NUMBERS:.0e} are"
            if self.work * half > _NUMBERS:
                raise OverflowError(said)
            self.cut = f"{half} replays: {said}"

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
        if seed is None:
            self._limit, self.work, self.at_bound = mode.limit, mode.work, mode.at_bound
        leaves = [*flatten_with_paths(outputs), *((in_place(p), v) for p, v in watch.written().items())]
        count = Counter(path for path, _ in leaves)
        return {
            path: leaf.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
            for path, leaf in leaves
            if count[path] == 1 and is_rounded(leaf)
        }

    def _add(self, moved: Mapping[str, torch.Tensor], strength: float) -> None:
        for path, moves in list(self._moves.items()):
            if path not in moved or not moves.add(moved[path], strength):
                del self._moves[path]

    def spread(self, path: str, expected: torch.Tensor) -> Spread | None:
        """How far the output at `path` moves; ``None`` where eager does not answer as before."""
        if path not in self._moves:
            return None
        found, plain = self._moves[path].spread(self._limit, self.at_bound), self.plain[path]
        # While it is exported, eager is a patched one, which may round otherwise.
        least = found.allowed if plain.shape == expected.shape else None
        return found if compare_leaf(path, expected, plain, Tolerances(), least=least).ok else None


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
    left, right = dict(expected), dict(got)
    # What no tolerance makes up for is no rounding, but for a value across the end of a domain.
    if (
        not failed
        or eager is None
        or not all(
            each.would_need is not None or _is_not_finite(each, left.get(each.path), right.get(each.path))
            for each in failed
        )
    ):
        return results
    for count in (_FIRST, _REPLAYS):
        if not eager.replay(count):
            note = f"how far rounding moves eager is not known: {eager.problem}"
            return [each if each.ok else _noted(each, note) for each in results]
        spreads = {result.path: eager.spread(result.path, left[result.path]) for result in failed}
        if all(_is_hopeless(result, spreads[result.path], eager) for result in failed):
            break
    judged = []
    for result in results:
        spread = None if result.ok else spreads[result.path]
        if spread is not None:
            mask = (where or {}).get(result.path)
            assert not isinstance(mask, Ties | Own)
            result = _judged(result, left[result.path], right[result.path], tolerances, mask, spread)
            if eager.cut and result.note:
                result = _noted(result, eager.cut)
        judged.append(result)
    return judged


def _is_not_finite(result: LeafComparison, expected: Any, got: Any) -> bool:
    """Whether an output fails by values alone, of which some are NaN or infinite."""
    if result.by or not is_rounded(expected) or not is_rounded(got):
        return False
    return (expected.shape, expected.dtype) == (got.shape, got.dtype)


def _is_hopeless(result: LeafComparison, spread: Spread | None, eager: MovedEager) -> bool:
    """Whether more replays cannot help."""
    if spread is None:
        return True
    if bool(spread.may_cross.any()) or (result.would_need is None and eager.at_bound):
        return False
    moves = max(float(spread.largest.max()), eager.least)
    return result.would_need is None or result.would_need > _HOPELESS * ALLOWED * moves


def _judged(
    result: LeafComparison,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: Spread,
) -> LeafComparison:
    """The comparison that failed, with what is known of eager's own rounding."""
    moves = float(spread.largest.max())
    result = replace(result, eager_moves=moves)
    said = f"eager itself moves by up to {moves:.1e} when its operators round otherwise"
    excused = None
    if result.would_need is None:
        excused = spread.excused(got, _plain_tolerance(result.path, expected, tolerances))
    again = compare_leaf(result.path, expected, got, tolerances, where, spread.allowed, excused)
    explained = again.ok and not _is_shifted(result.path, expected, got, tolerances, where, spread)
    crosses = ""
    if excused is not None and bool(excused.any()):
        crosses = (
            f"{result.reason}, where eager itself has both when its operators round otherwise"
            if explained
            else ""
        )
    if tolerances.is_given(result.path):
        note = f"{said}; the tolerance is the one of the spec" if again.ok else ""
        if explained and _is_below_moves(result, expected, got, tolerances, where, spread):
            result = replace(result, below_noise=tolerances.place_of(result.path) or "the spec")
    elif explained:
        note = "; ".join(filter(None, [f"the difference is rounding: {said}", crosses]))
        result = replace(result, ok=True, reason="", crosses=crosses)
    elif result.would_need is None:
        note = _unexplained(again, spread)
        result = replace(result, at=again.at, reason=again.reason) if again.reason else result
    elif ALLOWED * moves <= result.atol:
        note = ""
    else:
        note = f"{said}, which does not explain the difference"
    return _noted(result, note)


def _is_below_moves(
    result: LeafComparison,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: Spread,
) -> bool:
    """Whether eager itself leaves the tolerance wherever the program does; numbers are all that differs."""
    if result.reason or result.would_need is None:
        return False
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (value.detach().to("cpu", wide).resolve_conj().resolve_neg() for value in (got, expected))
    plain = _plain_tolerance(result.path, expected, tolerances)
    outside = ((a - b).abs() > plain) & a.isfinite() & b.isfinite()
    if where is not None:
        outside &= where
    return bool(outside.any()) and bool((spread.largest.double() > plain)[outside].all())


def _unexplained(again: LeafComparison, spread: Spread) -> str:
    """Where other values than finite ones can be rounding, what cannot."""
    if not bool(spread.may_cross.any()):
        return ""
    share = f"{int(spread.may_cross.sum())} of {spread.seen.numel()}"
    rest = f"not at {list(again.at)}" if again.reason else "other errors are too large for it"
    return (
        f"eager itself is finite or not in {share} elements when its operators round otherwise, "
        f"which does not explain the difference: {rest}"
    )


def _plain_tolerance(path: str, expected: torch.Tensor, tolerances: Tolerances) -> torch.Tensor:
    """What the tolerance alone allows, by element; infinite where `expected` is."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    size = expected.detach().to("cpu", wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    tolerance = tolerances.of(path, expected)
    return tolerances.by_element(path, expected.detach().to("cpu"), tolerance) + tolerance.rtol * size


def _noted(result: LeafComparison, note: str) -> LeafComparison:
    return replace(result, note="; ".join(filter(None, [result.note, note])))


def _is_shifted(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerances: Tolerances,
    where: torch.Tensor | None,
    spread: Spread,
) -> bool:
    """Whether the errors of the elements that rounding decides are too large as a whole, or in one part."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (value.detach().to("cpu", wide).resolve_conj().resolve_neg() for value in (got, expected))
    plain = _plain_tolerance(path, expected, tolerances)
    decided = (spread.allowed > plain) & a.isfinite() & b.isfinite()
    if where is not None:
        decided &= where
    crosses = decided & spread.may_cross
    if spread.low is not None and spread.high is not None and int(crosses.sum()) >= _MANY:
        apart = (spread.high - spread.low)[crosses].double()
        if float((a - b)[crosses].square().sum()) > float(apart.square().sum()):
            return True
    decided &= ~spread.may_cross
    if spread.parts is not None:
        # What makes one part uncertain says nothing of the other.
        errors = torch.view_as_real(a - b).abs()[decided]
        allowed = (ALLOWED * spread.parts[decided]).maximum(plain[decided][:, None])
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
        + (f"; {result.crosses}" if result.crosses else "")
        for result in results
        if result.ok and result.eager_moves is not None
    ]
    if found:
        record.setdefault("rounding", []).extend(found)
