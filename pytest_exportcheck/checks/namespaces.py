"""Namespaces of modules, classes and models, and tables: what is in them, and what of it changed.

Most stay as they are from case to case: what was read of a module is kept, and one look at all that is in it
shows whether it can be used again.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import sys
import types
from abc import ABC
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from .in_place import plain_container

__all__ = [
    *("ABSENT", "Group", "Leak", "Library", "Space"),
    *("group_of_module", "library_of_modules", "same", "spaces_of_model", "text_of"),
]

#: Modules of torch whose functions, and classes with their flags, models run through, besides those of
#: transformers and of the model. Elsewhere torch counts and collects in its classes.
_OF_MODELS = ("torch.nn", "torch.functional", "torch._tensor")

#: Attributes that Python and torch themselves fill lazily.
_LAZY = ("__dict__", "__weakref__", "__annotations__", "__annotations_cache__", "_abc_impl")

ABSENT: Any = object()

#: In place of a value that is not watched, and not kept: it may hold a model.
_UNWATCHED: Any = object()


@dataclass(frozen=True)
class Leak:
    """One thing that is not as it was.

    Attributes
    ----------
    place:
        ``transformers.cache_utils.DynamicLayer.update``, ``pytree node ...``, ``vars(model) forward``.
    change:
        ``changed``, ``added`` or ``removed``.
    undo:
        Puts back what was there before; ``None`` where that is not known (registries).
    value:
        What is there now; ``None`` of what was removed.
    inert:
        An attribute of a class that is what it would inherit.
    """

    place: str
    change: str
    detail: str = ""
    undo: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    value: Any = field(default=None, compare=False, repr=False)
    inert: bool = False

    def __str__(self) -> str:
        return f"{self.place} was {self.change}" + (f" ({self.detail})" if self.detail else "")


class _Raw(Mapping[Any, Any]):
    """What a dict holds whose own methods make something of it (`transformers.activations.ACT2FN`)."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table = table

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self.table, key)

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self.table)

    def __len__(self) -> int:
        return dict.__len__(self.table)

    def values(self) -> Any:
        return dict.values(self.table)

    def items(self) -> Any:
        return dict.items(self.table)


@dataclass(frozen=True)
class Space:
    """A namespace or table, and what was in it.

    Attributes
    ----------
    label:
        Place of an entry: a text with ``{}`` for its name.
    live:
        The mapping itself.
    before:
        A copy of it, with `_UNWATCHED` for what is not watched.
    ids:
        Of all that was in it.
    wanted:
        (name, value) -> whether a change of such an entry is a leak.
    bind, drop:
        Write an entry, and take one away.
    owner:
        The class whose namespace it is.
    """

    label: str
    live: Mapping[Any, Any]
    before: Mapping[Any, Any]
    ids: tuple[int, ...]
    wanted: Callable[[Any, Any], bool]
    bind: Callable[[Any, Any], None]
    drop: Callable[[Any], None]
    owner: type | None = None

    @staticmethod
    def of(
        label: str,
        live: Mapping[Any, Any],
        wanted: Callable[[Any, Any], bool],
        bind: Callable[[Any, Any], None],
        drop: Callable[[Any], None],
        owner: type | None = None,
    ) -> Space:
        """What is in `live` now."""
        before = {
            name: value if _is_constant(value) or wanted(name, value) else _UNWATCHED
            for name, value in list(live.items())
        }
        return Space(label, live, before, tuple(map(id, live.values())), wanted, bind, drop, owner)

    def again(self) -> Space:
        """What is in it now."""
        return Space.of(self.label, self.live, self.wanted, self.bind, self.drop, self.owner)

    def is_as_it_was(self) -> bool:
        return len(self.live) == len(self.ids) and all(
            map(operator.eq, map(id, self.live.values()), self.ids)
        )

    def leaks(self) -> Iterator[Leak]:
        now = dict(self.live)
        for name in dict.fromkeys([*self.before, *now]):
            old, new = self.before.get(name, ABSENT), now.get(name, ABSENT)
            was = old is not ABSENT and old is not _UNWATCHED and self.wanted(name, old)
            if old is new or not (was or (new is not ABSENT and self.wanted(name, new))):
                continue
            place = self.label.format(name)
            back = None if old is _UNWATCHED else functools.partial(self.bind, name, old)
            if old is ABSENT:
                inert = self.owner is not None and _inherited(self.owner, name) is new
                yield Leak(place, "added", text_of(new), functools.partial(self.drop, name), new, inert)
            elif new is ABSENT:
                yield Leak(place, "removed", text_of(old), back)
            elif not same(old, new):
                what = "something else" if old is _UNWATCHED else text_of(old)
                yield Leak(place, "changed", f"{what} to {text_of(new)}", back, new)


@dataclass(frozen=True)
class Group:
    """The spaces of one module, and what was in all of them: most stay as they are, which one look shows.

    Attributes
    ----------
    sizes:
        Of each space.
    values:
        All that was in them, with a `_Place` for what may hold a model: compared in a third of the time.
    """

    spaces: tuple[Space, ...]
    lives: tuple[Mapping[Any, Any], ...]
    sizes: tuple[int, ...]
    values: list[Any]

    @functools.cached_property
    def functions(self) -> list[tuple[str, types.FunctionType]]:
        """Those that models run through, by their place."""
        module = self.module
        if not _is_of_models(module):
            return []
        return [
            (space.label.format(name), function)
            for space in self.spaces
            for name, value in list(space.live.items())
            for function in _functions_of(value)
            if space.owner is not None or function.__module__ == module
        ]

    @property
    def containers(self) -> Iterator[tuple[str, Any]]:
        """Lists, sets and dicts of constants of classes of models, by their place."""
        if _is_of_models(self.module):
            for space in self.spaces:
                for name in self._names.get(space.label, ()) if space.owner is not None else ():
                    value = space.live.get(name)
                    if plain_container(value):
                        yield space.label.format(name), value

    @functools.cached_property
    def _names(self) -> dict[str, list[str]]:
        """Of each class, which of its attributes are containers."""
        return {
            space.label: [
                name
                for name, value in list(space.live.items())
                if type(value) in (list, dict, set) and name not in _LAZY
            ]
            for space in self.spaces
            if space.owner is not None
        }

    @property
    def module(self) -> str:
        return self.spaces[0].label.removesuffix(".{}")

    @staticmethod
    def of(spaces: Sequence[Space]) -> Group:
        lives = tuple(space.live for space in spaces)
        values = [
            value if id(value) == known and isinstance(value, _HARMLESS) else _Place(known)
            for space in spaces
            for value, known in zip([*space.live.values()], space.ids, strict=False)
        ]
        return Group(tuple(spaces), lives, tuple(len(space.ids) for space in spaces), values)

    @staticmethod
    def of_all(groups: Sequence[Group]) -> Group:
        """All that is in `groups`, to be compared at once; it has no spaces of its own."""
        every = itertools.chain.from_iterable
        lives = tuple(every(group.lives for group in groups))
        sizes = tuple(every(group.sizes for group in groups))
        return Group((), lives, sizes, [*every(group.values for group in groups)])

    def is_as_it_was(self) -> bool:
        if tuple(map(len, self.lives)) != self.sizes:
            return False
        try:
            return self.values == [*itertools.chain.from_iterable(map(_VALUES, self.lives))]
        except Exception:  # what is there now does not compare
            return False


class _Place:
    """Stands for an object that is not kept: equal to what is where it was."""

    __slots__ = ("_id",)

    def __init__(self, known: int) -> None:
        self._id = known

    def __eq__(self, other: object) -> bool:
        return id(other) == self._id

    __hash__ = None  # type: ignore[assignment]


_VALUES = operator.methodcaller("values")

#: Each is equal to itself alone, or as good as the other; a container is held until it is looked for again.
_HARMLESS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, ModuleType),
    *(type, staticmethod, classmethod, property, bool, int, float, str, bytes, type(None), torch.dtype),
    *(dict, list, tuple, set, frozenset, functools._lru_cache_wrapper, functools.cached_property),
    *(TypeVar, ParamSpec, logging.Logger, ModuleSpec, SourceFileLoader),
    # What Python and its extensions put into classes and modules by the hundred, and what annotations are.
    *(
        types.UnionType,
        types.GenericAlias,
        type(ClassVar),
        type(annotations),
        type(ABC.__dict__["_abc_impl"]),
    ),
    type(vars(Leak)["__dataclass_params__"]),
    type(vars(namedtuple("namedtuple", "field"))["field"]),
    *{
        type(value)
        for value in vars(torch._C.DispatchKeySet).values()
        if type(value).__name__ == "instancemethod"
    },
)


def _inherited(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)


def same(before: Any, after: Any) -> bool:
    return before is after or (type(before) is type(after) and _is_plain(before) and bool(before == after))


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_plain(value: Any) -> bool:
    """Whether equality says everything: constants, and containers of them."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device))


def text_of(value: Any) -> str:
    if callable(value) and not isinstance(value, torch.nn.Module):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}".lstrip(".")
    return type(value).__name__ if not isinstance(value, (bool, int, str)) else repr(value)


#: Module of a library -> what was remembered of it last: most stay as they are, and need not be copied again.
_KNOWN: dict[str, Group] = {}


def group_of_module(name: str, module: object, keep: bool) -> Group | None:
    """`keep`: remember what is found; not of a user's modules, which may hold models."""
    if not isinstance(module, ModuleType):
        return None
    known = _KNOWN.get(name) if keep else None
    if known is not None and known.lives[0] is vars(module):
        if known.is_as_it_was():
            return known
        if known.spaces[0].is_as_it_was():
            # The names of the module, and so its classes and tables, are the same.
            spaces = [space if space.is_as_it_was() else space.again() for space in known.spaces]
            known = _KNOWN[name] = Group.of(spaces)
            return known
    found = Group.of(list(_looked_for(name, vars(module))))
    if keep:
        _KNOWN[name] = found
    return found


@dataclass(frozen=True)
class Library:
    """The groups of all modules of libraries. Those that never changed are compared at once: that is quicker.

    Attributes
    ----------
    modules:
        The modules, by name.
    still:
        All that is in the modules that never changed.
    moving:
        The groups of those that did: torch counts in some.
    """

    modules: dict[str, Any]
    groups: tuple[Group, ...]
    still: Group
    moving: tuple[Group, ...]

    def candidates(self) -> tuple[Group, ...]:
        """The groups that may have changed."""
        return self.moving if self.still.is_as_it_was() else self.groups


_libraries: list[Library] = []

#: Names of modules that changed once.
_MOVING: set[str] = set()


def library_of_modules(names: Sequence[str]) -> Library:
    """The groups of modules of libraries."""
    modules = {name: sys.modules.get(name) for name in names}
    known = _libraries[0] if _libraries and _libraries[0].modules == modules else None
    if known is not None and known.still.is_as_it_was():
        moving = tuple(_groups(modules, [group.module for group in known.moving]))
        now = {group.module: group for group in moving}
        groups = tuple(now.get(group.module, group) for group in known.groups) if now else known.groups
        found = Library(modules, groups, known.still, moving)
    else:
        groups = tuple(_groups(modules, names))
        if known is not None:
            before = {group.module: group for group in known.groups}
            _MOVING.update(group.module for group in groups if before.get(group.module) is not group)
        still = Group.of_all([group for group in groups if group.module not in _MOVING])
        moving = tuple(group for group in groups if group.module in _MOVING)
        found = Library(modules, groups, still, moving)
    _libraries[:] = [found]
    return found


def _groups(modules: Mapping[str, object], names: Sequence[str]) -> Iterator[Group]:
    return (group for name in names if (group := group_of_module(name, modules[name], keep=True)))


def _is_of_models(module: str) -> bool:
    top = module.partition(".")[0]
    return top != "torch" or module.startswith(_OF_MODELS)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions_of(part)
    elif isinstance(value, types.FunctionType):
        yield value


def _looked_for(name: str, live: dict[str, Any]) -> Iterator[Space]:
    held = dict(live)
    yield Space.of(f"{name}.{{}}", live, _in_a_module, live.__setitem__, live.__delitem__)
    for cls in dict.fromkeys(
        value for value in held.values() if isinstance(value, type) and value.__module__ == name
    ):
        names = vars(cls)
        yield Space.of(
            f"{name}.{cls.__qualname__}.{{}}",
            names,
            _in_a_class_of_models if _is_of_models(name) else _in_a_class,
            functools.partial(setattr, cls),
            functools.partial(delattr, cls),
            cls,
        )
    for key, value in held.items():
        if isinstance(key, str) and key.isupper() and not isinstance(value, type):
            for table in _tables(value):
                label = f"{name}.{key}[{{!r}}]"
                plain = type(table) is dict
                read: Mapping[Any, Any] = table if plain else _Raw(table)
                wanted = _in_a_table if plain else _in_a_table_of_classes
                yield Space.of(label, read, wanted, table.__setitem__, table.__delitem__)
    if name == "torch.nn.modules.module":  # hooks of all modules, by number
        for key, table in held.items():
            if key.startswith("_global_") and isinstance(table, dict):
                label = f"{name}.{key}[{{!r}}]"
                yield Space.of(label, table, _in_a_module, table.__setitem__, table.__delitem__)


def _in_a_module(name: Any, value: Any) -> bool:
    return _is_function(value)


def _in_a_class(name: Any, value: Any) -> bool:
    return name not in _LAZY and (
        _is_function(value) or isinstance(value, (staticmethod, classmethod, property))
    )


def _in_a_class_of_models(name: Any, value: Any) -> bool:
    """Flags and lists too."""
    if _in_a_class(name, value):
        return True
    return not name.startswith("__") and (_is_constant(value) or type(value) in (list, dict, set, tuple))


def _in_a_table(name: Any, value: Any) -> bool:
    return isinstance(name, str) and _is_function(value)


def _in_a_table_of_classes(name: Any, value: Any) -> bool:
    """A class, by itself or with arguments."""
    first = value[0] if isinstance(value, tuple) and value else value
    return _in_a_table(name, value) or isinstance(first, type)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, ModuleType, torch.nn.Module))


def _tables(value: Any) -> list[dict[Any, Any]]:
    """A dict, or those of a registry of transformers (``ALL_ATTENTION_FUNCTIONS``)."""
    if type(value) is dict:
        return [value]
    kind = type(value)
    own = ("__iter__", "__len__", "__setitem__", "__delitem__", "keys")
    if isinstance(value, OrderedDict) and all(
        getattr(kind, name) is getattr(OrderedDict, name) for name in own
    ):
        return [value]
    names = ("_global_mapping", "_local_mapping") if hasattr(type(value), "register") else ()
    return [table for name in names if type(table := getattr(value, name, None)) is dict]


def spaces_of_model(model: torch.nn.Module) -> Iterator[Space]:
    for path, part in model.named_modules():
        where = f"vars({path or 'model'})".replace("{", "{{").replace("}", "}}")
        held = vars(part)
        yield Space.of(
            f"{where} {{}}",
            held,
            lambda name, value: not isinstance(value, dict),
            held.__setitem__,
            held.__delitem__,
        )
        for key, value in held.items():
            # Modules, parameters, buffers and hooks are dicts: their entries, not the dicts.
            if isinstance(value, dict):
                label = f"{where} {key}[{{!r}}]"
                yield Space.of(label, value, lambda name, item: True, value.__setitem__, value.__delitem__)
