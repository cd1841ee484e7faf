"""What installed modules hold, which their files do not tell: names, classes, tables, functions as they are.

A version says what was installed, not what was done to it while the process ran: a function under another's
name, other code, defaults, attributes or closure contents of a function that stayed where it was, an entry of
a table, a list of a class. All of it is written down as text that another process finds again. A module is
walked again only if something in it is not the object that it was.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .codes import code_digest
from .content import SILENT
from .instances import attributes_of
from .origins import is_genuine, is_own

__all__ = ["Strangers", "state_of"]

#: Place -> function, class or object of somebody else's, or a tensor: its content has to tell what it does.
Strangers = dict[str, Any]

#: Constants that are made anew in every process.
_OF_A_PROCESS = {"transformers.utils.hub.SESSION_ID"}

#: What dynamo puts around two functions of `torch.nn.Module`, once in a process, to mark modules that are
#: made inside a forward: a run with captures of strict mode has it, one that finds them in a cache has not.
_MARKING = {
    "install_generation_tagging_init.<locals>.patched_init": "init",
    "install_generation_tagging_init.<locals>.patched_setstate": "setstate",
}
_MARKED = "___needs_generation_tag_patch"

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, set, frozenset, dict)

_ITERATORS = {kind.__iter__ for kind in _CONTAINERS}

#: What is held on to until the module is walked again, so that nothing else gets its address. Other objects
#: may hold a model: of them the type is told, and compared.
_HELD = (
    *(*_PLAIN, *_TORCH, *_CONTAINERS, type, enum.Enum, property, staticmethod, classmethod),
    *(types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.CellType, types.ModuleType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, functools._lru_cache_wrapper),
)

#: Of a function, what may become another object: its closure cannot.
_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_VALUES = operator.methodcaller("values")
_CONTENTS = operator.attrgetter("cell_contents")


@dataclass
class _Walk:
    """One reading of a module, and all that it went through.

    Attributes
    ----------
    spaces, tables, functions, cells, lists:
        Met: namespaces of modules and classes, dicts, functions, filled closure cells, other containers.
    strangers:
        As `state_of` returns them.
    lasting:
        Nothing was met that may hold a model: patches do.
    """

    spaces: list[Mapping[Any, Any]] = field(default_factory=list)
    tables: list[dict[Any, Any]] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)
    lists: list[Any] = field(default_factory=list)
    strangers: Strangers = field(default_factory=dict)
    lasting: bool = True
    _inside: set[int] = field(default_factory=set)

    def entries(self, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
        """(name, what it stands for) in order."""
        name = module.__name__
        self.spaces.append(vars(module))
        for key, value in sorted(vars(module).items()):
            if key.startswith("__") or f"{name}.{key}" in _OF_A_PROCESS:
                continue
            if isinstance(value, types.ModuleType) and value is sys.modules.get(f"{name}.{key}"):
                continue  # A submodule is there once anything has imported it.
            yield key, self.described(value, key)
            if isinstance(value, type) and value.__module__ == name:
                self.spaces.append(vars(value))
                for inner, item in sorted(vars(value).items()):
                    if inner not in SILENT and inner != _MARKED:
                        yield f"{key}.{inner}", self.described(item, f"{key}.{inner}")

    def described(self, value: Any, place: str) -> Any:
        """Constants by value, containers by what is in them, functions by all that they run with; of other
        objects the type.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, type):
            if not is_genuine(value):
                self.strangers[place] = value
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, _TORCH):
            return str(value)
        if id(value) in self._inside:
            return "..."
        self._inside.add(id(value))
        try:
            return self._compound(value, place)
        finally:
            self._inside.discard(id(value))

    def _compound(self, value: Any, place: str) -> Any:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if not is_genuine(kind) and not isinstance(value, types.ModuleType):
            # Of somebody else's class: what it does depends on what it holds.
            self.strangers[place] = value
            return f"a {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, (staticmethod, classmethod)):
            return kind.__name__, self.described(value.__func__, place)
        if isinstance(value, property):
            return "property", self._each((value.fget, value.fset, value.fdel), place)
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.MethodType):
            return "method", self._each((value.__func__, value.__self__), place)
        if isinstance(value, (functools.partial, functools.partialmethod)):
            return "partial", self._each((value.func, value.args, value.keywords), place)
        if isinstance(value, functools._lru_cache_wrapper):
            return "cached", self.described(value.__wrapped__, place)
        if isinstance(value, functools.cached_property):
            return "cached property", self.described(value.func, place)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, enum.Enum):
            return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
        if isinstance(value, dict):
            return self._table(value, place)
        if isinstance(value, _CONTAINERS) and kind.__iter__ in _ITERATORS:
            self.lists.append(value)
            if isinstance(value, (set, frozenset)):
                items = self._each((item for item in value if not isinstance(item, type)), place)
                return kind.__name__, sorted(map(repr, items))
            return kind.__name__, self._each(value, place)
        if hasattr(kind, "register") and "_global_mapping" in vars(kind):
            # The functions of attention and masks that transformers has by name (`GeneralInterface`).
            tables = vars(kind)["_global_mapping"], vars(value).get("_local_mapping")
            return kind.__qualname__, self._each(tables, place)
        if kind is types.SimpleNamespace:
            return "namespace", self._table(vars(value), place)
        if kind in (torch.Tensor, torch.nn.Parameter):
            self.strangers[place] = value
        return f"a {kind.__module__}.{kind.__qualname__}"

    def _each(self, items: Iterable[Any], place: str) -> list[Any]:
        return [self.described(item, f"{place}[{k}]") for k, item in enumerate(items)]

    def _table(self, table: dict[Any, Any], place: str) -> Any:
        # Its own methods may make something of the entries (`transformers.activations.ACT2FN`).
        self.tables.append(table)
        # What is said of classes, here and in sets, was put there as the process met them: in another order,
        # and other ones, in another run.
        found = [
            (self.described(key, place), self.described(item, f"{place}[{key!r:.40}]"))
            for key, item in dict.items(table)
            if not (isinstance(key, type) or (isinstance(key, str) and key.startswith("<class ")))
        ]
        return type(table).__name__, sorted(found, key=repr)

    def _function(self, function: types.FunctionType, place: str) -> Any:
        code, defaults, keywords, attributes = _PARTS(function)
        if not is_genuine(function):
            self.strangers[place] = function
            return f"{function.__module__}.{code.co_qualname}"
        if is_own(code.co_filename):
            # What a patch in place does is told by the patch.
            self.lasting = False
            return f"{function.__module__}.{code.co_qualname}:{code.co_firstlineno}"
        marked = _MARKING.get(function.__qualname__)
        if marked in code.co_freevars and function.__module__ == "torch._dynamo.mutation_guard":
            cell = (function.__closure__ or ())[code.co_freevars.index(str(marked))]
            return self.described(cell.cell_contents, place)
        self.functions.append(function)
        found: list[Any] = [
            f"{function.__module__}.{code.co_qualname}:{code.co_firstlineno}",
            code_digest(code),
        ]
        if defaults or keywords:
            found.append(self._each((defaults, keywords), f"{place} defaults"))
        if attributes:
            self.tables.append(attributes)
            own = sorted(attributes_of(function).items())
            found += [(name, self.described(value, f"{place}.{name}")) for name, value in own]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__":
                continue
            try:
                contents = cell.cell_contents
            except ValueError:
                found.append("empty")
                continue
            self.cells.append(cell)
            found.append(self.described(contents, f"{place} {name}"))
        return found


class _Stamp:
    """All that a walk went through, to be compared by identity."""

    def __init__(self, walk: _Walk) -> None:
        # A function is met under each of its names.
        walk.functions, walk.cells = _once(walk.functions), _once(walk.cells)
        walk.tables, walk.lists = _once(walk.tables), _once(walk.lists)
        self._walk = walk
        self._attributes = [function.__dict__ for function in walk.functions]
        self.of = walk.spaces[0]
        values = self._values()
        self._sizes = self._lengths()
        self._ids = [*map(id, values)]
        self._loose = [(k, type(value)) for k, value in enumerate(values) if not isinstance(value, _HELD)]
        loose = {k for k, _ in self._loose}
        self._held = [value for k, value in enumerate(values) if k not in loose]

    def is_current(self) -> bool:
        try:
            values = self._values()
        except ValueError:  # a cell that is empty now
            return False
        return (
            [*map(id, values)] == self._ids
            and self._lengths() == self._sizes
            and all(type(values[k]) is kind for k, kind in self._loose)
        )

    def _lengths(self) -> list[int]:
        walk = self._walk
        return [
            *(*map(len, walk.spaces), *map(dict.__len__, walk.tables), *map(len, walk.lists)),
            *map(len, self._attributes),
        ]

    def _values(self) -> list[Any]:
        walk, every = self._walk, itertools.chain.from_iterable
        return [
            *every(walk.spaces),
            *every(map(_VALUES, walk.spaces)),
            *every(map(dict.keys, walk.tables)),
            *every(map(dict.values, walk.tables)),
            *every(map(_PARTS, walk.functions)),
            *map(_CONTENTS, walk.cells),
            *every(walk.lists),
        ]


def _once(items: list[Any]) -> list[Any]:
    return [*{id(item): item for item in items}.values()]


#: Name of a module -> what was read of it last.
_read: dict[str, tuple[_Stamp, str]] = {}


def state_of(module: types.ModuleType) -> tuple[str, Strangers]:
    """(digest of what an installed module holds, functions and classes of others in it by their place)."""
    known = _read.get(module.__name__)
    if known is None or known[0].of is not vars(module) or not known[0].is_current():
        walk = _Walk()
        text = repr([*walk.entries(module)])
        digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        _read.pop(module.__name__, None)
        if walk.strangers or not walk.lasting:
            return digest, walk.strangers
        known = _read[module.__name__] = _Stamp(walk), digest
    return known[1], {}
