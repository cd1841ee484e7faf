"""What live objects hold, as a digest that another process finds again: values, classes, code, closures.

Two objects with the same digest behave the same while a model is captured. What cannot be read completely
has no digest: `Unreadable` says what it is and where, and nothing is reused.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import hashlib
import inspect
import linecache
import logging
import os
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .asking import ASKS, OPAQUE, OUTSIDE, imports_of
from .codes import code_digest
from .instances import attributes_of, state_of_instance
from .origins import is_genuine, is_installed_function, is_known, is_own

__all__ = ["SILENT", "Content", "Unreadable", "file_digest"]

#: A file next to a spec is imported under a name with a digest of its path.
_FILE_MODULE = re.compile(r"\b_exportcheck_(\w+)_[0-9a-f]{12}\b")

#: Through which the patches in place are called (`patches.engine`): it counts, and the count says nothing.
_COUNTED = "_counted.<locals>.patched"

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented))
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)
#: Of a parameter that strict mode has captured once: it tells compilers that its address stays, no capture.
_READ_BY_DYNAMO = "_dynamo_static_input_type"

_BUILTIN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)
#: Entries of a class's namespace that say nothing, or are filled lazily.
SILENT = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__"),
    *(
        "__firstlineno__",
        "__static_attributes__",
        "__annotations_cache__",
        "__abstractmethods__",
        "_abc_impl",
    ),
    *("__parameters__", "__slotnames__"),
}


class Unreadable(Exception):
    """The text says what has no digest and where it was met."""


def file_digest(filename: str) -> str:
    """Of the bytes of a source file; of the lines that Python has of code without a file."""
    try:
        with open(filename, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        lines = linecache.getlines(filename)
        if not lines:
            raise Unreadable(f"{filename}: its source is not there") from None
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class Content:
    """Writes objects down as tokens and keeps a digest of them.

    Attributes
    ----------
    mentions_environment:
        Code of the user's that was met reads environment variables.
    modules:
        Names of the installed modules whose functions and classes were met, and of those met themselves.
    files:
        Those that the code of others that was met is in.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        #: Position of each object met, and the object, so that no other gets its identity.
        self._met: dict[int, tuple[int, Any]] = {}
        self._path: list[str] = []
        self._storages: dict[int, int] = {}
        self.files: set[str] = set()
        self.mentions_environment = False
        self.modules: set[str] = set()

    def hexdigest(self) -> str:
        """Of everything added so far, and of the files that the code is in."""
        digest = self._digest.copy()
        for filename in sorted(self.files):
            digest.update(file_digest(filename).encode())
        return digest.hexdigest()

    def add(self, label: str, value: Any) -> None:
        """Add an object; raises `Unreadable`."""
        self._path.append(label)
        try:
            self._token(label)
            self._value(value)
        except Unreadable:
            raise
        except RecursionError:
            raise Unreadable(f"{self._where()} is nested too deeply") from None
        except Exception as error:
            raise Unreadable(f"{self._where()} cannot be read: {type(error).__name__}: {error}") from error
        finally:
            self._path.pop()

    def _token(self, *parts: Any) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "backslashreplace")
            self._digest.update(b"%d:" % len(data) + data)

    def _where(self) -> str:
        return ".".join([*self._path[:2], "...", *self._path[-3:]] if len(self._path) > 6 else self._path)

    def _refuse(self, value: Any) -> Unreadable:
        kind = value if isinstance(value, type) else type(value)
        return Unreadable(f"{self._where()} holds a {kind.__module__}.{kind.__qualname__}")

    def _inner(self, label: Any, value: Any) -> None:
        self._path.append(str(label))
        self._value(value)
        self._path.pop()

    def _value(self, value: Any) -> None:
        if type(value) in _CONSTANTS:
            self._token(type(value).__name__, repr(value))
            return
        if isinstance(value, _TORCH_CONSTANTS):
            self._token("torch", repr(value))
            return
        if type(value) in (tuple, frozenset, torch.Size):
            self._object(value)  # Whether two of them are one object says nothing.
            return
        known = self._met.get(id(value))
        if known is not None:
            self._token("met", known[0])
            return
        self._met[id(value)] = (len(self._met), value)
        self._object(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._token("method")
            self._inner("__func__", value.__func__)
            self._inner("__self__", value.__self__)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, _BUILTIN):
            self._builtin(value)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._token("operator", value)
        elif isinstance(value, enum.Enum):
            self._token("enum", value.name)
            self._inner("class", type(value))
            self._inner("value", value.value)
        elif isinstance(value, (np.ndarray, np.generic)):
            if value.dtype.hasobject:
                raise self._refuse(value)
            self._token("numpy", value.dtype, np.shape(value), np.ascontiguousarray(value).tobytes())
        elif isinstance(value, torch.Generator):
            self._token("generator", value.device, value.get_state().numpy().tobytes())
        elif not self._of_standard_library(value):
            self._instance(value)

    def _tensor(self, value: torch.Tensor) -> None:
        plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if type(value) not in plain or value.layout is not torch.strided or value.is_quantized:
            raise self._refuse(value)
        self._token("tensor", type(value).__name__, value.dtype, tuple(value.shape), value.stride())
        self._token(value.device, value.requires_grad, value.is_conj(), value.is_neg())
        if value.is_meta:
            raise self._refuse(value)
        # Two that lie in the same memory are written to together.
        if value.device.type == "cpu":
            self._token(self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages)))
            self._token(value.storage_offset())
        if value.numel():
            flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            data: Any = flat.view(torch.uint8).numpy()
            self._digest.update(hashlib.sha256(data).digest())
        if attributes := {name: item for name, item in vars(value).items() if name != _READ_BY_DYNAMO}:
            self._inner("__dict__", attributes)
        hooks = getattr(value, "_backward_hooks", None)
        if hooks:
            self._inner("hooks", hooks)

    def _items(self, kind: str, items: Any) -> None:
        self._token(kind, len(items))
        for position, item in enumerate(items):
            self._inner(position, item)

    def _mapping(self, kind: str, value: Mapping[Any, Any]) -> None:
        self._token(kind, len(value))
        for key, item in value.items():
            self._inner(f"[{key!r:.40}]", key)
            self._inner(key if isinstance(key, str) else f"[{key!r:.40}]", item)

    def _unordered(self, value: Any) -> None:
        """Of a set: its elements in the order of their own digests."""
        found = []
        for item in value:
            part = Content()
            part.add("element", item)
            self.mentions_environment |= part.mentions_environment
            self.modules |= part.modules
            self.files |= part.files
            found.append(part.hexdigest())
        self._token("set", *sorted(found))

    def _of_standard_library(self, value: Any) -> bool:
        """Add `value` if it is of a type that is read in its own way."""
        kind = type(value)
        if kind in (list, tuple, torch.Size, collections.deque):
            self._items(kind.__name__, value)
        elif kind in (dict, collections.OrderedDict, types.MappingProxyType):
            self._mapping(kind.__name__, value)
        elif kind is collections.defaultdict:
            self._inner("default_factory", value.default_factory)
            self._mapping("defaultdict", value)
        elif kind in (set, frozenset):
            self._unordered(value)
        elif kind in (staticmethod, classmethod):
            self._token(kind.__name__)
            self._inner("__func__", value.__func__)
        elif kind is property:
            self._token("property")
            for name in ("fget", "fset", "fdel"):
                self._inner(name, getattr(value, name))
        elif isinstance(value, functools.partial):
            self._token("partial")
            self._inner("func", value.func)
            self._inner("args", value.args)
            self._inner("keywords", value.keywords)
        elif kind is types.CellType:
            self._token("cell")
            try:
                contents = value.cell_contents
            except ValueError:
                self._token("empty")
            else:
                self._inner("cell", contents)
        elif kind is slice or kind is range:
            self._token(kind.__name__, repr(value))
        elif kind is re.Pattern:
            self._token("pattern", repr(value.pattern), value.flags)
        elif isinstance(value, pathlib.PurePath):
            self._token("path", value)
        elif isinstance(value, logging.Logger):
            self._token("logger", value.name)
        elif kind is weakref.ReferenceType:
            self._token("reference")
            self._inner("()", value())
        elif kind in (types.GenericAlias, types.UnionType) or kind.__module__ == "typing":
            self._token("typing", _FILE_MODULE.sub(r"\1", repr(value)))
        elif kind is functools._lru_cache_wrapper:
            self._token("cached")
            self._inner("__wrapped__", value.__wrapped__)
        elif kind.__name__ in ("lock", "RLock") and kind.__module__ == "_thread":
            self._token("lock")
        elif kind is inspect.Signature:
            self._token("signature", value)
        else:
            return False
        return True

    def _instance(self, value: Any) -> None:
        kind = type(value)
        if value is os.environ or value is os.environb:
            self.mentions_environment = True
            return
        state = state_of_instance(value)
        if state is None:
            raise self._refuse(value)
        self._token("instance")
        self._inner("class", kind)
        # Subclasses of containers hold both.
        if isinstance(value, (list, tuple, collections.deque)):
            self._items("items", list(value))
        elif isinstance(value, dict):
            self._mapping("items", dict(value))
        elif isinstance(value, (set, frozenset)):
            self._unordered(value)
        elif isinstance(value, (int, float, complex, str, bytes)):
            for base in (int, float, complex, str, bytes):
                if isinstance(value, base):
                    self._token("base", base.__repr__(value))
        if isinstance(value, torch.nn.Module):
            # A hook is registered under a number that counts all hooks of the process.
            for name, hooks in state.items():
                if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and hooks:
                    state[name] = [*hooks.values()]
        self._mapping("state", state)

    def _class(self, value: type) -> None:
        name = _FILE_MODULE.sub(r"\1", f"{value.__module__}.{value.__qualname__}")
        self._token("class", name)
        if is_known(value.__module__):
            self.modules.add(value.__module__)
            # What its version does not tell: functions that were put into it.
            for cls in value.__mro__:
                if is_known(cls.__module__) and isinstance(cls, type):
                    self._foreign(cls)
            return
        for base in value.__bases__:
            self._inner("base", base)
        if type(value) is not type:
            self._inner("metaclass", type(value))
        namespace = {key: item for key, item in vars(value).items() if key not in SILENT}
        fields = namespace.pop("__dataclass_fields__", None)
        if fields is not None:
            missing = dataclasses.MISSING
            defaults = {
                key: [None if item is missing else item for item in (field.default, field.default_factory)]
                for key, field in fields.items()
            }
            self._inner("fields", defaults)
            namespace.pop("__dataclass_params__", None)
            namespace.pop("__match_args__", None)
        for key in list(namespace):
            if isinstance(namespace[key], (types.GetSetDescriptorType, types.MemberDescriptorType)):
                del namespace[key]
                self._token("slot", key)
        self._mapping("namespace", namespace)

    def _foreign(self, cls: type) -> None:
        for key, item in list(vars(cls).items()):
            if not is_genuine(item):
                self._token("foreign", key)
                self._inner(f"{cls.__qualname__}.{key}", item)
            elif type(item) is dict:
                # A table that others register functions in (`AttentionInterface._global_mapping`).
                for name, entry in list(item.items()):
                    if isinstance(name, str) and not is_genuine(entry):
                        self._token("foreign", key, name)
                        self._inner(f"{cls.__qualname__}.{key}[{name}]", entry)

    def _function(self, value: types.FunctionType) -> None:
        installed = is_installed_function(value)
        if value.__code__.co_qualname == _COUNTED and is_own(value.__code__.co_filename):
            self._token("patched")
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            self._inner("replacement", cells["function"])
            return
        replaced = value.__dict__.get("replaced", value)
        if replaced is not value and is_own(value.__code__.co_filename):
            # `flat_forward`: the arguments that it bakes in are told by themselves.
            self._inner("replaced", replaced)
            return
        code = value.__code__
        if installed:
            if value.__module__ == "os" and code.co_name in ("getenv", "getenvb"):
                self.mentions_environment = True
            elif code.co_name in ASKS:
                raise Unreadable(
                    f"{self._where()} is {code.co_name}: what it gives is known only when it runs"
                )
            self.modules.add(str(value.__globals__.get("__name__", "")))
            self._token("function", value.__module__, code.co_qualname, code.co_firstlineno)
            self._token(code_digest(code))
        else:
            self._token("function", code.co_qualname)
            self._code(code)
            self._globals(value)
        for name in ("__defaults__", "__kwdefaults__"):
            self._inner(name, getattr(value, name))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if name != "__class__":
                self._inner(name, cell)
        own = attributes_of(value)
        if installed:
            # Those are of decorators, which ran when the module was imported.
            own = {key: item for key, item in own.items() if not key.startswith("__")}
        if own:
            self._mapping("attributes", own)
        if "__wrapped__" in vars(value):
            self._inner("__wrapped__", vars(value)["__wrapped__"])

    def _code(self, code: types.CodeType) -> None:
        if not code.co_filename.startswith("<"):
            self.files.add(code.co_filename)
        self._token("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._token(code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount)
        self._token(code.co_exceptiontable, code.co_firstlineno)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif isinstance(constant, frozenset):
                self._unordered(constant)
            else:
                self._token(repr(constant))
        names = set(code.co_names)
        if names & {"environ", "getenv", "environb"}:
            self.mentions_environment = True

    def _globals(self, function: types.FunctionType) -> None:
        """What the code names of its module, and of what is built in."""
        namespace = function.__globals__
        names: set[str] = set()
        stack = [function.__code__]
        while stack:
            code = stack.pop()
            names.update(code.co_names)
            for name, wanted in imports_of(code, namespace):
                self._import(function, name, wanted)
            stack += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in sorted(names & ASKS):
            if not isinstance(namespace.get(name), types.FunctionType) or is_genuine(namespace[name]):
                raise Unreadable(
                    f"{function.__qualname__} asks for {name}: what that gives is known only when it runs"
                )
        for name in sorted(names):
            if name in namespace:
                self._inner(name, namespace[name])
            elif name in OPAQUE and hasattr(builtins, name):
                raise Unreadable(
                    f"{function.__qualname__} calls {name}(): what that gives is known only when it runs"
                )

    def _import(self, function: types.FunctionType, name: str, wanted: tuple[str, ...]) -> None:
        """A module that the code imports when it runs: it may not have run that line yet."""
        top = name.partition(".")[0]
        if top in OUTSIDE:
            raise Unreadable(f"{function.__qualname__} imports {name}: what it gives changes from run to run")
        if top in sys.stdlib_module_names or is_known(top):
            return
        parts = name.split(".")
        modules = [sys.modules.get(".".join(parts[: k + 1])) for k in range(len(parts))]
        last = modules[-1]
        if None in modules or any(not hasattr(last, item) for item in wanted if item != "*"):
            raise Unreadable(f"{function.__qualname__} imports {name}, which was not imported yet")
        for part in modules:
            self._inner(name, part)

    def _module(self, value: types.ModuleType) -> None:
        name = value.__name__
        self._token("module", _FILE_MODULE.sub(r"\1", name))
        if name.partition(".")[0] in OUTSIDE:
            raise Unreadable(f"{self._where()} is the module {name}: what it gives changes from run to run")
        if is_known(name):
            self.modules.add(name)
            return
        filename = getattr(value, "__file__", None)
        if filename is not None:
            self.files.add(filename)
        silent = {"__builtins__", "__cached__", "__file__", "__loader__", "__spec__", "__path__", "__doc__"}
        self._mapping("namespace", {key: item for key, item in vars(value).items() if key not in silent})

    def _builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        objclass = getattr(value, "__objclass__", None)
        self._token("builtin", getattr(value, "__module__", ""), value.__qualname__)
        top = str(getattr(value, "__module__", "") or "").partition(".")[0]
        if top in OUTSIDE or (value is builtins.open):
            raise Unreadable(
                f"{self._where()} is {value.__qualname__}: what it gives is known only when it runs"
            )
        if objclass is not None:
            self._token(objclass.__module__, objclass.__qualname__)
        elif owner is not None and not isinstance(owner, types.ModuleType):
            self._inner("__self__", owner)
