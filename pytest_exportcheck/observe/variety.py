"""Inputs of other sizes whose values differ from their neighbours, as those of real calls do.

A nearest copy of 9 tokens with 4,000 positions repeats each some 450 times in a row. Equal neighbours hide
what is shifted by one, and rounding adds up where everything that is summed is the same. So where an axis
grows, slices along it are drawn from the recorded ones, which are valid. What has a structure keeps it:

* positions (0, 1, 2, ...) are counted on, from the past that there is;
* masks, flags, sorted offsets and segments are resampled as in `resize`, and so are matrices of two axes of
  one symbol that are causal, symmetric or the like (`matrices.py`);
* of token ids, those that stand in runs (padding) stay where a copy has them, and those that every recorded
  row has equally often (the placeholders of an image, an end token) keep their number.

Draws are the same in every process: they depend on the axis and its size only. Tensors whose axes share a
symbol are drawn alike, so that a key stays with its value.
"""

from __future__ import annotations

import enum
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from ..dims import DimExpr
from ..pytrees import flatten_with_paths
from ..pytrees.strides import in_layout_of
from .records import RecordedCall
from .resize import (
    ExportExample,
    is_dense,
    nearest,
    recorded_arguments,
    resize_arguments,
    resized,
    source_of,
    taken,
)
from .shapes import GraphShapes, TensorLeaf

__all__ = ["SizedInputs", "first_accepted", "inputs_at"]

_T = TypeVar("_T")

_WHOLE = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: So many slices are drawn from, no more: beyond a few calls of a large cache nothing is gained.
_MOST_SLICES = 4096

#: So many lanes along an axis are looked at to tell what a tensor is.
_MOST_LANES = 512


@dataclass(frozen=True)
class SizedInputs:
    """Arguments of chosen sizes.

    Attributes
    ----------
    values:
        ``drawn``, ``drawn within the recorded positions`` or ``repeated``.
    """

    arguments: dict[str, Any]
    values: str


class _Kind(enum.Enum):
    """What the values along an axis are."""

    COUNTED = enum.auto()
    SORTED = enum.auto()
    KEPT = enum.auto()
    DRAWN = enum.auto()


def inputs_at(
    example: ExportExample,
    shapes: GraphShapes,
    sizes: Mapping[str, int],
    calls: Sequence[RecordedCall],
    recorded: GraphShapes | None = None,
) -> Iterator[SizedInputs]:
    """Inputs of `sizes`, the most various first; the last ones are those that only repeat what was recorded.

    Parameters
    ----------
    shapes:
        What the sizes are of.
    recorded:
        What the calls were recorded as, if `shapes` has lost a relation.

    Raises
    ------
    NotResizable
        A tensor that changes its size is a quantized one.
    """
    recorded = recorded or shapes
    source = recorded_arguments(example, recorded, calls)
    within = _made(source, shapes, recorded, sizes, example, calls, fold=True)
    if within.folded and _may_be_refused(within.arguments):
        yield SizedInputs(
            _made(source, shapes, recorded, sizes, example, calls, fold=False).arguments, "drawn"
        )
    copies = resize_arguments(example.arguments, shapes, sizes, calls)
    if not _same(within.arguments, copies):
        yield SizedInputs(
            within.arguments, "drawn within the recorded positions" if within.folded else "drawn"
        )
    yield SizedInputs(copies, "repeated")


def first_accepted(
    inputs: Iterable[SizedInputs], call: Callable[[dict[str, Any]], _T]
) -> tuple[tuple[SizedInputs, _T] | None, list[Exception | SystemExit]]:
    """(the first inputs that `call` takes and what it returns, what it raises for those before them)."""
    refusals: list[Exception | SystemExit] = []
    for each in inputs:
        try:
            return (each, call(each.arguments)), refusals
        except (Exception, SystemExit) as error:  # noqa: PERF203  # whatever eager raises is its way of refusing them
            refusals.append(error)
    return None, refusals


@dataclass(frozen=True)
class _Made:
    arguments: dict[str, Any]
    folded: bool


def _made(
    source: Mapping[str, Any],
    shapes: GraphShapes,
    recorded: GraphShapes,
    sizes: Mapping[str, int],
    example: ExportExample,
    calls: Sequence[RecordedCall],
    *,
    fold: bool,
) -> _Made:
    drawing = _Drawing(shapes, recorded, sizes, recorded.sizes.get(example.call, {}), calls, fold)
    return _Made(resize_arguments(source, shapes, sizes, calls, drawing.leaf), drawing.folded)


@dataclass
class _Drawing:
    """Makes the leaves of one size.

    Attributes
    ----------
    old:
        Sizes of the call that the leaves are made from.
    fold:
        Whether positions stay within those that were recorded.
    folded:
        Whether that changed any.
    """

    shapes: GraphShapes
    recorded: GraphShapes
    sizes: Mapping[str, int]
    old: Mapping[str, int]
    calls: Sequence[RecordedCall]
    fold: bool
    folded: bool = False
    _of_calls: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def leaf(
        self,
        path: str,
        tensor: torch.Tensor,
        shape: Sequence[int],
        donors: Callable[[], Sequence[torch.Tensor]],
    ) -> torch.Tensor:
        """`tensor` with `shape`."""
        leaf = self.shapes.leaves[path]
        assert isinstance(leaf, TensorLeaf)
        known = tensor.dtype in _WHOLE | _REAL and is_dense(tensor)
        # Positions may move where their number stays.
        same = tuple(shape) == tuple(tensor.shape) and tensor.dtype in _REAL
        if not known or same or 0 in shape or not leaf.dynamic:
            return resized(path, tensor, shape, donors)
        value = like = source_of(tensor, shape, donors)
        others = [other for other in donors() if other.numel() and other.dim() == value.dim()]
        rows = value.shape[0]
        # Along axis 0 first: what is drawn along another axis differs from row to row.
        for axis in leaf.dynamic:
            size, lanes = shape[axis], _lanes([value, *others], axis)
            kind = _kind(path, lanes, tensor.dtype)
            single = tensor.dtype in _WHOLE and not _is_tokens(path) and all(len(x[0]) == 1 for x in lanes)
            if single and self._past_of(path, leaf, axis):
                kind = _Kind.COUNTED
            if kind is _Kind.COUNTED and (axis or value.dim() == 1):
                value = self._counted(path, leaf, value, axis, size)
            elif axis == 0:
                value = self._rows(path, leaf, value, size, kind, others)
            elif kind is _Kind.DRAWN and size > value.shape[axis]:
                value = self._along(path, leaf, value, axis, size, others, 0)
            else:
                value = taken(value, axis, nearest(size, value.shape[axis], value.device))
                if kind is _Kind.DRAWN and value.shape[0] > rows and isinstance(leaf.dims[0], DimExpr):
                    value = self._along(path, leaf, value, axis, size, others, rows)
        return value if value is like else in_layout_of(value, like)

    def _rows(
        self,
        path: str,
        leaf: TensorLeaf,
        value: torch.Tensor,
        size: int,
        kind: _Kind,
        others: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        old = value.shape[0]
        if size <= old or (kind is _Kind.SORTED and value.dim() == 1):
            return taken(value, 0, nearest(size, old, value.device))
        if kind is _Kind.DRAWN and len(leaf.dynamic) == 1:
            if value.dim() == 1 and value.dtype in _WHOLE:
                if _is_tokens(path):
                    return self._along(path, leaf, value, 0, size, others, 0)
            elif value.dtype in _REAL:
                pool = _pool([value, *[other for other in others if other.shape[1:] == value.shape[1:]]])
                if len(pool) > 1:
                    steps = _steps(leaf.dims[0], size - old, 1, len(pool))[0].to(value.device)
                    return torch.cat([value, pool[(old - 1 + steps) % len(pool)]])
        return taken(value, 0, torch.arange(size, device=value.device) % old)

    def _along(
        self,
        path: str,
        leaf: TensorLeaf,
        value: torch.Tensor,
        axis: int,
        size: int,
        others: Sequence[torch.Tensor],
        keep: int,
    ) -> torch.Tensor:
        """`value` with slices along `axis` that are drawn, in the rows from `keep` on."""
        by_row = axis > 0 and (isinstance(leaf.dims[0], DimExpr) or value.shape[0] == 1)

        def turned(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.movedim(axis, 1) if by_row else tensor.movedim(axis, 0).unsqueeze(0)

        rows = turned(value)
        known = [rows, *(each for each in map(turned, others) if each.shape[2:] == rows.shape[2:])]
        index = nearest(size, rows.shape[1], value.device)
        copies = rows.index_select(1, index)
        if value.dtype in _WHOLE and rows.dim() == 2:
            near, held, pool = _tokens(known, size)
        else:
            alone = [~_in_runs(each) for each in known]
            near, held = copies, ~alone[0].index_select(1, index)
            pool = _pool([each[which] for each, which in zip(known, alone, strict=True)])
        if len(pool) < 2:
            return taken(value, axis, index)
        steps = _steps(leaf.dims[axis], size, rows.shape[0], len(pool)).to(value.device)
        held = held.reshape(*held.shape, *[1] * (rows.dim() - 2))
        made = torch.where(held, near, pool[steps % len(pool)])
        made[:keep] = copies[:keep]
        return made.movedim(1, axis) if by_row else made.squeeze(0).movedim(0, axis)

    def _counted(
        self, path: str, leaf: TensorLeaf, value: torch.Tensor, axis: int, size: int
    ) -> torch.Tensor:
        past = self._past_of(path, leaf, axis)
        shift = self.sizes.get(past, 0) - self.old.get(past, 0) if past else 0
        every = [value, *self._tensors_of(path).values()]
        ends = [_ends(each) for each in every]
        low, high = min(least for least, _ in ends), max(most for _, most in ends)
        lanes = value.movedim(axis, -1)
        # As numbers of Python: what is counted on may be beyond what the dtype holds.
        rows = [_count_on(lane, size) for lane in lanes.reshape(-1, lanes.shape[-1]).tolist()]
        if shift:
            # A padded row begins later; none begins before the first position there is.
            rows = [[one + max(low - min(row), shift) for one in row] for row in rows]
        most = max(map(max, rows))
        if most > high:
            self.folded = True
            if self.fold or most > torch.iinfo(value.dtype).max:
                span = high - low + 1
                rows = [[low + (one - low) % span if one > high else one for one in row] for row in rows]
        made = torch.tensor(rows, dtype=value.dtype).reshape(*lanes.shape[:-1], size)
        return made.movedim(-1, axis).to(value.device)

    def _past_of(self, path: str, leaf: TensorLeaf, axis: int) -> str:
        """The symbol of what came before: the last position is always that many beyond the new ones."""
        dim = leaf.dims[axis]
        mine = dim.names if isinstance(dim, DimExpr) else ()
        found = self._tensors_of(path)
        for name in sorted(self.recorded.symbols, key=lambda name: name != "past"):
            sizes = {i: self.recorded.sizes[i][name] for i in found if name in self.recorded.sizes.get(i, {})}
            if name in mine or len(sizes) < len(found) or len({*sizes.values()}) < 2:
                continue
            if len({_ends(t)[1] - t.shape[axis] - sizes[i] for i, t in found.items()}) == 1:
                return name
        return ""

    def _tensors_of(self, path: str) -> dict[int, torch.Tensor]:
        """Of every call that has it, the tensor at `path`, by index of the call."""
        if path not in self._of_calls:
            found = ((call.index, call.leaves().get(path)) for call in self.calls)
            self._of_calls[path] = {
                index: leaf for index, leaf in found if isinstance(leaf, torch.Tensor) and leaf.numel()
            }
        return self._of_calls[path]


def _ends(tensor: torch.Tensor) -> tuple[int, int]:
    """The least and the largest value; torch has neither of uint16, uint32 and uint64."""
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        values = tensor.flatten().tolist()
        return min(values), max(values)
    return int(tensor.min()), int(tensor.max())


def _is_tokens(path: str) -> bool:
    return any(part.endswith("input_ids") for part in path.split("."))


def _lanes(tensors: Sequence[torch.Tensor], axis: int) -> list[torch.Tensor]:
    """Rows along `axis`, of large tensors some of them."""
    found = []
    for tensor in tensors:
        lanes = tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])
        lanes = lanes[:: max(1, len(lanes) // _MOST_LANES)]
        found.append(lanes.to(torch.int64) if tensor.dtype in _WHOLE else lanes.float())
    return found


def _kind(path: str, lanes: Sequence[torch.Tensor], dtype: torch.dtype) -> _Kind:
    whole = dtype in _WHOLE
    if whole and _is_tokens(path):
        return _Kind.DRAWN
    if whole and "position" in path:
        return _Kind.COUNTED
    differences = torch.cat([lane.diff(dim=1).flatten() for lane in lanes])
    count = len(differences)
    ones, zeros = int((differences == 1).sum()), int((differences == 0).sum())
    if whole and count > 1 and ones + zeros >= 0.75 * count and ones >= 0.5 * count:
        return _Kind.COUNTED
    if count and (bool((differences >= 0).all()) or bool((differences <= 0).all())):
        return _Kind.SORTED
    low, high = min(lane.min() for lane in lanes), max(lane.max() for lane in lanes)
    if all(bool(((lane == low) | (lane == high)).all()) for lane in lanes):
        return _Kind.KEPT
    return _Kind.DRAWN


def _in_runs(rows: torch.Tensor) -> torch.Tensor:
    """Which slices along axis 1 of `rows` equal one beside them: padding, the background of an image."""
    flat = rows.reshape(*rows.shape[:2], -1)
    equal = (flat[:, 1:] == flat[:, :-1]).all(dim=-1)
    found = torch.zeros(flat.shape[:2], dtype=torch.bool, device=rows.device)
    found[:, 1:] |= equal
    found[:, :-1] |= equal
    return found


def _pool(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor[:_MOST_SLICES] for tensor in tensors])[:_MOST_SLICES]


def _steps(dim: int | DimExpr, size: int, rows: int, count: int) -> torch.Tensor:
    """[rows, size] numbers: modulo `count` they are random, and none equals the one before it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{dim} {size}".encode()))
    return torch.randint(1, count, (rows, size), generator=generator).cumsum(dim=1)


def _tokens(known: Sequence[torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, which of them stay, what the others are drawn from), for the rows of ``known[0]``."""
    rows: list[list[int]] = known[0].tolist()
    every = [row for each in known for row in each.tolist()]
    distinct = [list(row) for row in dict.fromkeys(map(tuple, every)) if len(row) > 1]
    counts = [Counter(row) for row in distinct]
    total = sum(counts, Counter[int]())
    beside = Counter(one for row in distinct for one, other in pairwise(row) if one == other)
    runs = {value for value, count in beside.items() if 2 * count >= total[value]}
    as_often = {v for v in total if len({each[v] for each in counts}) == 1} if len(distinct) > 1 else set()
    pool = {value for row in every for value in row} - runs - as_often
    if len(pool) < 2:
        pool |= as_often - runs
        as_often &= runs
    placed = [_placed(row, size, runs, as_often) for row in rows]
    kind, device = known[0].dtype, known[0].device
    return (
        torch.tensor([[value or 0 for value in row] for row in placed], dtype=kind, device=device),
        torch.tensor([[value is not None for value in row] for row in placed], device=device),
        torch.tensor(sorted(pool), dtype=kind, device=device),
    )


def _placed(row: Sequence[int], size: int, runs: set[int], as_often: set[int]) -> list[int | None]:
    """`row` grown: `runs` where a copy has them, `as_often` once each, ``None`` for what is to be drawn."""
    index = nearest(size, len(row)).tolist()
    made: list[int | None] = [row[i] if row[i] in runs - as_often else None for i in index]
    start = 0
    while start < len(row):
        end = start + 1
        while end < len(row) and row[end] == row[start]:
            end += 1
        if row[start] in as_often:
            # What ends a row still ends it.
            first = size - (end - start) if end == len(row) else index.index(start)
            made[first : first + end - start] = row[start:end]
        start = end
    return made


def _count_on(row: Sequence[int], size: int) -> list[int]:
    """`row` with `size` positions: each stretch that counts, or stays, does so for its share of them.

    ``[1, 1, 0, 1, 2, 3]``, two padded positions, becomes ``[1, 1, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7]``.
    """
    made: list[int] = []
    index = nearest(size, len(row)).tolist()
    start = 0
    while start < len(row):
        end, step = start + 1, int(len(row) == 1)
        if end < len(row) and row[end] - row[start] in (0, 1):
            step = row[end] - row[start]
            while end < len(row) and row[end] - row[end - 1] == step:
                end += 1
        count = sum(start <= i < end for i in index)
        made += [row[start] + step * k for k in range(count)]
        start = end
    return made


def _tensors(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaves = (pair for name, value in arguments.items() for pair in flatten_with_paths(value, name))
    return {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _may_be_refused(arguments: Mapping[str, Any]) -> bool:
    """Whether a position beyond a table of them raises: in CUDA it ends the process's use of the device."""
    return all(leaf.device.type == "cpu" for leaf in _tensors(arguments).values())


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the dense tensors hold the same values."""
    left, right = _tensors(one), _tensors(other)
    return all(
        left[path].shape == right[path].shape and bool((left[path] == right[path]).all())
        for path in left
        if is_dense(left[path])
    )
