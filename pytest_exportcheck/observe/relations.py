"""Relations between sizes that rest on two calls: `5 = 2 + 3` and `7 = 3 + 4` may be chance, as may two axes
that are both 5, then both 7.

Such a relation names the axis in the golden, as any other does, and ties it while inputs are resized: what a
model does where it does not hold would never be seen. So it is known which ones they are, and how the shapes
look without one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from ..dims import DimExpr
from ..keypaths import root_of
from .records import RecordedCall
from .resize import ON_A_GRID, ExportExample, NotResizable, resize_arguments
from .shapes import GraphShapes, TensorLeaf, ThinRelation, ThinTie
from .symbols import Axis, name_for, same_by_convention

__all__ = [
    "broken_example",
    "broken_sizes",
    "equalities_of_chance",
    "refused_by_eager",
    "relation_note",
    "thin_relations",
    "thin_ties",
    "without",
]

#: So many different calls are no chance.
_ENOUGH = 3

#: A symbol is looked at axis by axis up to so many parts, beyond them argument by argument.
_MOST_PARTS = 8

#: So often eager is asked whether the parts of a symbol can be set apart.
_MOST_SPLITS = 12


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


def thin_ties(
    axes: Sequence[Axis],
    names: Mapping[tuple[str, int], DimExpr],
    declared: Mapping[tuple[str, int], DimExpr],
) -> list[ThinTie]:
    """The symbols whose axes are equal in fewer than three different sizes, and for no other reason.

    Reasons are a symbol of the spec's, axes that the spec calls a batch, and what `same_by_convention` knows.
    """
    groups: dict[DimExpr, list[Axis]] = {}
    for axis in axes:
        dim = names[axis.key]
        if len(dim.terms) == 1 and not dim.offset:
            groups.setdefault(dim, []).append(axis)
    taken = {name for dim in names.values() for name in dim.names}
    found = []
    for dim, mine in groups.items():
        parts: list[list[Axis]] = []
        for axis in mine:
            together = [part for part in parts if any(_is_settled(axis, other, declared) for other in part)]
            parts = [part for part in parts if part not in together]
            parts.append(sorted([*itertools.chain(*together), axis], key=mine.index))
        if len(parts) > _MOST_PARTS:
            merged: dict[tuple[str, int], list[Axis]] = {}
            for part in parts:
                merged.setdefault((root_of(part[0].path), part[0].axis), []).extend(part)
            parts = list(merged.values())
        if len(parts) < 2:
            continue
        # The part that has the name for itself keeps it.
        parts.sort(
            key=lambda part: (name_for(part, taken - {dim.names[0]}) != dim.names[0], mine.index(part[0]))
        )
        known = [
            {i: size for each in part for i, size in each.sizes.items() if size is not None} for part in parts
        ]
        called = [dim.names[0]]
        for part in parts[1:]:
            called.append(name_for(part, taken))
            taken.add(called[-1])
        keys = tuple(tuple(axis.key for axis in part) for part in parts)
        found.append(ThinTie(dim.names[0], keys, tuple(called), tuple(known)))
    return found


def _is_settled(one: Axis, other: Axis, declared: Mapping[tuple[str, int], DimExpr]) -> bool:
    if one.is_batch and other.is_batch:
        return True
    if one.key in declared and declared[one.key] == declared.get(other.key):
        return True
    if same_by_convention(one, other):
        return True
    sizes = {size for index, size in one.sizes.items() if size is not None and other.sizes.get(index) == size}
    return len(sizes) >= _ENOUGH


def equalities_of_chance(
    shapes: GraphShapes,
    example: ExportExample,
    calls: Sequence[RecordedCall],
    accepts: Callable[[dict[str, Any]], bool],
) -> list[ThinRelation]:
    """The thin equalities that eager does not want: it takes other sizes of these axes than of the others."""

    def apart(relation: ThinRelation) -> bool:
        return not refused_by_eager(relation, shapes, example, calls, accepts, unknown=True)

    return [
        relation for tie in shapes.ties for relation in _set_apart(tie, shapes.limits.get(tie.symbol), apart)
    ]


def _set_apart(
    tie: ThinTie, limit: int | None, apart: Callable[[ThinRelation], bool]
) -> Iterator[ThinRelation]:
    asked = {
        parts: apart(_equality(tie, parts, limit)) for parts in itertools.islice(_splits(tie), _MOST_SPLITS)
    }
    # Eager takes each of these apart: what no split cuts stays together.
    blocks: dict[tuple[bool, ...], list[int]] = {}
    for index in range(len(tie.parts)):
        cut = tuple(index in parts for parts, taken in asked.items() if taken)
        blocks.setdefault(cut, []).append(index)
    for block in map(frozenset, blocks.values()):
        relation = _equality(tie, block, limit)
        if 0 not in block and (asked[block] if block in asked else apart(relation)):
            yield relation


def _splits(tie: ThinTie) -> Iterator[frozenset[int]]:
    """Parts that may belong together, likely ones first; of two sides that without the symbol's own."""
    every = frozenset(range(len(tie.parts)))
    keys = [tie.parts[index][0] for index in range(len(tie.parts))]
    groups: list[frozenset[int]] = [frozenset({index}) for index in every]
    for kind in (
        lambda path, axis: root_of(path),
        lambda path, axis: root_of(path).partition("_")[0],
        lambda path, axis: root_of(path).rpartition("_")[2],
        lambda path, axis: axis,
    ):
        kinds = [kind(*key) for key in keys]
        groups += [frozenset(i for i in every if kinds[i] == each) for each in dict.fromkeys(kinds)]
    if len(every) <= 4:
        groups += [frozenset(pair) for pair in itertools.combinations(every, 2)]
    normal = [every - group if 0 in group else group for group in groups]
    yield from dict.fromkeys(group for group in normal if group)


def _equality(tie: ThinTie, parts: frozenset[int], limit: int | None) -> ThinRelation:
    mine = sorted(parts)
    others = [index for index in range(len(tie.parts)) if index not in parts]
    sizes = {i: size for index in mine for i, size in tie.sizes[index].items()}
    like = {i: size for index in others for i, size in tie.sizes[index].items()}
    seen = sorted({size for i, size in sizes.items() if like.get(i) == size})
    return ThinRelation(
        DimExpr.symbol(tie.symbol),
        tie.names[mine[0]],
        tuple(key for index in mine for key in tie.parts[index]),
        tuple((size, size) for size in seen),
        sizes,
        tuple(key for index in others for key in tie.parts[index]),
        limit,
    )


def _symbol(axis: Axis, taken: set[str]) -> str:
    stem = re.sub(r"\W", "_", axis.path) + f"_dim_{axis.axis}"
    return next(name for k in itertools.count(1) if (name := stem if k == 1 else f"{stem}_{k}") not in taken)


def relation_note(relation: ThinRelation) -> str:
    """What a person should know of it."""
    path, axis = relation.axes[0]
    more = f" (and {len(relation.axes) - 1} more)" if len(relation.axes) > 1 else ""
    if relation.like:
        other, at = relation.like[0]
        sizes = ", ".join(str(size) for size, _ in relation.seen) or "never both there"
        return (
            f"axis {axis} of {path}{more} is taken for {relation.dim}, as axis {at} of {other} is, because "
            f"they are equal in the calls ({sizes}), and eager takes them apart: a call in which they differ "
            "would settle it, or a third size that they share, or dims in the spec's calls"
        )
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
    sizes = [held + 1, held - 1, 2 * held + 1]
    if relation.like:
        # Sizes of other calls are valid, and so may be multiples of a patch or a stride.
        observed = [size for size in dict.fromkeys(relation.sizes.values()) if size >= 2]
        step = gcd(*observed, held)
        grid = [*(size for size in observed if size != held), held + step]
        on_a_grid = {*relation.dim.names, relation.symbol} & {*ON_A_GRID}
        sizes = grid if on_a_grid else [*grid, *sizes[:2]]
    return [
        {**example.sizes, relation.symbol: size}
        for size in dict.fromkeys(sizes)
        if size >= 2 and (relation.limit is None or size <= relation.limit)
    ]


def refused_by_eager(
    relation: ThinRelation,
    shapes: GraphShapes,
    example: ExportExample,
    calls: Sequence[RecordedCall],
    accepts: Callable[[dict[str, Any]], bool],
    unknown: bool = False,
) -> bool:
    """Whether eager wants the relation: then it is no chance.

    Parameters
    ----------
    unknown:
        The answer where no inputs without it can be made.
    """
    free = without(shapes, relation)
    for sizes in broken_sizes(relation, example):
        try:
            arguments = resize_arguments(example.arguments, free, sizes, calls)
        except NotResizable:
            return unknown
        if accepts(arguments):
            return False
    return True
