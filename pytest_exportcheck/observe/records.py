"""What an observer keeps: whole calls, and shapes of calls beyond the limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees import clone_tree, flatten_with_paths
from .candidate import InputCandidate
from .signature import CallSignature

__all__ = ["InputObserverInfo", "ObserverWarning", "RecordedCall", "shape_only", "structure_of"]


class ObserverWarning(UserWarning):
    """A call could not be recorded (it went on undisturbed), or what was inferred needs a second look."""


@dataclass(eq=False)
class RecordedCall:
    """One call, whole: nothing in it shares memory with the caller's tensors.

    Attributes
    ----------
    index:
        Position among the recorded calls.
    arguments:
        By name, in signature order, as they were *before* the call.
    outputs:
        What the call returned, cloned.
    duration:
        Seconds the call took.
    positional:
        How many of `arguments`, from the first, were passed by position; ``None`` if that is not known.
    """

    index: int
    arguments: dict[str, Any]
    outputs: Any
    duration: float
    positional: int | None = None
    _leaves: dict[str, Any] | None = field(default=None, repr=False)

    def leaves(self) -> dict[str, Any]:
        """Leaf by path (``cache.layers.0.keys``), in flatten order. Needs the flattening functions."""
        if self._leaves is None:
            self._leaves = {
                path: leaf
                for name, value in self.arguments.items()
                for path, leaf in flatten_with_paths(value, name)
            }
        return self._leaves

    def output_leaves(self) -> list[tuple[str, Any]]:
        """(path, leaf) of the outputs, in flatten order."""
        return flatten_with_paths(self.outputs)

    @property
    def by_name(self) -> bool:
        """Whether an argument was passed by keyword."""
        return self.positional is not None and self.positional < len(self.arguments)


@dataclass
class InputObserverInfo:
    """What an observer recorded.

    Attributes
    ----------
    signature:
        Of the observed method; ``None`` until something was observed.
    config_flags:
        Value of flags such as ``use_cache`` that a transformers model reads from its config where a call does
        not pass them.
    calls:
        Recorded calls in order.
    shape_calls:
        Calls beyond the limit that showed something new, an argument or a size: tensors that have the shape,
        dtype and device of the caller's and one element of memory, and no outputs.
    seen:
        Calls made inside the blocks, recorded or not.
    lost:
        Calls within the limit that went well and could not be recorded (an `ObserverWarning` says why). A
        call that raised is none of them, nor is one that an export or a compilation inside the block made.
    aligned:
        Paths of the tensors of the inferred interface, in order; ``None`` before the first inference.
    """

    signature: CallSignature | None = None
    config_flags: dict[str, bool] = field(default_factory=dict)
    calls: list[RecordedCall] = field(default_factory=list)
    shape_calls: list[RecordedCall] = field(default_factory=list)
    seen: int = 0
    lost: int = 0
    aligned: list[str] | None = None

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def inputs(self) -> list[InputCandidate]:
        """The inputs of every recorded call, each a copy."""
        return [self.candidate(call) for call in self.calls]

    def candidate(self, call: RecordedCall) -> InputCandidate:
        """The inputs of one call, aligned with the others if an inference was made."""
        count = call.positional or 0
        items = list(call.arguments.items())
        # A keyword of no tensor is a constant of the call; a position stays where it is.
        constants = {n: v for n, v in items[count:] if not isinstance(v, torch.Tensor) and _is_plain(v)}
        return InputCandidate._recorded(
            tuple(value for _, value in items[:count]),
            {n: v for n, v in items[count:] if n not in constants},
            constants,
            names=tuple(name for name, _ in items[:count]),
            aligned=self.aligned,
        )

    @property
    def flat_outputs(self) -> list[list[torch.Tensor]]:
        """Output tensors of every recorded call, each a copy."""
        return [
            [clone_tree(leaf) for _, leaf in call.output_leaves() if isinstance(leaf, torch.Tensor)]
            for call in self.calls
        ]

    @staticmethod
    def _infer_dynamic_dimensions(
        shape_list: Sequence[Sequence[int]], set_batch_dimension: bool = False
    ) -> list[int]:
        """Axes whose size varies over `shape_list`, axis 0 among them if `set_batch_dimension`.

        Raises
        ------
        RuntimeError
            The shapes have different ranks, or there are none.
        """
        if len({len(shape) for shape in shape_list}) != 1:
            raise RuntimeError(f"all shapes must have the same rank: {[tuple(s) for s in shape_list]}")
        rank = len(shape_list[0])
        return [
            axis
            for axis in range(rank)
            if (axis == 0 and set_batch_dimension) or len({shape[axis] for shape in shape_list}) > 1
        ]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def shape_only(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with tensors of the same shape, dtype and device that hold one element of memory each."""

    def stub(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        return clone_tree(leaf)

    stubs: dict[str, Any] = _pytree.tree_map(stub, arguments)
    return stubs


def structure_of(calls: Iterable[RecordedCall]) -> set[tuple[Any, ...]]:
    """What calls show: ``(path,)`` of each tensor, ``(path, axis)`` of each axis that varies."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for call in calls:
        for path, leaf in call.leaves().items():
            if isinstance(leaf, torch.Tensor):
                shapes.setdefault(path, set()).add(tuple(leaf.shape))
    shown: set[tuple[Any, ...]] = set()
    for path, seen in shapes.items():
        shown.add((path,))
        if len({len(shape) for shape in seen}) > 1:
            shown.add((path, "rank"))
            continue
        shown.update(
            (path, axis) for axis, sizes in enumerate(zip(*seen, strict=True)) if len(set(sizes)) > 1
        )
    return shown
