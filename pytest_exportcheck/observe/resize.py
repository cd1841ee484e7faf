"""Inputs of chosen sizes, made from recorded ones by resampling along the axes, so that values stay valid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ObserveError
from ..pytrees import clone_tree, flatten_with_paths
from ..pytrees.cloning import is_wrapper
from ..pytrees.strides import in_layout_of, lies_as
from .matrices import square_axes, with_side
from .records import RecordedCall
from .shapes import GraphShapes, TensorLeaf

__all__ = [
    "ON_A_GRID",
    "ExportExample",
    "choose_example",
    "is_dense",
    "is_possible",
    "nearer_sizes",
    "nearest",
    "other_sizes",
    "recorded_arguments",
    "resize_arguments",
    "resized",
    "sizes_from_spec",
    "smallest_sizes",
    "source_of",
    "taken",
]

#: Sizes to fall back on: distinct primes, none of them 0 or 1, which torch.export treats as constants.
_SAFE_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


#: Images and frames come in multiples of a patch or a stride.
ON_A_GRID = ("height", "width", "frames")


#: So many elements of all inputs are few, whatever the observed calls had.
_FEW_ELEMENTS = 2**18

#: The largest of all sizes together is at most so many times what the observed calls had, in elements.
_GROWTH = 4

#: Makes a tensor of another shape: (path, recorded tensor, shape, tensors of other calls).
MakeLeaf = Callable[[str, torch.Tensor, Sequence[int], Callable[[], Sequence[torch.Tensor]]], torch.Tensor]


class NotResizable(ObserveError):
    """A leaf that no other size can be made of."""


@dataclass(frozen=True)
class ExportExample:
    """What is handed to an exporter.

    Attributes
    ----------
    arguments:
        By name, complete; copies.
    call:
        Index of the recorded call it was made from.
    sizes:
        Size of each symbol.
    resized:
        Whether it differs from the recorded call.
    note:
        For the record: why it was resized, or why it could not be.
    """

    arguments: dict[str, Any]
    call: int
    sizes: dict[str, int]
    resized: bool
    note: str = ""


def source_of(
    tensor: torch.Tensor, shape: Sequence[int], donors: Callable[[], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Where the values come from: `tensor`, or the first of `donors` that has some if it has none."""
    if tensor.numel() or 0 in shape:
        return tensor
    blank = torch.zeros([max(n, 1) for n in tensor.shape], dtype=tensor.dtype)
    return next((d for d in donors() if d.numel()), blank).to(tensor.device)


def nearest(size: int, old: int, device: torch.device | None = None) -> torch.Tensor:
    """For each of `size` positions the nearest of `old`."""
    return ((torch.arange(size, device=device) + 0.5) * old / size).long()


def taken(tensor: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """`tensor` at `index` along `axis`, of every dtype.

    ``index_select`` of one axis is not implemented for uint16, uint32 and uint64 (torch 2.13).
    """
    return tensor[index] if tensor.dim() == 1 else tensor.index_select(axis, index)


def _resample(
    tensor: torch.Tensor, shape: Sequence[int], donors: Callable[[], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """`tensor` with `shape`, nearest-neighbour along each axis whose size changes; it lies as `tensor`."""
    source = like = source_of(tensor, shape, donors)
    for axis, size in enumerate(shape):
        old = source.shape[axis]
        if old == size:
            continue
        if old == 0:
            source = source.new_zeros([*source.shape[:axis], size, *source.shape[axis + 1 :]])
        elif size == 0:
            source = source.narrow(axis, 0, 0)
        elif size > old and axis == 0:
            # Repeating in turn gives rows that differ from their neighbours, which a nearest copy would not.
            source = taken(source, axis, torch.arange(size, device=source.device) % old)
        else:
            # Nearest keeps the pattern of a mask: ones stay where ones were.
            source = taken(source, axis, nearest(size, old, source.device))
    return in_layout_of(source, like)


def resized(
    path: str, tensor: torch.Tensor, shape: Sequence[int], donors: Callable[[], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """`tensor` with `shape`, its values repeated or left out; as it is if it has the shape already.

    Raises
    ------
    NotResizable
        It changes its size and is a quantized or sparse one.
    """
    if tuple(tensor.shape) == tuple(shape) and not is_dense(tensor):
        return tensor  # copied with the others
    if is_wrapper(tensor) or tensor.is_quantized:
        kind = type(tensor).__name__ if is_wrapper(tensor) else str(tensor.dtype).removeprefix("torch.")
        raise NotResizable(
            f"{path} is a {kind} tensor: the packed numbers of a quantized tensor cannot be resized"
        )
    if not is_dense(tensor):
        raise NotResizable(f"{path} is a {tensor.layout} tensor: only a dense one can be resized")
    return _resample(tensor, shape, donors)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it holds its numbers plainly: neither sparse nor quantized."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or is_wrapper(tensor))


def resize_arguments(
    arguments: Mapping[str, Any],
    shapes: GraphShapes,
    sizes: Mapping[str, int],
    donors: Sequence[RecordedCall] = (),
    make: MakeLeaf = resized,
) -> dict[str, Any]:
    """Arguments with exactly the sizes that `sizes` gives to the symbols; static axes are left alone.

    Parameters
    ----------
    arguments:
        Complete arguments of a call, by name.
    donors:
        Calls whose tensors are used where `arguments` holds an empty one.
    make:
        Makes a tensor of another shape.

    Raises
    ------
    NotResizable
        A tensor that changes its size is a quantized one.
    """
    made = {}
    of_donors: list[dict[str, Any]] = []

    def others(path: str) -> list[torch.Tensor]:
        if not of_donors:
            of_donors.extend(donor.leaves() for donor in donors)
        return [have[path] for have in of_donors if isinstance(have.get(path), torch.Tensor)]

    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        paths = [path for path, _ in flatten_with_paths(value, name)]
        new = []
        for path, leaf in zip(paths, leaves, strict=True):
            described = shapes.leaves.get(path)
            if isinstance(leaf, torch.Tensor) and isinstance(described, TensorLeaf):
                shape, donated = shapes.dims(path, sizes), functools.partial(others, path)
                matrix = _matrix(path, leaf, described, shape, donated, make)
                new.append(make(path, leaf, shape, donated) if matrix is None else matrix)
            else:
                new.append(leaf)
        made[name] = _pytree.tree_unflatten(new, spec)
    copied: dict[str, Any] = clone_tree(made)
    return copied


def _matrix(
    path: str,
    tensor: torch.Tensor,
    leaf: TensorLeaf,
    shape: Sequence[int],
    donors: Callable[[], Sequence[torch.Tensor]],
    make: MakeLeaf,
) -> torch.Tensor | None:
    """`tensor` with `shape`, where two of its axes are one symbol and its matrices have a structure."""
    axes = square_axes(leaf)
    if axes is None or tensor.dim() != len(shape) or 0 in shape or tensor.shape[axes[0]] == shape[axes[0]]:
        return None
    matrix = with_side(tensor, axes, shape[axes[0]])
    if matrix is None or tuple(matrix.shape) == tuple(shape):
        return matrix
    # The other axes, a batch or heads, as of any tensor.
    rest = [
        own if axis in axes else size
        for axis, (own, size) in enumerate(zip(tensor.shape, shape, strict=True))
    ]
    return with_side(make(path, tensor, rest, donors), axes, shape[axes[0]])


def recorded_arguments(
    example: ExportExample, shapes: GraphShapes, calls: Sequence[RecordedCall]
) -> dict[str, Any]:
    """What `example` was made from, complete, before it was resized."""
    call = next((call for call in calls if call.index == example.call), None)
    if call is None or not example.resized:
        return example.arguments
    return _in_common_layout(shapes.complete(call), calls)


def _in_common_layout(arguments: dict[str, Any], calls: Sequence[RecordedCall]) -> dict[str, Any]:
    """`arguments`, with contiguous copies of what lies otherwise in some call."""
    of_calls = [call.leaves() for call in calls]
    made = {}
    for name, value in arguments.items():
        leaves, spec = _pytree.tree_flatten(value)
        new = list(leaves)
        for position, (path, leaf) in enumerate(flatten_with_paths(value, name)):
            if isinstance(leaf, torch.Tensor) and is_dense(leaf):
                others = [have[path] for have in of_calls if isinstance(have.get(path), torch.Tensor)]
                if not all(lies_as(other, leaf) for other in others):
                    new[position] = leaf.detach().clone(memory_format=torch.contiguous_format)
        changed = any(one is not other for one, other in zip(new, leaves, strict=True))
        made[name] = _pytree.tree_unflatten(new, spec) if changed else value
    return made


def _bindings(shapes: GraphShapes, call: RecordedCall) -> dict[str, int]:
    known = shapes.sizes.get(call.index, {})
    return {name: known[name] for name in shapes.symbols if name in known}


def _candidates(size: int, observed: Sequence[int]) -> list[int]:
    """Sizes to try instead of `size`, best first.

    Observed sizes are known to be valid. Then come larger ones on the grid of the observed sizes: images and
    frames come in multiples of a patch or a stride, and a small size may make a derived one (``width // 2``)
    a 1, which torch.export would treat as a constant.
    """
    known = [n for n in dict.fromkeys(observed) if n >= 2]
    found = [size] if size >= 2 else []
    found += known
    if size >= 2:
        step = gcd(*known, size)
        found += [size + step, size + 2 * step, size + 3 * step]
        found += [n for n in _SAFE_SIZES if n > size]
    return [*found, *_SAFE_SIZES, 2]


def _safe(
    sizes: Mapping[str, int],
    limits: Mapping[str, int],
    symbols: Sequence[str],
    observed: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """Distinct sizes of at least 2, as close to `sizes` as that allows."""
    safe: dict[str, int] = {}
    for name in symbols:
        size = sizes.get(name, 0)
        limit = limits.get(name)
        for candidate in _candidates(size, (observed or {}).get(name, ())):
            if candidate not in safe.values() and (limit is None or candidate <= limit):
                safe[name] = candidate
                break
        else:
            safe[name] = size if limit is not None and limit < 2 else max(size, 2)
    return safe


def choose_example(
    calls: Sequence[RecordedCall],
    shapes: GraphShapes,
    accepts: Callable[[dict[str, Any]], bool],
    prefer: int | None = None,
) -> ExportExample:
    """The arguments to export with.

    The best example has every argument and no dynamic axis of size 0 or 1 or equal to another one by
    accident, because torch.export specialises those. The call that comes closest is taken and resized; if
    eager (`accepts`) refuses the new sizes, the recorded call is used as it is and the note says so. Tensors
    that do not lie in memory as those of every other call do are contiguous, because torch.export guards on
    strides.

    Raises
    ------
    ObserveError
        `prefer` or the best call lacks an argument that nothing stands in for.
    """
    symbols = shapes.symbols

    def quality(call: RecordedCall) -> tuple[int, int, int]:
        sizes = _bindings(shapes, call)
        # Each distinct size of at least 2 is one that need not be changed.
        good = len({size for size in sizes.values() if size >= 2})
        return (-len(shapes.missing(call)), good, sum(sizes.values()))

    if prefer is not None:
        call = next(c for c in calls if c.index == prefer)
    else:
        call = max(calls, key=quality)
    arguments = _in_common_layout(shapes.complete(call), calls)
    sizes = {name: shapes.sizes[call.index].get(name, 0) for name in symbols}
    observed = {name: [s[name] for s in shapes.sizes.values() if name in s] for name in symbols}
    wanted = _safe(sizes, shapes.limits, symbols, observed)
    if wanted == sizes:
        return ExportExample(clone_tree(arguments), call.index, sizes, False)
    changed = ", ".join(f"{n} {sizes[n]} -> {wanted[n]}" for n in symbols if sizes[n] != wanted[n])
    try:
        made = resize_arguments(arguments, shapes, wanted, calls)
    except NotResizable as error:
        note = f"call {call.index} as observed: {error.message}"
        return ExportExample(clone_tree(arguments), call.index, sizes, False, note)
    if accepts(clone_tree(made)):
        return ExportExample(made, call.index, wanted, True, f"call {call.index} resized: {changed}")
    return ExportExample(
        clone_tree(arguments),
        call.index,
        sizes,
        False,
        f"call {call.index} as observed: eager refuses {changed}",
    )


def other_sizes(
    shapes: GraphShapes, example: ExportExample, calls: Sequence[RecordedCall]
) -> list[dict[str, int]]:
    """Sizes that no observed call had, one symbol away from the example, and all of them at once.

    1, 2, 3 and a larger one than any that was observed; an empty past. Images and frames come in multiples
    (of a patch, a stride) and stay on the grid that was observed: its step, and one more than the largest.
    """
    observed: dict[str, set[int]] = {name: set() for name in shapes.symbols}
    seen = []
    for call in calls:
        known = _bindings(shapes, call)
        seen.append(known)
        for name, size in known.items():
            observed[name].add(size)
    variants: dict[str, list[int]] = {}
    for name in shapes.symbols:
        sizes = observed[name] or {example.sizes[name]}
        top = max(sizes | {example.sizes[name]})
        if name in ON_A_GRID:
            step = gcd(*sizes)
            candidates = [step, top + step]
        elif name == "batch" or name.endswith("_batch"):
            candidates = [1, 2, 3, top + 2]
        elif name == "past":
            candidates = [0, 1, 2, 3, top + 3]
        else:
            candidates = [1, 2, 3, 2 * top + 1]
        limit = shapes.limits.get(name)
        variants[name] = [size for size in dict.fromkeys(candidates) if limit is None or size <= limit]
    found: list[dict[str, int]] = []
    for name, candidates in variants.items():
        found += [{**example.sizes, name: size} for size in candidates]
    for pick in (0, -1):
        found.append(
            {
                name: candidates[pick] if candidates else example.sizes[name]
                for name, candidates in variants.items()
            }
        )
    found[-1] = _bounded(found[-1], variants, shapes, [*seen, example.sizes])
    found += _within_relations(shapes, example)
    unique = {tuple(sorted(sizes.items())): sizes for sizes in found}
    shown = {tuple(sorted(sizes.items())) for sizes in seen}
    return [sizes for key, sizes in unique.items() if key not in shown and is_possible(shapes, sizes)]


def nearer_sizes(
    sizes: Mapping[str, int], example: Mapping[str, int], shapes: GraphShapes
) -> dict[str, int] | None:
    """`sizes` half as far above `example`; ``None`` where no symbol is above it, or none comes nearer.

    Images and frames stay on the grid that was observed.
    """
    nearer = dict(sizes)
    for name, size in sizes.items():
        excess = (size - example[name]) // 2
        if name in ON_A_GRID:
            step = gcd(*(seen[name] for seen in shapes.sizes.values() if name in seen), example[name])
            excess -= excess % max(step, 1)
        if size > example[name]:
            nearer[name] = example[name] + excess
    if nearer == dict(example) or nearer == dict(sizes) or not is_possible(shapes, nearer):
        return None
    return nearer


def _elements(shapes: GraphShapes, sizes: Mapping[str, int]) -> int:
    """Of all inputs at `sizes`."""
    return sum(prod(shapes.dims(leaf.path, sizes)) for leaf in shapes.tensors())


def _bounded(
    sizes: dict[str, int],
    variants: Mapping[str, Sequence[int]],
    shapes: GraphShapes,
    known: Sequence[Mapping[str, int]],
) -> dict[str, int]:
    """`sizes`, all of them larger than any that was shown, made smaller where the inputs grow out of hand.

    The largest of everything is a product: of a batch of images of twice the sides, whose attention grows
    with the square of their elements, and a runtime that keeps it whole needs 10 GiB and more where the
    observed calls need a hundredth of it. Batches give way first: they are only more of the same.
    """
    whole = [_elements(shapes, each) for each in known if each.keys() >= sizes.keys()]
    bound = max(_FEW_ELEMENTS, _GROWTH * max(whole, default=0))
    batches_first = sorted(variants, key=lambda name: not (name == "batch" or name.endswith("_batch")))
    for name in batches_first:
        for smaller in sorted({size for size in variants[name] if 2 <= size < sizes[name]}, reverse=True):
            if _elements(shapes, sizes) <= bound:
                return sizes
            sizes = {**sizes, name: smaller}
    return sizes


def _within_relations(shapes: GraphShapes, example: ExportExample) -> list[dict[str, int]]:
    """For each sum of two symbols: both of one size, and their sizes exchanged."""
    found = []
    sums = {dim for leaf in shapes.tensors() for dim in leaf.dynamic.values() if len(dim.terms) == 2}
    for first, second in sorted(dim.names for dim in sums):
        if {first, second} & {*ON_A_GRID}:
            continue
        a, b = example.sizes[first], example.sizes[second]
        found += [
            {**example.sizes, **pair}
            for pair in ({first: max(a, b), second: max(a, b)}, {first: b, second: a})
            if all(size <= shapes.limits.get(name, size) for name, size in pair.items())
        ]
    return found


def is_possible(shapes: GraphShapes, sizes: Mapping[str, int]) -> bool:
    """Whether no axis gets a negative size: there is no `past - 1` for an empty past."""
    return all(size >= 0 for leaf in shapes.tensors() for size in shapes.dims(leaf.path, sizes))


def smallest_sizes(shapes: GraphShapes) -> dict[str, int]:
    """The smallest size of each symbol that is worth a try: 0 for a past and for what was empty in a call."""
    empty = {name for sizes in shapes.sizes.values() for name, size in sizes.items() if size == 0}
    return {name: 0 if name in empty or name == "past" else 1 for name in shapes.symbols}


def sizes_from_spec(example: ExportExample, resize: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the sizes a spec lists, the other symbols as in the example."""
    names = list(resize)
    return [
        {**example.sizes, **dict(zip(names, pick, strict=True))}
        for pick in itertools.product(*resize.values())
    ]
