"""How a tensor lies in memory (transposed, expanded, sliced, channels last): copies that lie as the original.

A model may ask (``is_contiguous``, ``stride``, ``view``), and a trace keeps what it was told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

__all__ = ["copied", "in_layout_of", "lies_as", "lost_in_copies", "memory_of"]

#: Memory that a copy of a slice may span, per element of its own; and what it may span anyway.
_MOST_GAPS = 8
_SMALL = 2**16


def copied(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A detached copy on `device`, with the strides of `tensor`, that shares no memory with it.

    A slice of something much larger keeps the order of its axes and gaps between them, but not their length.
    Where elements of an axis lie between or in those of another one (`unfold`, a diagonal) the copy is
    contiguous: no tensor of other sizes could lie like it. What is no plain dense tensor (sparse, quantized,
    conjugated) is copied as torch does it.
    """
    tensor = tensor.detach()
    if not _has_layout(tensor) or _axes(tensor) is None:
        made = tensor if device is None or device == tensor.device else tensor.to(device)
        if tensor.layout is torch.strided:
            return made.clone(memory_format=torch.contiguous_format)
        return made.clone()
    size, stride = tuple(tensor.shape), tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device or tensor.device)
    if _extent(size, stride) > max(_MOST_GAPS * tensor.numel(), _SMALL):
        tensor = in_layout_of(tensor, tensor)
        stride = tensor.stride()
    span = tensor.as_strided((_extent(size, stride),), (1,))
    span = span.clone() if device is None else span.to(device, copy=True)
    # No view: what a call does to it is nobody else's business.
    return torch.empty(0, dtype=span.dtype, device=span.device).set_(span.untyped_storage(), 0, size, stride)


def memory_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]] | None:
    """(memory from the first element to the last, sizes, strides) of a copy; ``None`` if it is contiguous."""
    copy = copied(tensor)
    if not _has_layout(copy):
        return None
    size, stride = tuple(copy.shape), copy.stride()
    extent = _extent(size, stride) if copy.numel() else 0
    return (
        torch.empty(0, dtype=copy.dtype, device=copy.device).set_(copy.untyped_storage(), 0, (extent,), (1,)),
        size,
        stride,
    )


def in_layout_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, of the rank of `like` and any sizes, that lies as `like` does.

    Axes are in the same order, with gaps where there are any, and expanded where all values along one are the
    same memory.
    """
    values = values.detach()
    if not _has_layout(like) or not _has_layout(values, contiguous=True) or not values.numel():
        return values.clone(memory_format=torch.contiguous_format)
    axes = _axes(like)
    if axes is None:
        return values.clone(memory_format=torch.contiguous_format)
    size = values.shape
    for axis in {*range(like.dim())} - axes.keys():
        values = values.narrow(axis, 0, 1)
    stride, reached = [0] * like.dim(), 1
    for axis, gap in axes.items():
        stride[axis] = reached + min(gap, reached)
        reached = stride[axis] * max(values.shape[axis], 1)
    made = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    return made.copy_(values).expand(size)


def lies_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether `in_layout_of` makes the strides of `tensor` of a tensor of its sizes and of `like`."""
    if tensor.dim() != like.dim() or tensor.layout is not torch.strided:
        return tensor.layout == like.layout
    made = in_layout_of(torch.empty(tensor.shape, device="meta"), like)
    sizes, pairs = tensor.shape, zip(tensor.stride(), made.stride(), strict=True)
    return all(size <= 1 or one == other for size, (one, other) in zip(sizes, pairs, strict=True))


def lost_in_copies(leaves: Mapping[str, torch.Tensor]) -> list[str]:
    """Sentences on what copies of tensors (path -> tensor), one by one, do not keep of them."""
    shared, found = list[str](), list[str]()
    ranges: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for path, tensor in leaves.items():
        if not _is_plain(tensor) or not tensor.numel():
            continue
        if _has_layout(tensor) and _axes(tensor) is None:
            found.append(
                f"axes of `{path}` overlap in memory or lie between each other, its copy is contiguous"
            )
        offset, extent = tensor.storage_offset(), _extent(tensor.shape, tensor.stride())
        if offset:
            found.append(f"`{path}` begins {offset} elements into its memory, its copy at the first")
        first = tensor.data_ptr()
        same = ranges.setdefault(tensor.untyped_storage().data_ptr(), [])
        last = first + extent * tensor.element_size()
        for start, end, other, another in same:
            if start < last and first < end:
                one = (first, tensor.shape, tensor.stride()) == (start, another.shape, another.stride())
                how = "are one tensor, their copies are two" if one else "share memory, their copies do not"
                shared.append(f"`{other}` and `{path}` {how}")
                break
        same.append((first, last, path, tensor))
    return [*shared, *found]


def _has_layout(tensor: torch.Tensor, contiguous: bool = False) -> bool:
    # Not `is_contiguous`: it leaves out axes of size 1, whose strides a trace sees.
    return _is_plain(tensor) and (contiguous or tensor.stride() != _contiguous(tensor.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride = [1]
    for length in reversed(size[1:]):
        stride.insert(0, stride[0] * max(length, 1))
    return tuple(stride[: len(size)])


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory there are from the first to the last."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _axes(tensor: torch.Tensor) -> dict[int, int] | None:
    """Axis -> how much memory is left out before each next element, innermost first; without expanded axes.

    ``None`` if elements of one axis lie between or in those of another.
    """
    size, stride = tensor.shape, tensor.stride()
    kept = [axis for axis in range(tensor.dim()) if size[axis] <= 1 or stride[axis]]
    reached, gaps = 1, {}
    for axis in sorted(kept, key=lambda axis: (stride[axis], -axis)):
        if size[axis] > 1 and stride[axis] < reached:
            return None
        gaps[axis] = max(stride[axis] - reached, 0)
        reached = max(reached, stride[axis] * size[axis])
    return gaps
