"""Names for dynamic axes.

Equal sizes over a few calls do not prove that two axes are one dimension: a name is a statement for people
and for resizing, exporters get one independent dimension per axis. Axes with the same sizes in every call
share a symbol; one whose sizes are always the sum of two named ones gets the sum (``past + seq``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dims import DimExpr

__all__ = ["Axis", "name_axes", "name_for", "same_by_convention"]


@dataclass(frozen=True, eq=False)
class Axis:
    """A dynamic axis: where it is, and its size by call index (``None`` where the tensor is absent)."""

    path: str
    axis: int
    rank: int
    sizes: Mapping[int, int | None]
    is_batch: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.path, self.axis)


@dataclass
class _Group:
    axes: list[Axis]
    sizes: dict[int, int]

    @property
    def is_batch(self) -> bool:
        return any(_role(axis) == "batch" for axis in self.axes)

    def accepts(self, axis: Axis) -> bool:
        shared = [i for i, size in axis.sizes.items() if size is not None and i in self.sizes]
        if not shared or any(self.sizes[i] != axis.sizes[i] for i in shared):
            return False
        # A symbol is a batch or a length, never both, however the sizes fall.
        kinds = {_kind(each) for each in (axis, *self.axes)}
        return not {"batch", "length"} <= kinds

    def add(self, axis: Axis) -> None:
        self.axes.append(axis)
        self.sizes.update({i: size for i, size in axis.sizes.items() if size is not None})


def _role(axis: Axis) -> str:
    """What an axis usually is, by the conventions of transformers' argument names; ``""`` if unknown."""
    root, _, rest = axis.path.partition(".")
    if ".layers." in "." + axis.path or rest.startswith("layers."):
        if axis.axis == 0:
            return "batch"
        if axis.axis == 2 and axis.rank == 4:
            return "source" if "cross_attention_cache" in axis.path else "past"
        return ""
    if root in _CACHES and axis.axis and axis.rank >= 3 and _PLAIN_CACHE.fullmatch(rest):
        # Tuples of keys and values: heads and widths do not vary, in whichever order the axes are.
        return "past"
    if axis.is_batch:
        return "batch"
    if axis.axis == 0 and (
        root in _BATCH_FIRST or root.endswith(("_ids", "_mask", "_embeds", "_values", "_features")) or rest
    ):
        return "batch"
    if root in ("input_ids", "inputs_embeds", "token_type_ids", "decoder_input_ids", "decoder_inputs_embeds"):
        return "seq" if axis.axis == 1 else ""
    if root == "position_ids":
        return "seq" if axis.axis == axis.rank - 1 else ""
    if root == "attention_mask":
        return "length" if axis.axis == axis.rank - 1 else ""
    if root == "encoder_outputs":
        return "source" if axis.axis == 1 else ""
    if root == "pixel_values":
        return {axis.rank - 2: "height", axis.rank - 1: "width"}.get(axis.axis, "")
    if root in ("input_features", "input_values"):
        return "frames" if axis.axis == axis.rank - 1 else ""
    return ""


def _kind(axis: Axis) -> str:
    """``batch``, ``length``, or ``""`` where it may be either: the first axis of an argument of any name."""
    role = _role(axis)
    if role == "batch" or (not role and axis.axis == 0):
        return role
    return "length"


#: For each token a number, and the tokens.
_KINDS_OF_TOKENS = frozenset({"token_type_ids", "mm_token_type_ids"})
_TOKENS = frozenset({"input_ids"})

_BATCH_FIRST = frozenset({"encoder_outputs", "labels", "hidden_states"})

#: Arguments with a cache, and where keys and values are in one made of lists and tuples. (Behind them in a
#: layer is what was computed from an encoder.)
_CACHES = frozenset({"past_key_values", "past_key_value", "past", "layer_past", "cache", "kv_cache"})
_PLAIN_CACHE = re.compile(r"\d+|\d+\.[01]")

_LENGTHS = ("batch", "seq", "past", "source", "height", "width", "frames")

#: Which role names a group when it holds several.
_PREFERENCE = ("batch", "seq", "past", "source", "height", "width", "frames", "length")


def _name(group: _Group, taken: set[str]) -> str:
    roles = {_role(axis) for axis in group.axes}
    # The decoder's tokens are `seq` even where the encoder's are inputs of the same graph.
    if "seq" in roles and "seq" in taken and any(a.path.startswith("decoder_") for a in group.axes):
        roles = (roles - {"seq"}) | {"target"}
    wanted = next((role for role in (*_PREFERENCE, "target") if role in roles), "")
    if wanted and wanted not in taken:
        return wanted
    first = group.axes[0]
    stem = re.sub(r"\W", "_", first.path)
    candidate = f"{stem}_{wanted}" if wanted else f"{stem}_dim_{first.axis}"
    for suffix in itertools.chain([""], (f"_{k}" for k in itertools.count(2))):
        if candidate + suffix not in taken:
            return candidate + suffix
    raise AssertionError("unreachable")


def name_for(axes: Sequence[Axis], taken: set[str]) -> str:
    """What `axes` are called on their own, where the names `taken` are."""
    return _name(_Group(list(axes), {}), taken)


def same_by_convention(one: Axis, other: Axis) -> bool:
    """Whether two axes of one symbol are one dimension by what they are, whatever eager takes.

    Layers of one cache; `encoder_outputs` and what a cache keeps of them, beside which they are not read; a
    mask and what it masks: attention reads the part of a larger mask that it needs; tokens and their kinds
    (of segment, of text or image), which a model may not read.
    """
    roots = [axis.path.partition(".")[0] for axis in (one, other)]
    if roots[0] == roots[1] and all(".layers." in axis.path for axis in (one, other)):
        return one.axis == other.axis
    if {_role(one), _role(other)} == {"source"}:
        return True
    if {*roots} & _KINDS_OF_TOKENS and {*roots} & _TOKENS and _of_rows(one, other):
        return True
    for mask, masked in ((one, other), (other, one)):
        prefix = mask.path.removesuffix("attention_mask")
        if prefix == mask.path or prefix not in ("", "decoder_"):
            continue
        if masked.path.startswith("decoder_") != bool(prefix):
            continue
        if mask.axis == masked.axis == 0 and masked.path.removeprefix(prefix).startswith("input"):
            return True
        if mask.axis == mask.rank - 1 and _role(masked) in ("seq", "frames"):
            return True
    return False


def _of_rows(one: Axis, other: Axis) -> bool:
    """Whether both are the same axis of two dimensions."""
    return (one.axis, one.rank) == (other.axis, other.rank) and one.rank == 2


def _relation(group: _Group, named: Mapping[str, _Group]) -> DimExpr | None:
    """``a + b``, ``a + 1`` or ``a - 1`` if it holds in every call.

    Two different sizes are little proof of the last two. A batch is no length: it is part of no relation.
    """
    distinct = len(set(group.sizes.values()))
    if distinct < 2 or group.is_batch:
        return None
    named = {name: other for name, other in named.items() if not other.is_batch}
    for (a, first), (b, second) in itertools.combinations(named.items(), 2):
        if all(i in first.sizes and i in second.sizes for i in group.sizes) and all(
            first.sizes[i] + second.sizes[i] == size for i, size in group.sizes.items()
        ):
            # What is already there comes first: past + seq.
            first_name, second_name = (b, a) if b == "past" else (a, b)
            return DimExpr(((first_name, 1), (second_name, 1)))
    for name, other in named.items():
        if distinct > 2 and all(i in other.sizes for i in group.sizes):
            offsets = {size - other.sizes[i] for i, size in group.sizes.items()}
            if len(offsets) == 1 and abs(next(iter(offsets))) == 1:
                return DimExpr(((name, 1),), next(iter(offsets)))
    return None


def _is_sum(group: _Group, groups: Sequence[_Group]) -> bool:
    named = {str(index): other for index, other in enumerate(groups) if other is not group}
    relation = _relation(group, named)
    return relation is not None and len(relation.terms) == 2


def _seed(
    axes: Sequence[Axis], declared: Mapping[tuple[str, int], DimExpr]
) -> tuple[dict[str, _Group], list[Axis]]:
    """(groups of the symbols that the spec declares, the other axes)."""
    seeded: dict[str, _Group] = {}
    rest = []
    for axis in axes:
        dim = declared.get(axis.key)
        if dim is None or len(dim.terms) != 1 or dim.offset:
            rest.append(axis)
            continue
        group = seeded.setdefault(dim.names[0], _Group([], {}))
        # Declared for the calls of the spec; what `generate` calls inside may have another size there.
        if group.axes and not group.accepts(axis):
            rest.append(axis)
        else:
            group.add(axis)
    return seeded, rest


def name_axes(
    axes: Sequence[Axis], declared: Mapping[tuple[str, int], DimExpr] | None = None
) -> dict[tuple[str, int], DimExpr]:
    """An expression for every dynamic axis, by (path, axis).

    Parameters
    ----------
    declared:
        Expressions that the spec's tensor descriptions give to axes.
    """
    declared = declared or {}
    seeded, rest = _seed(axes, declared)
    groups: list[_Group] = list(seeded.values())
    # Axes that are known in most calls first: they decide the groups, the others join.
    for axis in sorted(rest, key=lambda a: sum(size is None for size in a.sizes.values())):
        if axis.key in declared and len(declared[axis.key].terms) > 1:
            continue
        for group in groups:
            if group.accepts(axis):
                group.add(axis)
                break
        else:
            new = _Group([], {})
            new.add(axis)
            groups.append(new)
    position = {axis.key: k for k, axis in enumerate(axes)}
    for group in groups:
        group.axes.sort(key=lambda a: position[a.key])
    groups.sort(key=lambda g: position[g.axes[0].key])

    # Symbols that tensors of their own define come first, so that masks can be sums of them.
    result: dict[tuple[str, int], DimExpr] = {}
    named: dict[str, _Group] = dict(seeded)
    names = {id(group): name for name, group in seeded.items()}
    primary = [g for g in groups if id(g) in names or any(_role(a) in _LENGTHS for a in g.axes)]
    others = [g for g in groups if g not in primary]
    # What is a sum of two others comes after both, wherever it stands among the arguments.
    sums = [g for g in others if _is_sum(g, groups)]
    sums.sort(key=lambda g: sum(g.sizes.values()))
    for group in [*primary, *(g for g in others if g not in sums), *sums]:
        relation = _relation(group, named) if group not in primary else None
        if relation is None:
            name = names.get(id(group)) or _name(group, set(named))
            named[name] = group
            relation = DimExpr.symbol(name)
        for axis in group.axes:
            result[axis.key] = relation
    for axis in axes:
        if axis.key not in result:
            # A declared sum, such as a mask of `past + seq`.
            result[axis.key] = declared[axis.key]
    return result
