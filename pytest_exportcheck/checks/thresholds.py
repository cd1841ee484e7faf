"""Sizes on both sides of what a capture decided by its example: a frozen branch shows there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..exporters.guards import Comparison
from ..observe import ExportExample, GraphShapes
from ..observe.resize import is_possible, smallest_sizes

__all__ = ["MAX_SIZES", "Thresholds", "decided_lines", "decided_otherwise", "find_thresholds", "sizes_text"]

#: So many sizes are tried beside the others, those nearest to the example first.
MAX_SIZES = 24

#: A longer axis is not tried: attention alone is quadratic.
_LONGEST = 4200

#: Multiples of the example's size that are tried where no boundary is known.
_FAR = (4, 8, 16)

#: Inputs of more elements are not tried.
_MOST_ELEMENTS = 2**24

#: Each size that is tried, and then a few by which a threshold beyond them is noticed.
_SCANNED = np.concatenate([np.arange(_LONGEST + 1), 2 ** np.arange(13, 21)])


@dataclass(frozen=True)
class Thresholds:
    """What to try because of comparisons.

    Attributes
    ----------
    sizes:
        Sizes of all symbols, nearest to the example first.
    not_tried:
        One line for each that was found and left out, with the reason.
    """

    sizes: list[dict[str, int]] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    comparison: Comparison
    sizes: dict[str, int]
    name: str
    distance: int
    across: bool


def _truths(comparison: Comparison, base: Mapping[str, int], name: str) -> np.ndarray[Any, Any] | None:
    """Truth for each of `_SCANNED` as the size of `name`; ``None`` if it has none."""
    try:
        found = np.asarray(comparison.holds({**base, name: _SCANNED}))
    except Exception:
        # ``and``: numbers only.
        found = np.asarray([_truth(comparison, {**base, name: int(size)}) for size in _SCANNED])
    return found.astype(bool) if found.shape == _SCANNED.shape else None


def _truth(comparison: Comparison, sizes: Mapping[str, int]) -> bool | None:
    try:
        holds = comparison.holds(sizes)
    except Exception:
        # A division by a size of 0: no branch was taken there, and the model says what it says. Or a function
        # that is not known here.
        return None
    return None if holds is None else bool(holds)


def _flips(truths: np.ndarray[Any, Any], start: int) -> list[int]:
    """Positions whose truth is not that of `start`: the nearest one below, the nearest one above."""
    other = np.flatnonzero(truths != truths[start])
    return [*map(int, other[other < start][-1:]), *map(int, other[other > start][:1])]


def _candidates(
    comparison: Comparison, bases: Sequence[Mapping[str, int]], start: Mapping[str, int]
) -> list[_Candidate]:
    """Sizes at the nearest boundaries of each symbol, the others as in the first base that has any."""
    found: list[_Candidate] = []
    for base in bases:
        for name in comparison.names:
            size = base[name]
            with np.errstate(all="ignore"):
                truths = _truths(comparison, base, name) if size <= _LONGEST else None
            for flip in () if truths is None else _flips(truths, size):
                step = 1 if flip > size else -1
                for position in (flip, flip - step, flip + step):
                    if not 0 <= position < len(_SCANNED):
                        continue
                    sizes = {**base, name: int(_SCANNED[position])}
                    distance = sum(abs(sizes[each] - start[each]) for each in sizes)
                    found.append(_Candidate(comparison, sizes, name, distance, position == flip))
        if found:
            break
    return found


def _far(comparison: Comparison, start: Mapping[str, int]) -> list[_Candidate]:
    """Where a value of a size was taken for a constant: what it decides may have its boundary anywhere."""
    found = []
    for name in comparison.names if comparison.value else ():
        for factor in _FAR:
            sizes = {**start, name: factor * start[name] + 1}
            found.append(_Candidate(comparison, sizes, name, (factor - 1) * start[name] + 1, across=False))
    return found


def find_thresholds(
    comparisons: Sequence[Comparison],
    shapes: GraphShapes,
    example: ExportExample,
    known: Sequence[Mapping[str, int]],
    is_allowed: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
) -> Thresholds:
    """Sizes just before, at, and just after each boundary of each comparison.

    Parameters
    ----------
    known:
        Sizes of observed calls, and those that are tried anyway.
    is_allowed:
        Whether the spec leaves sizes to be tried.
    """
    smallest = {name: size for name, size in smallest_sizes(shapes).items() if name in example.sizes}
    largest = {name: 2 * max(sizes[name] for sizes in (*known, example.sizes)) + 1 for name in example.sizes}
    candidates: list[_Candidate] = []
    not_tried: list[str] = []
    for comparison in comparisons:
        if _truth(comparison, example.sizes) is None:
            not_tried.append(f"cannot be evaluated: {comparison}")
            continue
        # A relation may have no boundary next to the example: `past + seq > 3` has none with a past of 5.
        bases = [
            example.sizes,
            *({**example.sizes, **{n: edge[n] for n in comparison.names}} for edge in (smallest, largest)),
        ]
        candidates += _candidates(comparison, bases[: 1 if len(comparison.names) == 1 else 3], example.sizes)
        candidates += _far(comparison, example.sizes)
    candidates.sort(key=lambda each: (not each.across, each.distance))
    done = {_key(sizes) for sizes in (*known, example.sizes)}
    chosen: list[dict[str, int]] = []
    for each in candidates:
        if _key(each.sizes) in done or not (_is_valid(each, shapes, smallest) and is_allowed(each.sizes)):
            continue
        done.add(_key(each.sizes))
        reason = _too_large(each, shapes) or (f"more than {MAX_SIZES}" if len(chosen) == MAX_SIZES else "")
        if not reason:
            chosen.append(each.sizes)
        elif each.across:
            text = ", ".join(f"{name}={each.sizes[name]}" for name in each.comparison.names)
            not_tried.append(f"{text}: {reason}; {each.comparison}")
    return Thresholds(chosen, not_tried)


def _key(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def _is_valid(candidate: _Candidate, shapes: GraphShapes, smallest: Mapping[str, int]) -> bool:
    sizes = candidate.sizes
    return (
        all(size >= smallest[name] for name, size in sizes.items())
        and all(sizes[name] <= limit for name, limit in shapes.limits.items() if name in sizes)
        and is_possible(shapes, sizes)
    )


def _too_large(candidate: _Candidate, shapes: GraphShapes) -> str:
    if candidate.sizes[candidate.name] > _LONGEST:
        return "longer than what is tried"
    elements = sum(math.prod(shapes.dims(leaf.path, candidate.sizes)) for leaf in shapes.tensors())
    return "inputs too large" if elements > _MOST_ELEMENTS else ""


def decided_lines(
    comparisons: Sequence[Comparison],
    example: Mapping[str, int],
    sizes: Mapping[str, int],
    refused: Sequence[str] = (),
) -> list[str]:
    """For the details of a failure at `sizes`: what was decided by those of the example, and where.

    Parameters
    ----------
    refused:
        What is said of the failure: where a guard is broken, and no line is known, who finds it.
    """
    if sizes.keys() != example.keys():
        return []
    decided = decided_otherwise(comparisons, example, sizes)
    if not decided and any("Guard failed: " in line for line in refused):
        return ["--diagnose names the line that asked for this guard"]
    return [
        f"decided at {sizes_text(example)}, and otherwise here: {comparison}" for comparison in decided[:5]
    ]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """``batch=2, seq=7``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def decided_otherwise(
    comparisons: Sequence[Comparison], example: Mapping[str, int], sizes: Mapping[str, int]
) -> list[Comparison]:
    """Comparisons of the model's code whose truth at `sizes` is not the one that was captured.

    Those that only tell 0 and 1 from other sizes are left out: torch makes dozens of them.
    """
    larger = {name: max(size, 2) for name, size in sizes.items()}
    return [
        comparison
        for comparison in comparisons
        if comparison.place
        and _truth(comparison, example) not in (_truth(comparison, sizes), _truth(comparison, larger))
    ]
