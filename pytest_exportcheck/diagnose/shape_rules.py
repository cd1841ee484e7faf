"""Sizes of outputs from sizes of inputs, by what several calls showed; no module is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SizeRule", "find_rule"]

#: One shape per tensor, ``None`` for what has none.
Shapes = Sequence[Sequence[int] | None]


@dataclass(frozen=True)
class SizeRule:
    """How one size of an output follows from the sizes of the inputs.

    Attributes
    ----------
    text:
        ``16``, ``input 0 axis 1``, ``input 0 axis 1 + input 2 axis 2``.
    evaluate:
        Given the shapes of the inputs, the size; it works with symbolic sizes.
    """

    text: str
    evaluate: Callable[[Shapes], Any]


def _axes(calls: Sequence[Shapes]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(input, axis, its sizes in the calls) of every axis that all calls have."""
    for index, shape in enumerate(calls[0]):
        for axis in range(len(shape or ())):
            sizes = []
            for call in calls:
                other = call[index] if index < len(call) else None
                if other is None or axis >= len(other):
                    break
                sizes.append(other[axis])
            else:
                yield index, axis, tuple(sizes)


def find_rule(inputs: Sequence[Shapes], sizes: Sequence[int]) -> SizeRule | None:
    """The simplest rule that gives `sizes`, one per call; ``None`` if there is none.

    A size that is the same in all calls is a constant. Otherwise: a size of an input, one plus or times a
    constant, the sum, difference or product of two; a factor and a constant, where three sizes or more agree.
    """
    if len(set(sizes)) == 1:
        return SizeRule(str(sizes[0]), lambda shapes, size=sizes[0]: size)  # type: ignore[misc]
    axes = [axis for axis in _axes(inputs) if len(set(axis[2])) > 1]
    for index, axis, seen in axes:
        name = f"input {index} axis {axis}"

        def size_of(shapes: Shapes, index: int = index, axis: int = axis) -> Any:
            shape = shapes[index]
            assert shape is not None
            return shape[axis]

        if seen == tuple(sizes):
            return SizeRule(name, size_of)
    for index, axis, seen in axes:
        name = f"input {index} axis {axis}"
        offsets = {size - other for size, other in zip(sizes, seen, strict=True)}
        if len(offsets) == 1:
            offset = offsets.pop()
            return SizeRule(
                f"{name} + {offset}",
                lambda shapes, i=index, a=axis, offset=offset: shapes[i][a] + offset,  # type: ignore[misc]
            )
        factors = {
            (size // other, size % other) if other else (0, 1)
            for size, other in zip(sizes, seen, strict=True)
        }
        if len(factors) == 1 and next(iter(factors))[1] == 0:
            factor = factors.pop()[0]
            return SizeRule(
                f"{name} * {factor}",
                lambda shapes, i=index, a=axis, factor=factor: shapes[i][a] * factor,  # type: ignore[misc]
            )
    return _of_two(axes, sizes) or _linear(axes, sizes)


def _linear(axes: Sequence[tuple[int, int, tuple[int, ...]]], sizes: Sequence[int]) -> SizeRule | None:
    """``2 * size + 1``, where three sizes or more agree: any two do."""
    for index, axis, seen in axes:
        if len(set(seen)) < 3:
            continue
        low, high = min(seen), max(seen)
        at = dict(zip(seen, sizes, strict=True))
        factor, rest = divmod(at[high] - at[low], high - low)
        offset = at[low] - factor * low
        if not rest and all(factor * x + offset == y for x, y in zip(seen, sizes, strict=True)):
            return SizeRule(
                f"input {index} axis {axis} * {factor} + {offset}",
                lambda shapes, i=index, a=axis, f=factor, o=offset: shapes[i][a] * f + o,  # type: ignore[misc]
            )
    return None


def _of_two(axes: Sequence[tuple[int, int, tuple[int, ...]]], sizes: Sequence[int]) -> SizeRule | None:
    operators: dict[str, Callable[[Any, Any], Any]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
    }
    for sign, apply in operators.items():
        for i, a, first in axes:
            for j, b, second in axes:
                if [apply(x, y) for x, y in zip(first, second, strict=True)] == list(sizes):

                    def evaluate(
                        shapes: Any, i: int = i, a: int = a, j: int = j, b: int = b, f: Any = apply
                    ) -> Any:
                        return f(shapes[i][a], shapes[j][b])

                    return SizeRule(f"input {i} axis {a} {sign} input {j} axis {b}", evaluate)
    return None
