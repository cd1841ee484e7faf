"""All that a model and the code of its classes hold: looked at when it is built, and again after calls.

Beside parameters, buffers and attributes of every submodule: attributes of their classes, what their methods
close over, the globals of the files these are defined in, and what `functools.lru_cache` keeps there.
"""

from __future__ import annotations

import collections
import contextlib
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
from .state import OWN_ATTRIBUTES, Held, differences, tensors_of, text_of, version_of

__all__ = ["StateWatch"]

#: Tensors of at most so many elements are compared by value; of larger ones so many are looked at.
_LOOKED_AT = 4096

#: How deep containers and objects are followed.
_DEPTH = 5

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_COPIED = (dict, list, set, collections.deque, collections.OrderedDict, collections.defaultdict)

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
    if not depth or isinstance(value, (type, types.ModuleType, types.FunctionType, torch.nn.Module)):
        return id(value)
    if isinstance(value, Mapping) and (type(value) in _COPIED or not _is_library(type(value).__module__)):
        return type(value), tuple((_key(key, 1), _key(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return type(value), tuple(_key(item, depth - 1) for item in value)
    if hasattr(value, "__dict__"):
        return id(value), _key(vars(value), depth - 1)
    return id(value)


def _is_library(module: object) -> bool:
    return str(module or "").partition(".")[0] in _LIBRARIES


def _is_plain_object(value: Any) -> bool:
    """Whether all that an object holds is in its dict, and its class is no library's."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
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
    if type(value) is set:
        return set(value)
    if _is_plain_object(value):
        twin = object.__new__(type(value))
        vars(twin).update((name, _copy(item)) for name, item in vars(value).items())
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
        or _is_plain_object(value)
    )


@dataclass(frozen=True)
class _Place:
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


def _functions(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        for part in (value, getattr(value, "func", None), getattr(value, "fget", None)):
            found = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
            if isinstance(found, types.FunctionType):
                yield found


def _places(module: torch.nn.Module) -> dict[Any, _Place]:
    """Namespaces of the code of the model's classes, by identity; those of libraries left out."""
    found: dict[Any, _Place] = {}
    functions: list[types.FunctionType] = []
    for cls in dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__):
        own = [function for function in _functions(cls) if not _is_library(function.__module__)]
        functions += own
        if own:
            bind, drop = functools.partial(setattr, cls), functools.partial(delattr, cls)
            found[cls] = _Place(
                f"class attribute `{cls.__name__}.{{}}`", functools.partial(vars, cls), bind, drop
            )
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                found.setdefault(id(cell), _cell_place(name, cell))
        names = function.__globals__
        if id(names) not in found:
            found[id(names)] = _globals_place(names)
            # Functions that are imported from a file beside: their state counts as well.
            called = [inspect.unwrap(value) for value in list(names.values()) if callable(value)]
            functions += [
                value
                for value in called
                if isinstance(value, types.FunctionType)
                and not _is_library(value.__module__)
                and not str(value.__globals__.get("__file__", "")).startswith(_INSTALLED)
            ]
    return found


def _globals_place(names: dict[str, Any]) -> _Place:
    file = os.path.basename(str(names.get("__file__") or names.get("__name__", "?")))
    return _Place(f"global `{{}}` of {file}", lambda: names, names.__setitem__, names.__delitem__)


def _cell_place(name: str, cell: types.CellType) -> _Place:
    def names() -> dict[str, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:
            return {}  # not bound yet

    def bind(_: str, value: Any) -> None:
        cell.cell_contents = value

    def drop(_: str) -> None:
        del cell.cell_contents

    return _Place("closure variable `{}`", names, bind, drop)


class StateWatch:
    """What a module and its code hold when this is made.

    A right model costs a walk over its attributes and a look at a few thousand elements of each weight.

    What is not seen: state of objects that a global holds and that have more than a dict, in modules of a
    plain list, and in files of which the code of the model uses no function.

    Parameters
    ----------
    earlier:
        One of another model of the same code, whose calls came before: the code counts as it was then.
    """

    def __init__(self, module: torch.nn.Module, earlier: StateWatch | None = None) -> None:
        self.module = module
        self._places = _places(module)
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
        found = {label: Held((id(t), _tensor_key(t)), text_of(t)) for label, t in tensors_of(self.module)}
        known: dict[int, Any] = {}
        for path, part in self.module.named_modules():
            found[f"module `{path}`"] = Held(id(part), type(part).__name__)
            found[f"mode of `{path}`"] = Held(part.training, "train" if part.training else "eval")
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
        return found

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
        moved: list[tuple[_Place, str, bool, Any]] = []
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


def _look_at(place: _Place) -> dict[str, Held]:
    return {
        place.label.format(name): Held(
            _key(value),
            f"{value.cache_info().currsize} results" if isinstance(value, _LruCache) else text_of(value),
        )
        for name, value in place.held().items()
    }
