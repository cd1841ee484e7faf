"""Reads and writes by the counter of a loop, as slices that a scan hands out or as indices by a tensor."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .iteration import Counter
from .names import loads
from .tests_in import expression, name

__all__ = ["HoistReads", "Hoisted"]


@dataclass(frozen=True)
class Hoisted:
    """``x[:, i]``: the slices of the variable `base` along `axis`, one a round, in the variable `item`."""

    base: str
    axis: int
    counter: Counter
    item: str


class HoistReads(ast.NodeTransformer):
    """Replaces reads of variables that no round changes, by counters from 0: ``x[:, i, 1:]``, ``x[i:i + 1]``.

    Parameters
    ----------
    fixed:
        The variables that hold tensors which no round changes, with their numbers of dimensions.
    """

    def __init__(
        self, counters: list[Counter], fixed: Mapping[str, int], fresh: Callable[[str], str]
    ) -> None:
        self.counters = {one.name: one for one in counters if one.from_zero}
        self.fixed = fixed
        self.fresh = fresh
        self.found: dict[tuple[str, int, str], Hoisted] = {}

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        made = self._read(node) if isinstance(node.ctx, ast.Load) else None
        return made if made is not None else self.generic_visit(node)

    def _read(self, node: ast.Subscript) -> ast.expr | None:
        if not isinstance(node.value, ast.Name) or node.value.id not in self.fixed:
            return None
        items = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        places = [k for k, item in enumerate(items) if loads(item) & set(self.counters)]
        if len(places) != 1:
            return None
        place = places[0]
        counter, keeps = self._counter(items[place])
        axis = _axis(items, place, self.fixed[node.value.id])
        if counter is None or axis is None:
            return None
        key = (node.value.id, axis, counter.name)
        if key not in self.found:
            item = self.fresh(f"{node.value.id}_{counter.name}")
            self.found[key] = Hoisted(node.value.id, axis, counter, item)
        item_name: ast.expr = name(self.found[key].item)
        if keeps:
            item_name = expression(f"a.unsqueeze({axis})", a=item_name)
            items[place] = ast.Slice()
        else:
            del items[place]
        if all(_is_whole(item) for item in items):
            return item_name
        rest = [self.visit(copy.deepcopy(item)) for item in items]
        index = rest[0] if len(rest) == 1 else ast.Tuple(elts=rest, ctx=ast.Load())
        return ast.Subscript(value=item_name, slice=index, ctx=ast.Load())

    def _counter(self, item: ast.expr) -> tuple[Counter | None, bool]:
        """The counter that ``i`` or ``i:i + 1`` is, and whether the axis stays."""
        if isinstance(item, ast.Name):
            return self.counters.get(item.id), False
        if isinstance(item, ast.Slice) and isinstance(item.lower, ast.Name) and item.step is None:
            low = item.lower.id
            if item.upper is not None and ast.unparse(item.upper) in (f"{low} + 1", f"1 + {low}"):
                return self.counters.get(low), True
        return None, False


def _axis(items: list[ast.expr], place: int, dimensions: int) -> int | None:
    """The axis that the index at `place` takes; `None` where another index may take several."""
    if any(not isinstance(item, (ast.Slice, ast.Constant, ast.UnaryOp)) for item in items[:place]):
        return None  # a mask takes several axes
    taken = [item for item in items if not (isinstance(item, ast.Constant) and item.value is None)]
    dots = [k for k, item in enumerate(items) if isinstance(item, ast.Constant) and item.value is Ellipsis]
    if dots and dots[0] < place:
        after = [item for item in items[place + 1 :] if item in taken]
        plain = all(isinstance(item, (ast.Slice, ast.Constant, ast.UnaryOp)) for item in after)
        return dimensions - 1 - len(after) if plain else None
    return sum(item in taken for item in items[:place])


def _is_whole(item: ast.expr) -> bool:
    return (isinstance(item, ast.Slice) and not (item.lower or item.upper or item.step)) or (
        isinstance(item, ast.Constant) and item.value is Ellipsis
    )
