"""The conditions on sizes by which a captured program is bound, and which of them some inputs break."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from ..dims import DimExpr
from ..observe import GraphShapes, TensorLeaf
from ..pytrees import flatten_with_paths
from .guards import Asked, Axis, CaptureWatch, _text

__all__ = ["BrokenGuard", "broken_guards"]


@dataclass(frozen=True)
class BrokenGuard:
    """A condition on sizes that a program demands and some inputs do not meet.

    Attributes
    ----------
    demands:
        In the symbols of the graph, or by axis: ``past < 8``, ``attention_mask.shape[1] >= 4``.
    sizes:
        What the inputs have: ``past=9``.
    because:
        For a bound that follows from another condition: that one. torch counts on dynamic sizes of 2 or more.
    place:
        The line of the model that asked; ``""`` where it was torch itself.
    modules:
        Those that ran then, the innermost first.
    """

    demands: str
    sizes: str
    because: str = ""
    place: str = ""
    modules: tuple[torch.nn.Module, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        follows = f", which follows from {self.because} with sizes of at least 2" if self.because else ""
        asked = f", asked at {self.place.partition(': ')[0]}" if self.place else ""
        return f"it demands {self.demands} (here {self.sizes}){follows}{asked}"


def broken_guards(
    watch: CaptureWatch, shapes: GraphShapes, arguments: Mapping[str, Any]
) -> list[BrokenGuard]:
    """Those that `arguments` break, by name as the model takes them; bounds of single sizes come last."""
    sizes: dict[Axis, int] = {}
    for name, value in arguments.items():
        for path, leaf in flatten_with_paths(value, name):
            if isinstance(leaf, torch.Tensor):
                sizes.update(((path, axis), size) for axis, size in enumerate(leaf.shape))
    found: dict[tuple[str, str], BrokenGuard] = {}
    for axes, ranges, asked, narrowed in watch.bounds():
        given = {symbol: sizes[axis] for symbol, axis in axes.items() if axis in sizes}
        names = _Names(axes, shapes, given)
        for each in asked:
            if _is_broken(each.condition, given):
                guard = names.guard(each.condition, None, each)
                found.setdefault((guard.demands, guard.place), guard)
        implied = set(found)
        for symbol, size in given.items():
            bounds = ranges.get(symbol)
            if bounds is None:
                continue
            for end, breaks, condition in (
                ("lower", size < bounds.lower, sympy.Ge(symbol, bounds.lower)),
                ("upper", size > bounds.upper, sympy.Le(symbol, bounds.upper)),
            ):
                # The smallest size that torch counts on is none that it demands.
                if not breaks or (end == "lower" and bounds.lower == 2):
                    continue
                cause = narrowed.get((symbol, end))
                if cause is not None and any(place == cause.place for _, place in implied):
                    continue
                guard = names.guard(condition, cause and cause.condition, cause or Asked(condition, ""))
                found.setdefault((guard.demands, guard.place), guard)
    return list(found.values())


def _is_broken(condition: sympy.Basic, given: Mapping[sympy.Symbol, int]) -> bool:
    if not condition.free_symbols <= given.keys():
        return False
    try:
        return bool(condition.xreplace({s: sympy.Integer(v) for s, v in given.items()}) == sympy.false)
    except (ArithmeticError, TypeError):
        # A function of torch that has no value there, such as a division by a size of 0.
        return False


class _Names:
    """Writes conditions on torch's symbols in ours."""

    def __init__(
        self,
        axes: Mapping[sympy.Symbol, Axis],
        shapes: GraphShapes,
        given: Mapping[sympy.Symbol, int],
    ) -> None:
        self._by_axis = {s: _symbol(f"{path}.shape[{axis}]") for s, (path, axis) in axes.items()}
        self._given = given
        self._ours = dict(self._by_axis)
        for symbol, (path, axis) in axes.items():
            leaf = shapes.leaves.get(path)
            dim = leaf.dims[axis] if isinstance(leaf, TensorLeaf) and axis < len(leaf.dims) else None
            if isinstance(dim, DimExpr) and len(dim.terms) == 1 and dim.terms[0][1] == 1 and not dim.offset:
                self._ours[symbol] = _symbol(dim.terms[0][0])

    def text(self, condition: sympy.Basic) -> tuple[str, Mapping[sympy.Symbol, sympy.Symbol]]:
        """(text, the names in it)."""
        names = self._ours
        if not condition.xreplace(names).free_symbols:
            names = self._by_axis  # Two axes that we call the same.
        return _text(_tidy(condition.xreplace(names))), names

    def guard(self, condition: sympy.Basic, because: sympy.Basic | None, asked: Asked) -> BrokenGuard:
        text, names = self.text(condition)
        sizes = dict.fromkeys(
            f"{names[symbol]}={self._given[symbol]}" for symbol in sorted(condition.free_symbols, key=str)
        )
        reason = "" if because is None else self.text(because)[0]
        return BrokenGuard(text, ", ".join(sizes), reason, asked.place, asked.modules)


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _tidy(condition: sympy.Basic) -> sympy.Basic:
    """Without common factors and negative terms: ``a + b >= 7``, not ``-2*a - 2*b <= -14``."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return condition
    terms = sympy.Add.make_args(sympy.expand(condition.lhs - condition.rhs))
    split = [term.as_coeff_Mul() for term in terms]
    if not all(isinstance(factor, sympy.Integer) for factor, _ in split):
        return condition
    shared = math.gcd(*(int(factor) for factor, _ in split)) or 1
    sides = {
        sign: sympy.Add(*(abs(f) // shared * rest for f, rest in split if f * sign > 0)) for sign in (1, -1)
    }
    left, right, kind = sides[1], sides[-1], condition.func
    if not left.free_symbols:
        left, right, kind = right, left, condition.reversed.func
    made: sympy.Basic = kind(left, right, evaluate=False)
    return made
