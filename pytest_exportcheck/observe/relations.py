"""Relations between sizes that rest on two calls: `5 = 2 + 3` and `7 = 3 + 4` may be chance.

Such a relation names the axis in the golden, as any other does, and ties it while inputs are resized: what a
model does where it does not hold would never be seen. So it is known which ones they are, and how the shapes
look without one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..dims import DimExpr
from .records import RecordedCall
from .resize import ExportExample, NotResizable, resize_arguments
from .shapes import GraphShapes, TensorLeaf, ThinRelation
from .symbols import Axis

__all__ = ["broken_example", "broken_sizes", "refused_by_eager", "relation_note", "thin_relations", "without"]

#: So many different calls are no chance.
_ENOUGH = 3


def thin_relations(
    axes: Sequence[Axis],
    names: Mapping[tuple[str, int], DimExpr],
    declared: Mapping[tuple[str, int], DimExpr],
    sizes: Mapping[int, Mapping[str, int]],
) -> list[ThinRelation]:
    """The sums that hold in fewer than three different calls.

    Left out are those that the spec declares, and those with a past: that what is attended to is the past and
    what is new is how every cache works.
    """
    groups: dict[DimExpr, list[Axis]] = {}
    for axis in axes:
        dim = names[axis.key]
        if len(dim.terms) > 1 and "past" not in dim.names:
            groups.setdefault(dim, []).append(axis)
    taken = {name for dim in names.values() for name in dim.names}
    found = []
    for dim, mine in groups.items():
        if any(axis.key in declared for axis in mine):
            continue
        seen: dict[tuple[int, ...], None] = {}
        free: dict[int, int] = {}
        for axis in mine:
            for index, size in axis.sizes.items():
                if size is not None:
                    free[index] = size
                    seen[(size, *(sizes[index][name] for name in dim.names))] = None
        if len(seen) < _ENOUGH:
            symbol = _symbol(mine[0], taken)
            taken.add(symbol)
            found.append(ThinRelation(dim, symbol, tuple(axis.key for axis in mine), tuple(seen), free))
    return found


def _symbol(axis: Axis, taken: set[str]) -> str:
    stem = re.sub(r"\W", "_", axis.path) + f"_dim_{axis.axis}"
    return next(name for k in itertools.count(1) if (name := stem if k == 1 else f"{stem}_{k}") not in taken)


def relation_note(relation: ThinRelation) -> str:
    """What a person should know of it."""
    path, axis = relation.axes[0]
    more = f" (and {len(relation.axes) - 1} more)" if len(relation.axes) > 1 else ""
    sums = ", ".join(f"{size} = {' + '.join(map(str, terms))}" for size, *terms in relation.seen)
    return (
        f"axis {axis} of {path}{more} is taken for {relation.dim}, which rests on two calls ({sums}): a "
        f"third call with other sizes would settle it, or dims that say `{relation.dim}` in the spec's calls"
    )


def without(shapes: GraphShapes, relation: ThinRelation) -> GraphShapes:
    """The shapes with a symbol of its own for the axes of `relation`."""
    leaves = dict(shapes.leaves)
    for path, axis in relation.axes:
        leaf = leaves.get(path)
        if isinstance(leaf, TensorLeaf):
            dims = list(leaf.dims)
            dims[axis] = DimExpr.symbol(relation.symbol)
            leaves[path] = replace(leaf, dims=tuple(dims))
    sizes = {
        index: {**known, **({relation.symbol: relation.sizes[index]} if index in relation.sizes else {})}
        for index, known in shapes.sizes.items()
    }
    return replace(shapes, leaves=leaves, sizes=sizes, thin=[])


def broken_example(relation: ThinRelation, example: ExportExample) -> ExportExample:
    """`example` with the size of the freed symbol."""
    return replace(example, sizes={**example.sizes, relation.symbol: relation.dim.evaluate(example.sizes)})


def broken_sizes(relation: ThinRelation, example: ExportExample) -> list[dict[str, int]]:
    """Sizes on both sides of the relation. Not 1: that is broadcast, and says nothing about a relation."""
    held = relation.dim.evaluate(example.sizes)
    return [
        {**example.sizes, relation.symbol: size} for size in (held + 1, held - 1, 2 * held + 1) if size >= 2
    ]


def refused_by_eager(
    relation: ThinRelation,
    shapes: GraphShapes,
    example: ExportExample,
    calls: Sequence[RecordedCall],
    accepts: Callable[[dict[str, Any]], bool],
) -> bool:
    """Whether eager wants the relation: then it is no chance."""
    free = without(shapes, relation)
    for sizes in broken_sizes(relation, example):
        try:
            arguments = resize_arguments(example.arguments, free, sizes, calls)
        except NotResizable:
            return False  # nothing is known
        if accepts(arguments):
            return False
    return True
