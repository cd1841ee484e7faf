"""How calls of a method are recorded while they run, without disturbing them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees import clone_tree
from ..pytrees.cloning import PLAIN, Unkept, is_transformed, transforms
from ..pytrees.paths import flatten_with_paths
from ..pytrees.strides import lost_in_copies
from .probe import Pattern
from .records import InputObserverInfo, ObserverWarning, RecordedCall, shape_only, structure_of

__all__ = ["Recorder"]

#: Shapes of so many calls beyond the limit are kept: news in every call must not make every call slow.
_MOST_SHAPE_CALLS = 64

#: Kinds of calls that cannot be copied; after so many nothing is tried any more.
_MOST_REFUSED = 8


def _is_tracing(leaves: Collection[Any]) -> bool:
    # An export or a compilation inside the block calls the method with fake tensors: no observation.
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(isinstance(leaf, (torch._subclasses.FakeTensor, torch.SymInt)) for leaf in leaves)
    )


def _check_transforms(leaves: Collection[Any]) -> None:
    # A batched tensor stands for one of many calls, and is nothing once `vmap` has returned.
    if any(isinstance(leaf, torch.Tensor) and is_transformed(leaf) for leaf in leaves):
        raise TypeError(
            "torch.func.vmap or functionalize wraps its tensors: observe calls outside of the transform"
        )


def _unkept(item: Any) -> Any:
    return clone_tree(item) if isinstance(item, slice) else Unkept(type(item))


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call has in common with others that cannot be copied for the same reason."""
    try:
        leaves = _pytree.tree_leaves((args, kwargs))
    except Exception:  # the flattening of a class may be what fails
        leaves = [*args, *kwargs.values()]
    described = [leaf if isinstance(leaf, PLAIN) else type(leaf) for leaf in leaves]
    return (transforms(), tuple(kwargs), *described)


class Recorder:
    """Records the calls of one observer.

    Parameters
    ----------
    info:
        Where they are kept.
    check:
        Called with positional arguments, keyword arguments and the arguments by name of a call that is being
        recorded; what it raises is raised in that call.

    Attributes
    ----------
    quiet:
        Calls are not recorded: they are our own.
    """

    def __init__(
        self,
        info: InputObserverInfo,
        check: Callable[[tuple[Any, ...], dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.info = info
        self.quiet = False
        self._check = check
        self._pattern: Pattern | None = None
        self._blind = False  # the shapes of a call could not be taken: not tried again
        self._inside: set[int] = set()  # threads in which an observed call is under way
        self._refused: set[tuple[Any, ...]] = set()
        self._said: set[str] = set()
        self._clashing = False  # keywords need names of their own

    def wrap(self, original: Callable[..., Any], limit: int, keep: str, place: str) -> Callable[..., Any]:
        """`original`, the calls of which are recorded; parameters as for `InputObserver.__call__`."""
        info, inside = self.info, self._inside
        self._refused, self._said = set(), set()
        self._clashing = info.signature is not None and info.signature.clashing

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            # What follows must not be part of a trace: a strict one refuses it, in the user's own call.
            if torch.compiler.is_exporting() or self.quiet:
                return original(*args, **kwargs)
            if torch.compiler.is_compiling():
                info.seen += 1
                return original(*args, **kwargs)
            thread = threading.get_ident()
            if thread in inside:
                # A method that calls itself, or an observer inside itself: part of the call under way.
                return original(*args, **kwargs)
            inside.add(thread)
            try:
                number = info.seen
                info.seen += 1
                if len(info.calls) >= limit and not self._is_news(args, kwargs, keep == "first", number):
                    return original(*args, **kwargs)
                return self._run(original, args, kwargs, limit, place, number)
            finally:
                inside.discard(thread)

        return observed

    def _run(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: int,
        place: str,
        number: int,
    ) -> Any:
        """Make a call and record it."""
        kind = _kind(args, kwargs) if self._refused else ()
        if kind in self._refused or len(self._refused) >= _MOST_REFUSED:
            outputs = original(*args, **kwargs)
            self.info.lost += 1
            return outputs
        arguments, problem, lost = self._record_arguments(args, kwargs)
        if arguments is not None:
            self._check(args, kwargs, arguments)
        begin = time.perf_counter()
        outputs = original(*args, **kwargs)
        duration = time.perf_counter() - begin
        if arguments is not None:
            problem = self._record(arguments, outputs, duration, len(args), limit, place, number, lost)
        if problem is not None:
            self.info.lost += 1
            self._refused.add(kind or _kind(args, kwargs))
            self._say(f"a call was not recorded: {problem} (calls like it are not tried again)", 3)
        return outputs

    def _say(self, text: str, stacklevel: int) -> None:
        """Warn once in a call of the user's, which must go on where warnings are errors (``-W error``)."""
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(ObserverWarning):
                warnings.warn(text, ObserverWarning, stacklevel=stacklevel + 1)

    def _record_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, str | None, tuple[str, ...]]:
        """(copies of the arguments or ``None``, why there are none or ``None``, what copies lose)."""
        assert self.info.signature is not None
        try:
            arguments = self.info.signature.bind(args, kwargs)
            leaves = _pytree.tree_leaves(arguments)
            if _is_tracing(leaves):
                return None, None, ()
            _check_transforms(leaves)
            return clone_tree(arguments), None, self._lost(arguments, kwargs)
        except Exception as error:  # the user's call must not fail because of the recording
            return None, f"{type(error).__name__}: {error}", ()

    def _lost(self, arguments: dict[str, Any], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """What a copy of `arguments` does not keep of the call."""
        signature = self.info.signature
        assert signature is not None
        pairs = [pair for name, value in arguments.items() for pair in flatten_with_paths(value, name)]
        lost: list[str] = []
        with contextlib.suppress(RuntimeError):  # a tensor without memory of its own: under torch.func.grad
            lost = lost_in_copies({path: leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor)})
        extra = [name for name in kwargs if name not in signature.names]
        if extra != sorted(extra):
            lost.append(
                f"extra keywords were passed in the order {', '.join(extra)}, copies are in that of names"
            )
        return tuple(lost)

    def _record(
        self,
        arguments: dict[str, Any],
        outputs: Any,
        duration: float,
        positional: int,
        limit: int,
        place: str,
        number: int,
        lost: tuple[str, ...],
    ) -> str | None:
        """Keep a call; returns why that was not possible."""
        calls = self.info.calls
        try:
            _check_transforms(_pytree.tree_leaves(outputs))
            # Elsewhere the outputs are copied once, on their way there.
            kept = clone_tree(outputs) if place == "device" else outputs
            call = RecordedCall(len(calls), arguments, kept, duration, positional, number).placed(place)
            call.lost = lost
            if self._pattern is not None:
                self._pattern.absorb_call(arguments)
            if len(calls) >= limit and not self._make_room(call):
                return None
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"
        call.index = len(calls)
        calls.append(call)
        return None

    def _make_room(self, call: RecordedCall) -> bool:
        """Drop the values of the call that is missed least, `call` among them; its shapes stay.

        Returns
        -------
        bool
            Whether there is room now.
        """
        calls = self.info.calls
        candidates = [*calls, call]

        def without(index: int) -> int:
            return len(structure_of([*candidates[:index], *candidates[index + 1 :]]))

        # The latest of those that are equally dispensable: the first calls are the documented ones.
        victim = max(range(len(candidates)), key=lambda index: (without(index), index))
        dropped = candidates[victim]
        self.info.shape_calls.append(dropped.shapes())
        if dropped is call:
            return False
        calls.remove(dropped)
        for index, kept in enumerate(calls):
            kept.index = index
        return True

    def _is_news(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: bool, number: int) -> bool:
        """Whether a call beyond the limit has to be recorded whole.

        With `shapes` it never has: what it shows is kept as shapes.
        """
        info = self.info
        assert info.signature is not None
        if self._blind or len(info.shape_calls) >= _MOST_SHAPE_CALLS:
            return False
        try:
            named = info.signature.by_name(kwargs) if self._clashing else kwargs
            if self._pattern is not None:
                if self._pattern.covers(args, named):
                    return False
            else:
                self._pattern = Pattern(info.signature.positions(max(len(args), 32)))
                for call in [*info.calls, *info.shape_calls]:
                    self._pattern.absorb_call(call.shapes().arguments)
                if self._pattern.covers(args, named):
                    return False
            arguments = info.signature.bind(args, kwargs)
            leaves = _pytree.tree_leaves(arguments)
            if _is_tracing(leaves):
                return False
            # A name that `bind` renames is known under both from now on.
            known = self._pattern.covers((), arguments)
            self._pattern.absorb({n: v for n, v in named.items() if n not in arguments})
            if known:
                return False
            if not shapes:
                return True
            if any(isinstance(leaf, torch.Tensor) and is_transformed(leaf) for leaf in leaves):
                self._say("the shapes of a call under torch.func.vmap do not count", 3)
                return False
            call = RecordedCall(0, shape_only(arguments, _unkept), None, 0.0, len(args), number)
            info.shape_calls.append(call)
            self._pattern.absorb_call(arguments)
        except Exception as error:  # the user's call must not fail because of the recording
            self._blind = True
            what = "the shapes of a call beyond the limit were not recorded"
            self._say(f"{what}: {type(error).__name__}: {error}", 3)
        return False
