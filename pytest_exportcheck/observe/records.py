"""What an observer keeps: whole calls, and shapes of calls beyond the limit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from ..pytrees.cloning import blank
from .candidate import InputCandidate
from .placement import Placed
from .signature import CallSignature

__all__ = [
    "InputObserverInfo",
    "ObserverWarning",
    "RecordedCall",
    "shape_only",
    "structure_of",
    "with_defaults",
]


class ObserverWarning(UserWarning):
    """A call could not be recorded (it went on undisturbed), or what was inferred needs a second look."""


class RecordedCall:
    """One call, whole: nothing in it shares memory with the caller's tensors.

    Parameters
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
    number:
        Position among all calls that were made, recorded or not; ``None``: the same as `index`.

    Attributes
    ----------
    arguments, outputs:
        As above. New copies at every use if the values are kept elsewhere (see `placed`).
    lost:
        Sentences on what of the call is not in `arguments`: memory that tensors shared, the order of extra
        keywords.
    """

    def __init__(
        self,
        index: int,
        arguments: dict[str, Any],
        outputs: Any,
        duration: float,
        positional: int | None = None,
        number: int | None = None,
    ) -> None:
        self.index = index
        self.duration = duration
        self.positional = positional
        self.number = index if number is None else number
        self._arguments: dict[str, Any] | Placed = arguments
        self._outputs = outputs
        self._names = tuple(arguments)
        self._extra: dict[str, Any] = {}
        self._leaves: dict[str, Any] | None = None
        self._stubs: dict[str, Any] | None = None
        self.lost: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"RecordedCall({self.number}, {', '.join(self._names)})"

    @property
    def arguments(self) -> dict[str, Any]:
        if isinstance(self._arguments, Placed):
            loaded = self._arguments.load()
            return {name: loaded[name] if name in loaded else self._extra[name] for name in self._names}
        return self._arguments

    @property
    def outputs(self) -> Any:
        return self._outputs.load() if isinstance(self._outputs, Placed) else self._outputs

    def leaves(self) -> dict[str, Any]:
        """Leaf by path (``cache.layers.0.keys``), in flatten order. Needs the flattening functions."""
        if isinstance(self._arguments, Placed):
            return _leaves(self.arguments)
        if self._leaves is None:
            self._leaves = _leaves(self._arguments)
        return self._leaves

    def output_leaves(self) -> list[tuple[str, Any]]:
        """(path, leaf) of the outputs, in flatten order."""
        return flatten_with_paths(self.outputs)

    @property
    def by_name(self) -> bool:
        """Whether an argument was passed by keyword."""
        return self.positional is not None and self.positional < len(self._names)

    def shapes(self) -> RecordedCall:
        """This call with tensors that hold one element of memory each, and no outputs."""
        if self._stubs is None:
            self._stubs = shape_only(self.arguments)
        return RecordedCall(self.index, self._stubs, None, self.duration, self.positional, self.number)

    def placed(self, place: str) -> RecordedCall:
        """This call with its values kept at `place`, one of `PLACES`; its shapes stay at hand."""
        if place == "device":
            return self
        twin = copy.copy(self)
        twin._stubs = shape_only(self.arguments)
        twin._arguments, twin._outputs = Placed(self.arguments, place), Placed(self.outputs, place)
        twin._leaves = None
        return twin

    def edited(
        self,
        without: Collection[str] = (),
        constants: Mapping[str, Any] | None = None,
        index: int | None = None,
    ) -> RecordedCall:
        """A copy that lacks arguments, or has other constants, or another index."""
        added = dict(constants or {})
        twin = copy.copy(self)
        twin.index = self.index if index is None else index
        twin._names = tuple(name for name in dict.fromkeys([*self._names, *added]) if name not in without)
        if self.positional is not None:
            twin.positional = self.positional - sum(n in without for n in self._names[: self.positional])
        twin._leaves = None
        if isinstance(self._arguments, Placed):
            twin._arguments = self._arguments.without({*without, *added})
            twin._extra = {**self._extra, **added}
        else:
            twin._arguments = {n: added[n] if n in added else self._arguments[n] for n in twin._names}
        if self._stubs is not None:
            twin._stubs = {n: added[n] if n in added else self._stubs[n] for n in twin._names}
        return twin


def with_defaults(calls: Sequence[RecordedCall], defaults: Mapping[str, Any]) -> list[RecordedCall]:
    """`calls`, in which an argument left to a default that is a tensor or a container is that default.

    Only where another call passes the argument: a default that none passes says nothing.
    """
    passed = {name for call in calls for name in call._names}
    made = {
        name: value
        for name, value in defaults.items()
        if name in passed and isinstance(value, (torch.Tensor, list, tuple, dict))
    }
    return [
        call.edited(constants={n: clone_tree(v) for n, v in made.items() if n not in call._names})
        for call in calls
    ]


def _leaves(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {path: leaf for name, value in arguments.items() for path, leaf in flatten_with_paths(value, name)}


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
            spelled=self.signature.spelled if self.signature else str,
        )

    @property
    def flat_outputs(self) -> list[list[torch.Tensor]]:
        """Output tensors of every recorded call, each a copy."""
        with register_flattening_functions(None):
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


def shape_only(arguments: dict[str, Any], opaque: Callable[[Any], Any] = lambda item: item) -> dict[str, Any]:
    """`arguments` with tensors of the same shape, dtype and device that hold one element of memory each.

    Objects that are no pytree nodes are not copied: `opaque` gives what stands for one.
    """
    stubs: dict[str, Any] = clone_tree(arguments, lambda t: blank(t, ()).expand(t.shape), opaque)
    return stubs


def structure_of(calls: Iterable[RecordedCall]) -> set[tuple[Any, ...]]:
    """What calls show of an interface.

    ``(path,)`` of each tensor, ``(path, axis)`` of each axis that varies, ``(path, "absent")`` of each tensor
    that a call lacks. No constants: calls that differ in one need a graph each, which the shapes of the one
    that is not kept tell as well.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    shown: set[tuple[Any, ...]] = set()
    count = 0
    for call in calls:
        count += 1
        for path, leaf in call.shapes().leaves().items():
            if isinstance(leaf, torch.Tensor):
                shapes.setdefault(path, []).append((*leaf.shape,))
    for path, seen in shapes.items():
        shown.add((path,))
        if len(seen) < count:
            shown.add((path, "absent"))
        if len({len(shape) for shape in seen}) > 1:
            shown.add((path, "rank"))
            continue
        shown.update(
            (path, axis) for axis, sizes in enumerate(zip(*seen, strict=True)) if len(set(sizes)) > 1
        )
    return shown
