"""How a tensor lies in memory (transposed, expanded, sliced, channels last): copies that lie as the original.

A model may ask (``is_contiguous``, ``stride``, ``view``), and a trace keeps what it was told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["copied", "in_layout_of"]

#: Memory that a copy of a slice may span, per element of its own; and what it may span anyway.
_MOST_GAPS = 8
_SMALL = 2**16


def copied(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A detached copy on `device`, with the strides of `tensor`, that shares no memory with it.

    A slice of something much larger keeps the order of its axes and gaps between them, but not their length.
    What is no plain dense tensor (sparse, quantized, conjugated) is copied as torch does it.
    """
    tensor = tensor.detach()
    if not _has_layout(tensor):
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


def in_layout_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of `values`, of the rank of `like` and any sizes, that lies as `like` does.

    Axes are in the same order, with gaps where there are any, and expanded where all values along one are the
    same memory. Windows that overlap (`unfold`) become a contiguous tensor.
    """
    values = values.detach()
    if not _has_layout(like) or not _has_layout(values, contiguous=True) or not values.numel():
        return values.clone(memory_format=torch.contiguous_format)
    expanded = [axis for axis in range(like.dim()) if like.stride(axis) == 0 and like.shape[axis] > 1]
    size = values.shape
    for axis in expanded:
        values = values.narrow(axis, 0, 1)
    rest = [axis for axis in range(like.dim()) if axis not in expanded]
    order = sorted(rest, key=lambda axis: (like.stride(axis), -axis))
    gaps = _gaps([like.shape[axis] for axis in order], [like.stride(axis) for axis in order])
    if gaps is None:
        return values.clone(memory_format=torch.contiguous_format)
    stride, reached = [0] * like.dim(), 1
    for axis, gap in zip(order, gaps, strict=True):
        stride[axis] = reached + min(gap, reached)
        reached = stride[axis] * values.shape[axis]
    made = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    return made.copy_(values).expand(size)


def _has_layout(tensor: torch.Tensor, contiguous: bool = False) -> bool:
    plain = (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )
    return plain and (contiguous or not tensor.is_contiguous())


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory there are from the first to the last."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _gaps(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """What is left out before each axis, the innermost first; ``None`` for axes that overlap."""
    reached, last, gaps = 1, 0, []
    for size, stride in zip(sizes, strides, strict=True):
        if size > 1 and stride <= last:
            return None
        gaps.append(max(stride - reached, 0) if size > 1 else 0)
        if size > 1:
            reached, last = stride * size, last + stride * (size - 1)
    return gaps
