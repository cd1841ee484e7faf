"""What a call does, operator by operator: which are random, which write where, and where two runs part."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .state import tensor_key

__all__ = ["Event", "Trace", "address", "first_difference"]

_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)


@dataclass(frozen=True)
class Event:
    """One operator call.

    Attributes
    ----------
    name:
        As a person would look for it: ``torch.rand_like``, ``dropout``.
    module:
        Path of the module whose forward runs; ``""`` for the model itself.
    training:
        Whether that module is in train mode.
    place:
        ``FILE:LINE in FUNCTION``, in the code that called torch.
    random:
        Whether it draws from a generator.
    own_generator:
        Whether that generator was passed by the caller.
    constants, outputs:
        What it was given besides tensors; checksums of what it returned.
    """

    name: str
    module: str
    training: bool
    place: str
    random: bool
    own_generator: bool
    constants: tuple[str, ...]
    outputs: tuple[Any, ...]

    def where(self) -> str:
        """``in `layers.0` at FILE:LINE in FUNCTION``."""
        return (f"in `{self.module}` " if self.module else "") + f"at {self.place}"


def _user_frame() -> tuple[str, str]:
    """(place in the code that called torch, name of the function of torch.nn.functional on the way)."""
    frame, functional = sys._getframe(2), ""
    while frame.f_back is not None:
        filename = frame.f_code.co_filename
        if not os.path.abspath(filename).startswith(_PACKAGES):
            return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}", functional
        if filename.endswith(os.path.join("nn", "functional.py")):
            functional = frame.f_code.co_name
        frame = frame.f_back
    return "unknown place", functional


def _name(func: Any, functional: str) -> str:
    if functional:
        return functional
    name = func.overloadpacket.__name__
    return f"torch.{name}" if hasattr(torch, name) else f"{func.namespace}.{name}"


@dataclass
class _Running:
    """The modules whose forward runs, outermost first."""

    names: Mapping[torch.nn.Module, str]
    stack: list[torch.nn.Module] = field(default_factory=list)

    @contextmanager
    def follow(self) -> Iterator[None]:
        entered = register_module_forward_pre_hook(lambda module, args: self.stack.append(module))
        left = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            entered.remove()
            left.remove()

    def _leave(self) -> None:
        self.stack.pop()

    def current(self) -> tuple[str, bool]:
        for module in reversed(self.stack):
            if module in self.names:
                return self.names[module], module.training
        return "", False


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside ``with trace.follow():`` every operator becomes an event.

    Parameters
    ----------
    module:
        The module that is called.
    watched:
        (label, tensor): in-place writes to their memory are noted.

    Attributes
    ----------
    events:
        In order.
    writes:
        Label of a watched tensor -> the first place that writes to it.
    """

    def __init__(self, module: torch.nn.Module, watched: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = _Running({part: name for name, part in module.named_modules()})
        self._module = module
        self._watched = {address(tensor): label for label, tensor in watched if address(tensor)}
        self.events: list[Event] = []
        self.writes: dict[str, str] = {}

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Record what runs inside the block."""
        with self._running.follow(), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place, functional = _user_frame()
        self._note_writes(func, args, kwargs, place)
        out = func(*args, **kwargs)
        module, training = self._running.current()
        training = training if module else self._module.training
        leaves = _pytree.tree_leaves((args, kwargs))
        self.events.append(
            Event(
                _name(func, functional),
                module,
                training,
                place,
                torch.Tag.nondeterministic_seeded in func.tags,
                any(isinstance(leaf, torch.Generator) for leaf in leaves),
                tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, (torch.Tensor, torch.Generator))),
                # What was only reserved holds whatever was there before.
                ()
                if func.overloadpacket.__name__.startswith(("empty", "new_empty"))
                else tuple(
                    tensor_key(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
                    for leaf in _pytree.tree_leaves(out)
                ),
            )
        )
        return out

    def _note_writes(self, func: Any, args: Any, kwargs: Any, place: str) -> None:
        if not self._watched:
            return
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _pytree.tree_leaves(value):
                label = self._watched.get(address(tensor)) if isinstance(tensor, torch.Tensor) else None
                if label is not None:
                    self.writes.setdefault(label, place)


def address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 for what has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def first_difference(first: Trace, second: Trace) -> tuple[Event | None, str]:
    """(where two runs of one call part, a sentence about it); ``(None, "")`` if they do not."""
    for one, two in zip(first.events, second.events, strict=False):
        if (one.name, one.place) != (two.name, two.place):
            return one, (
                f"two replays part {one.where()}: {one.name}, then {two.name} at {two.place} "
                "(a branch on something that changes between calls)"
            )
        if one.constants != two.constants:
            pairs = zip(one.constants, two.constants, strict=False)
            was, now = next(((a, b) for a, b in pairs if a != b), ("other arguments", "others"))
            return one, (
                f"{one.name} {one.where()} gets {was:.40} in one replay and {now:.40} in the next: "
                "a Python value that changes between calls"
            )
        if one.outputs != two.outputs:
            return (
                one,
                f"the first operator whose result differs between two replays is {one.name} {one.where()}",
            )
    if len(first.events) != len(second.events):
        longer = max(first.events, second.events, key=len)
        event = longer[min(len(first.events), len(second.events))]
        return event, f"one replay goes on {event.where()} where the other ends"
    return None, ""
