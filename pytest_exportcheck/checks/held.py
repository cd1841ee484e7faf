"""All that a model and the code of its classes hold: looked at when it is built, and again after calls.

Beside parameters, buffers, hooks and attributes of every submodule: attributes of their classes, what their
functions close over, have as defaults and as attributes, the globals of the files these are defined in, the
classes and modules that they name, and what `functools.lru_cache` keeps there.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import functools
import inspect
import os
import sys
import sysconfig
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..pytrees.cloning import is_wrapper
from .state import (
    GENERATOR,
    OWN_ATTRIBUTES,
    Held,
    differences,
    gradients_of,
    tensors_of,
    text_of,
    version_of,
)

__all__ = ["Place", "StateWatch", "contents_of", "is_lru_cache", "is_plain_object", "places_of"]

#: Tensors of at most so many elements are compared by value; of larger ones so many are looked at.
_LOOKED_AT = 4096

#: How deep containers and objects are followed.
_DEPTH = 5

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_COPIED = (
    *(dict, list, set, bytearray, array.array),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

#: Whose globals and class attributes say nothing about one model.
_LIBRARIES = frozenset({"torch", "transformers", "numpy", "pytest_exportcheck", *sys.stdlib_module_names})

#: Of installed packages the files of the model's classes are looked at, and not what they import.
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))

_LruCache = functools._lru_cache_wrapper


def _tensor_key(tensor: torch.Tensor) -> Any:
    facts = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return (*facts, id(tensor), version_of(tensor))
    # `.data` moves no version counter, and a new tensor may be where an old one was.
    flat = tensor.detach()
    for axis, size in enumerate(flat.shape):
        room = max(1, _LOOKED_AT * size // max(1, flat.numel()))
        if flat.numel() > _LOOKED_AT and size > room:
            flat = flat.index_select(axis, torch.arange(0, size, -(-size // room), device=flat.device))
    looked = flat.reshape(-1).cpu().contiguous().resolve_conj().resolve_neg()
    looked = torch.view_as_real(looked) if looked.is_complex() else looked
    value = zlib.crc32(looked.reshape(-1).view(torch.uint8).numpy().data) if looked.numel() else 0
    small = tensor.numel() <= _LOOKED_AT
    return (*facts, value, *(() if small else (tensor.data_ptr(), version_of(tensor))))


def _key(value: Any, depth: int = _DEPTH) -> Any:
    """Equal for what holds the same; what is neither container, tensor nor plain value by its identity."""
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if value is None or isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, _LruCache):
        return id(value), value.cache_info().misses
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.shape, str(value.dtype), zlib.crc32(value.tobytes())
    if isinstance(value, (bytearray, array.array)):
        return type(value), bytes(value)
    if not depth or isinstance(value, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
        return id(value)
    if isinstance(value, functools.partial):
        return id(value), _key((value.func, value.args, value.keywords), depth)
    if isinstance(value, types.MethodType):
        return id(value.__func__), _key(value.__self__, depth - 1)
    if isinstance(value, Mapping) and (type(value) in _COPIED or not _is_library(type(value).__module__)):
        return type(value), tuple((_key(key, 1), _key(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return type(value), tuple(_key(item, depth - 1) for item in value)
    contents = contents_of(value)
    return id(value) if contents is None else (id(value), _key(contents, depth - 1))


def _slots(kind: type) -> list[str]:
    """Names of the slots of a class that is no library's."""
    found = []
    for cls in kind.__mro__:
        slots = () if _is_library(cls.__module__) else vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            hidden = name.startswith("__") and not name.endswith("__")
            found.append(f"_{cls.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def contents_of(value: Any) -> dict[str, Any] | None:
    """What is in the dict and the slots of an object; ``None`` if it has neither."""
    slots = _slots(type(value))
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for name in slots:
        with contextlib.suppress(AttributeError):
            held[name] = object.__getattribute__(value, name)
    return held


def _is_library(module: object) -> bool:
    return str(module or "").partition(".")[0] in _LIBRARIES


def is_lru_cache(value: Any) -> bool:
    """Whether it is a function that `functools.lru_cache` made."""
    return isinstance(value, _LruCache)


def is_plain_object(value: Any) -> bool:
    """Whether all that an object holds is in its dict and slots, and its class is no library's."""
    kind = type(value)
    return (
        (hasattr(value, "__dict__") or bool(_slots(kind)))
        and not any("__new__" in vars(cls) for cls in kind.__mro__[:-1])
        and not _is_library(kind.__module__)
        and not isinstance(value, torch.nn.Module)
    )


def _copy(value: Any) -> Any:
    """A container or plain object that later additions do not reach."""
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(value.default_factory, {k: _copy(v) for k, v in value.items()})
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((k, _copy(v)) for k, v in value.items())
    if type(value) is list:
        return [_copy(item) for item in value]
    if type(value) is collections.deque:
        return collections.deque((_copy(item) for item in value), value.maxlen)
    if type(value) in (set, bytearray, array.array, collections.Counter):
        return copy.copy(value)
    if is_plain_object(value):
        twin = object.__new__(type(value))
        inside = vars(twin) if hasattr(twin, "__dict__") else {}
        for name, item in (contents_of(value) or {}).items():
            if name in _slots(type(value)):
                object.__setattr__(twin, name, _copy(item))
            else:
                inside[name] = _copy(item)
        return twin
    return value


def _is_state(value: Any) -> bool:
    """Whether a global or an attribute of a class is data, not code."""
    return (
        value is None
        or isinstance(value, (torch.Tensor, torch.Generator, *_PLAIN, _LruCache))
        # Of these alone: a mapping of transformers imports what it is asked for.
        or type(value) in (*_COPIED, tuple)
        or type(value).__module__ == "numpy"
        or is_plain_object(value)
    )


@dataclass(frozen=True)
class Place:
    """A namespace outside of the model.

    Attributes
    ----------
    label:
        With ``{}`` for a name: ``global `{}` of net.py``.
    names:
        What is in it now.
    """

    label: str
    names: Callable[[], Mapping[str, Any]]
    bind: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def held(self) -> dict[str, Any]:
        """The data in it, by label."""
        return {name: value for name, value in list(self.names().items()) if _counts(name, value)}


def _counts(name: str, value: Any) -> bool:
    return not (name.startswith("__") and name.endswith("__")) and _is_state(value)


def _chain(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a callable is made of: of decorators each, which may hold state of their own."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            value = value.func
            continue
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            yield value
        value = inspect.getattr_static(value, "__wrapped__", None)


def _functions(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        # Of properties and of `functools.cached_property`, too.
        for part in (
            value,
            *(inspect.getattr_static(value, name, None) for name in ("func", "fget", "fset")),
        ):
            yield from _chain(part)


def _names(code: types.CodeType) -> set[str]:
    """Names that a function and those inside it read as globals or attributes."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_installed(names: Mapping[str, Any]) -> bool:
    return str(names.get("__file__") or "").startswith(_INSTALLED)


def _is_own_class(value: Any) -> bool:
    """Whether `value` is a class of a file that is in no library and not installed."""
    if not isinstance(value, type) or _is_library(value.__module__):
        return False
    return not _is_installed(getattr(sys.modules.get(value.__module__), "__dict__", {}))


class _Places:
    """Finds the namespaces that the code of a model uses, by identity; those of libraries left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.found: dict[Any, Place] = {}
        self._classes: set[type] = set()
        self._functions: list[types.FunctionType] = []
        self._seen: set[int] = set()
        for part in module.modules():
            self._add_class(type(part))
            hooks = (hook for kind in _HOOKS for hook in vars(part)[kind].values())
            for value in (*vars(part).values(), *hooks):
                self._add(value)
                if _is_own_class(type(value)):
                    self._add_class(type(value))
        while self._functions:
            self._look_into(self._functions.pop())

    def _add(self, value: Any) -> None:
        self._functions += [each for each in _chain(value) if not _is_library(each.__module__)]

    def _add_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if each in self._classes:
                continue
            self._classes.add(each)
            own = [function for function in _functions(each) if not _is_library(function.__module__)]
            self._functions += own
            if own or not _is_library(each.__module__):
                bind, drop = functools.partial(setattr, each), functools.partial(delattr, each)
                label = f"class attribute `{each.__name__}.{{}}`"
                self.found[each] = Place(label, functools.partial(vars, each), bind, drop)

    def _look_into(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                place = self.found.setdefault(id(cell), _cell_place(name, cell))
                for value in place.names().values():
                    self._add(value)
        held = vars(function)
        label = f"attribute `{{}}` of function `{function.__qualname__}`"
        self.found[id(function), "attributes"] = Place(
            label, lambda: held, held.__setitem__, held.__delitem__
        )
        if function.__defaults__ or function.__kwdefaults__:
            self.found[id(function), "defaults"] = _defaults_place(function)
        names = function.__globals__
        self._add_globals(names)
        used = _names(function.__code__)
        # A class as a namespace, and a file beside that is imported as a whole.
        for value in [names[name] for name in used if name in names]:
            if _is_own_class(value):
                self._add_class(value)
            elif isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                inside = vars(value)
                if inside.get("__file__") and not _is_installed(inside):
                    self._add_globals(inside)
                    for each in [inside[name] for name in used if _is_own_class(inside.get(name))]:
                        self._add_class(each)

    def _add_globals(self, names: dict[str, Any]) -> None:
        if id(names) in self.found:
            return
        self.found[id(names)] = _globals_place(names)
        # Functions that are imported from a file beside: their state counts as well.
        for value in list(names.values()):
            if callable(value) and not isinstance(value, type):
                for each in _chain(value):
                    if not _is_library(each.__module__) and not _is_installed(each.__globals__):
                        self._functions.append(each)


def _defaults_place(function: types.FunctionType) -> Place:
    """The default values of arguments: a list or dict among them outlives the call."""

    def names() -> dict[str, Any]:
        values = function.__defaults__ or ()
        code = function.__code__
        positional = code.co_varnames[: code.co_argcount]
        return {
            **dict(zip(positional[len(positional) - len(values) :], values, strict=True)),
            **(function.__kwdefaults__ or {}),
        }

    def bind(name: str, value: Any) -> None:
        if name in (function.__kwdefaults__ or {}):
            function.__kwdefaults__[name] = value  # type: ignore[index]
            return
        now = names()
        now[name] = value
        keyword = function.__kwdefaults__ or {}
        function.__defaults__ = tuple(value for key, value in now.items() if key not in keyword)

    # An argument does not lose its default.
    return Place(f"default `{{}}` of function `{function.__qualname__}`", names, bind, lambda name: None)


def _globals_place(names: dict[str, Any]) -> Place:
    file = os.path.basename(str(names.get("__file__") or names.get("__name__", "?")))
    return Place(f"global `{{}}` of {file}", lambda: names, names.__setitem__, names.__delitem__)


def _cell_place(name: str, cell: types.CellType) -> Place:
    def names() -> dict[str, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:
            return {}  # not bound yet

    def bind(_: str, value: Any) -> None:
        cell.cell_contents = value

    def drop(_: str) -> None:
        del cell.cell_contents

    return Place("closure variable `{}`", names, bind, drop)


def places_of(module: torch.nn.Module) -> list[Place]:
    """The namespaces outside of a model that its code uses; those of libraries left out."""
    return list(_Places(module).found.values())


class StateWatch:
    """What a module and its code hold when this is made.

    A right model costs a walk over its attributes and a look at a few thousand elements of each weight.

    What is not seen: state of objects that a global holds and that have more than a dict and slots, in
    iterators, in modules of a plain list, and in files that the code of the model does not name.

    Parameters
    ----------
    earlier:
        One of another model of the same code, whose calls came before: the code counts as it was then.
    """

    def __init__(self, module: torch.nn.Module, earlier: StateWatch | None = None) -> None:
        self.module = module
        self._places = _Places(module).found
        # Alive, so that nothing new gets the identity of something old.
        self._tensors = dict(tensors_of(module))
        self._attributes = self._look()
        self._kept: dict[Any, dict[str, Any]] = {}
        self._code: dict[Any, dict[str, Held]] = {}
        for key, place in self._places.items():
            if earlier is not None and key in earlier._kept:
                self._kept[key], self._code[key] = earlier._kept[key], earlier._code[key]
            else:
                self._kept[key] = {name: _copy(value) for name, value in place.held().items()}
                self._code[key] = _look_at(place)

    def _look(self) -> dict[str, Held]:
        found = {}
        for label, tensor in (*tensors_of(self.module), *gradients_of(self.module)):
            found[label] = Held((id(tensor), _tensor_key(tensor)), text_of(tensor))
            for name, value in vars(tensor).items():
                found[f"attribute `{name}` of {label}"] = Held(_key(value), text_of(value))
        known: dict[int, Any] = {}
        for path, part in self.module.named_modules():
            found[f"module `{path}`"] = Held(id(part), type(part).__name__)
            found[f"mode of `{path}`"] = Held(part.training, "train" if part.training else "eval")
            for kind in _HOOKS:
                for number, hook in vars(part)[kind].items():
                    found[f"hook {number} of `{path}`"] = Held(_key(hook), text_of(hook))
            for name, value in vars(part).items():
                if name in OWN_ATTRIBUTES:
                    continue
                # One config belongs to all modules of a model.
                key = known[id(value)] if id(value) in known else known.setdefault(id(value), _key(value))
                found[f"attribute `{path}.{name}`" if path else f"attribute `{name}`"] = Held(
                    key, text_of(value)
                )
        return found

    def changes(self) -> dict[str, str]:
        """Label -> sentence, of all that is not as it was: ``attribute `first` changed from None to 0.5``."""
        found = differences(self._attributes, self._look())
        for key, place in self._places.items():
            found.update(differences(self._code[key], _look_at(place)))
        # Last: inputs are drawn from generators too, and a call that draws disagrees with itself.
        return dict(sorted(found.items(), key=lambda item: GENERATOR in item[1]))

    def unchanged_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that are the same objects, with the same values, as they were."""
        changed = differences(self._attributes, self._look())
        return {label: tensor for label, tensor in self._tensors.items() if label not in changed}

    def new_tensors(self) -> set[str]:
        """Labels of the parameters and buffers that were not there."""
        return {label for label, _ in tensors_of(self.module)} - self._tensors.keys()

    @contextlib.contextmanager
    def code_as_it_was(self) -> Iterator[None]:
        """Globals, class attributes and closures as they were; what is there now comes back afterwards.

        Caches of `functools.lru_cache` are emptied.
        """
        moved: list[tuple[Place, str, bool, Any]] = []
        for key, place in self._places.items():
            now, kept, changed = place.held(), self._kept[key], differences(self._code[key], _look_at(place))
            for name in dict.fromkeys([*kept, *now]):
                if place.label.format(name) not in changed:
                    continue
                if isinstance(now.get(name), _LruCache):
                    now[name].cache_clear()
                    continue
                # The name may hold what does not count now: an object in the place of a `None`.
                names = place.names()
                moved.append((place, name, name in names, names.get(name)))
                if name in kept:
                    place.bind(name, _copy(kept[name]))
                else:
                    place.drop(name)
        try:
            yield
        finally:
            for place, name, there, value in moved:
                if there:
                    place.bind(name, value)
                elif name in place.names():
                    place.drop(name)


def _look_at(place: Place) -> dict[str, Held]:
    return {
        place.label.format(name): Held(
            _key(value),
            f"{value.cache_info().currsize} results" if isinstance(value, _LruCache) else text_of(value),
        )
        for name, value in place.held().items()
    }
