"""Patches applied and taken back: all or none, nested, one thread at a time, with a count of their calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

import torch

from ..errors import PatchError
from .patch import MISSING, Patch, name_of, nearest, resolve
from .scoped import entered

__all__ = ["Activity", "active_patches", "applied", "codes_of", "frame_of", "uncounted"]

#: Held while any patch is active: patches are process-wide, so a second thread would export under the first
#: one's, and restore them under its feet.
_LOCK = threading.RLock()

#: Seconds that a thread waits for the patches of another one.
_PATIENCE = 600.0

_HOLDER: list[str] = []

#: Patches that are in place, with how often they were called since. One that is active already is not applied
#: twice: a factory would wrap its own replacement.
_ACTIVE: dict[Patch, _Live] = {}


@dataclass
class _Live:
    calls: int = 0
    function: Any = None


@dataclass
class Activity:
    """What happened under a set of patches; filled as the block runs.

    Attributes
    ----------
    patches:
        Those in place, by name.
    resting:
        Those that are not, with the reason.
    calls:
        By name, calls while the block ran; without a replacement to call, absent.
    codes:
        By name, the code of the replacement: decorators, then the function.
    """

    patches: dict[str, Patch] = field(default_factory=dict)
    resting: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    codes: dict[str, list[CodeType]] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict, repr=False)

    def so_far(self) -> dict[str, int]:
        """By name, calls since the block was entered; inside the block only."""
        return {
            name: live.calls - self._before[name]
            for name, patch in self.patches.items()
            if (live := _ACTIVE[patch]).function is not None
        }

    def called(self) -> dict[str, int]:
        """Those that were called at least once."""
        return {name: count for name, count in self.calls.items() if count}


def active_patches() -> tuple[Patch, ...]:
    """The patches in place now, of every block, in the order in which they were put there."""
    return tuple(_ACTIVE)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Calls inside the block count for no patch: they are those of our own code, and of no export."""
    before = {patch: live.calls for patch, live in _ACTIVE.items()}
    try:
        yield
    finally:
        for patch, calls in before.items():
            if patch in _ACTIVE:
                _ACTIVE[patch].calls = calls


@contextlib.contextmanager
def applied(
    patches: Sequence[Patch], model: torch.nn.Module | None = None, patience: float = _PATIENCE
) -> Iterator[Activity]:
    """Put `patches` in place inside the block, in order; undone in reverse, also after an error on entry.

    Parameters
    ----------
    patience:
        Seconds to wait for another thread that has patches in place.

    Raises
    ------
    PatchError
        A target is missing, a factory failed, or another thread kept its patches for too long.
    """
    with _one_thread(patience), contextlib.ExitStack() as stack:
        reasons = [(patch, patch.rests()) for patch in patches]
        activity = Activity(resting={patch.name: reason for patch, reason in reasons if reason})
        working = [patch for patch, reason in reasons if not reason]
        copies = _Copies(working)
        for patch in working:
            stack.enter_context(_in_place(patch, model, activity, copies))
        for name, patch in activity.patches.items():
            activity._before[name] = _ACTIVE[patch].calls
            activity.codes[name] = codes_of(getattr(patch.rewritten, "func", None) or _ACTIVE[patch].function)
        wrappers = [_named(_WRAPPER, name) for name in activity.patches]
        stack.enter_context(
            _kept_in_traces([*wrappers, *(code for codes in activity.codes.values() for code in codes)])
        )
        try:
            yield activity
        finally:
            activity.calls.update(activity.so_far())


@contextlib.contextmanager
def _one_thread(patience: float) -> Iterator[None]:
    if not _LOCK.acquire(timeout=patience):
        raise PatchError(
            f"thread {_HOLDER[-1] if _HOLDER else '?'} has had patches in place for {patience:g} s; "
            "they are process-wide: export in one thread, or in processes"
        )
    _HOLDER.append(threading.current_thread().name)
    try:
        yield
    finally:
        _HOLDER.pop()
        _LOCK.release()


@contextlib.contextmanager
def _in_place(
    patch: Patch, model: torch.nn.Module | None, activity: Activity, copies: _Copies
) -> Iterator[None]:
    if patch in _ACTIVE:
        activity.patches[patch.name] = patch
        yield
        return
    with contextlib.ExitStack() as stack:
        if patch.scope is not None:
            stack.enter_context(entered(patch.scope(model), model, patch.name))
            live = _Live()
        else:
            made = _make(patch, copies)
            if isinstance(made, str):
                activity.resting[patch.name] = made
                yield
                return
            live = made[0]
            try:
                for place, key, value in made[1]:
                    stack.enter_context(_swapped(place, key, value))
            except (TypeError, AttributeError) as error:
                raise PatchError(f"patch {patch.target}: it cannot be replaced: {error}") from error
        _ACTIVE[patch] = live
        stack.callback(_ACTIVE.pop, patch)
        activity.patches[patch.name] = patch
        yield


def _make(patch: Patch, copies: _Copies) -> tuple[_Live, list[tuple[Any, str, Any]]] | str:
    """The counted replacement and every place it goes to, or why there is nothing to replace."""
    try:
        owner, attribute, original = resolve(patch.target, patch.owner)
    except PatchError as error:
        if patch.optional:
            return error.message
        raise
    if original is MISSING:
        message = f"patch {patch.target}: {name_of(owner)} has no {attribute!r}{nearest(owner, attribute)}"
        if patch.optional:
            return message
        raise PatchError(f"{message}; see exportcheck patches --lint")
    try:
        function = patch.replacement(original) if patch.wraps else patch.replacement
    except Exception as error:
        raise PatchError(
            f"patch {patch.target}: its factory raises {type(error).__name__}: {error}"
        ) from error
    live = _Live(function=function)
    static = inspect.getattr_static(owner, attribute, MISSING)
    value = _like(static, _counted(function, live, patch.name), patch)
    places = [(owner, attribute, value)]
    if patch.everywhere and isinstance(owner, ModuleType) and callable(original):
        places += [(place, key, value) for place, key in copies.of(original, owner, attribute)]
    return live, places


def _like(static: Any, value: Any, patch: Patch) -> Any:
    """`value` as the kind of attribute that the class has there."""
    if isinstance(value, (staticmethod, classmethod, property)):
        return value
    if isinstance(static, staticmethod):
        return staticmethod(value)
    if isinstance(static, classmethod):
        # What a factory is given is bound to the class already.
        return staticmethod(value) if patch.wraps else classmethod(value)
    if isinstance(static, property) and callable(value):
        return property(value)
    return value


def _counted(function: Any, live: _Live, name: str) -> Any:
    """`function`, its calls counted; the frame of the wrapper is called as the patch."""
    if not callable(function) or isinstance(function, type):
        return function

    def count() -> None:
        live.calls += 1

    # Strict mode: dynamo calls it when it traces, instead of tracing it.
    torch.compiler.assume_constant_result(count)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        count()
        return function(*args, **kwargs)

    wrapper: Any = patched
    wrapper.__code__ = _named(wrapper.__code__, name)
    return wrapper


def _named(code: CodeType, name: str) -> CodeType:
    return code.replace(co_name=frame_of(name))


def frame_of(name: str) -> str:
    """What the frame through which the patch `name` is called is called in stack traces."""
    return f"patched {name}"


#: The code of the wrappers, whose file is that of all of them.
_WRAPPER: CodeType = _counted(lambda: None, _Live(), "").__code__


class _Copies:
    """Where else the functions that a set of patches replaces are kept: names of modules, entries of tables.

    One look at all modules serves the whole set: it is most of what entering a mode takes.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        #: By identity: the function, so that no other gets its identity, and its places.
        self._found: dict[int, tuple[Any, list[tuple[Any, str]]]] = {}
        self._modules = 0

    def of(self, original: Any, owner: ModuleType, attribute: str) -> list[tuple[Any, str]]:
        """Places of `original` other than the attribute of `owner`."""
        # A factory may have imported something, and an earlier patch of the set may be what is patched.
        if id(original) not in self._found or len(sys.modules) != self._modules:
            self._look([original, *self._originals()])
        return [
            (place, key)
            for place, key in self._found[id(original)][1]
            if not (place is owner and key == attribute)
            and (place if isinstance(place, dict) else vars(place)).get(key) is original
        ]

    def _originals(self) -> Iterator[Any]:
        for patch in self._patches:
            if patch.everywhere and patch.scope is None and patch not in _ACTIVE:
                # A target that is missing is told when its turn comes.
                with contextlib.suppress(PatchError):
                    owner, _, original = resolve(patch.target, patch.owner)
                    if isinstance(owner, ModuleType):
                        yield original

    def _look(self, originals: Sequence[Any]) -> None:
        wanted = self._found = {id(each): (each, []) for each in originals if each is not MISSING}
        self._modules = len(sys.modules)
        tables: dict[int, MutableMapping[str, Any]] = {}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):
                continue
            for key, value in list(names.items()):
                if id(value) in wanted:
                    wanted[id(value)][1].append((module, key))
                elif isinstance(key, str) and key.isupper():
                    for table in _tables(value):
                        tables.setdefault(id(table), table)
        for table in tables.values():
            for key, value in list(table.items()):
                if id(value) in wanted:
                    wanted[id(value)][1].append((table, key))


def _tables(value: Any) -> Iterator[MutableMapping[str, Any]]:
    if type(value) is dict:
        yield value
        return
    # `GeneralInterface` of transformers: a table of the class and one of the instance.
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    if not any("_global_mapping" in vars(cls) for cls in classes):
        return
    for name in ("_global_mapping", "_local_mapping"):
        table = inspect.getattr_static(value, name, None)
        if type(table) is dict:
            yield table


@contextlib.contextmanager
def _swapped(place: Any, key: str, value: Any) -> Iterator[None]:
    if isinstance(place, dict):
        before = place[key]
        place[key] = value
        try:
            yield
        finally:
            place[key] = before
        return
    # From the owner's own dict: what it inherits must be inherited again, and a staticmethod stay one.
    before = vars(place).get(key, MISSING)
    setattr(place, key, value)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(place, key)
        else:
            setattr(place, key, before)


@contextlib.contextmanager
def _kept_in_traces(codes: Sequence[CodeType]) -> Iterator[None]:
    """Keep the frames of replacements in the stack traces of graph nodes.

    Out of strict mode torch (2.13) keeps the frames of methods called ``forward`` and of what is registered
    as an anchor, by file and name.
    """
    anchors = getattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS", None)
    if not isinstance(anchors, set):
        yield
        return
    added = {(code.co_filename, code.co_name) for code in codes} - anchors
    anchors.update(added)
    try:
        yield
    finally:
        anchors.difference_update(added)


def codes_of(function: Any) -> list[CodeType]:
    """The code that a call of `function` runs: of its decorators, then of the function they wrap."""
    found = []
    while function is not None:
        if isinstance(function, property):
            function = function.fget
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if isinstance(code, CodeType):
            found.append(code)
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return found
