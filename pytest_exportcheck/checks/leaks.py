"""What an export left behind in the process: changed functions, registrations, attributes of the model.

`snapshot` before, `difference` after. Functions of loaded classes and modules of torch and transformers (and
of packages named by the caller) are compared by identity, registries by their keys and values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree

__all__ = ["Leak", "Snapshot", "difference", "snapshot"]

#: Attributes that Python and torch themselves fill lazily.
_LAZY = ("__dict__", "__weakref__", "__annotations__", "__annotations_cache__", "_abc_impl")


@dataclass(frozen=True)
class Leak:
    """One thing that is not as it was.

    Attributes
    ----------
    place:
        ``transformers.cache_utils.DynamicLayer.update``, ``pytree node ...``, ``vars(model) forward``.
    change:
        ``changed``, ``added`` or ``removed``.
    """

    place: str
    change: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.place} was {self.change}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Snapshot:
    """What `snapshot` saw: place -> value; the modules that it watched, and all that were loaded then."""

    values: Mapping[str, Any]
    modules: frozenset[str]
    packages: tuple[str, ...]
    models: tuple[torch.nn.Module, ...] = field(default=())
    loaded: frozenset[str] = frozenset()


def snapshot(
    *models: torch.nn.Module, packages: Sequence[str] = ("torch", "transformers"), modules: Sequence[str] = ()
) -> Snapshot:
    """Remember the functions, registries and attributes that an export may change.

    Parameters
    ----------
    models:
        Their attributes, and those of their submodules, are watched too.
    packages:
        Whose loaded modules are watched.
    modules:
        Further modules by name, such as the one that a model is defined in.
    """
    names = frozenset(
        name
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name.partition(".")[0] in packages or name in modules)
    )
    loaded = frozenset(sys.modules)
    return Snapshot(_quietly(names, models, loaded), names, tuple(packages), models, loaded)


def difference(before: Snapshot) -> list[Leak]:
    """What has changed since `before`, sorted by place. Modules imported meanwhile are no leak."""
    after = _quietly(before.modules, before.models, before.loaded)
    leaks = []
    for place in before.values.keys() | after.keys():
        if place not in after:
            leaks.append(Leak(place, "removed", _text(before.values[place])))
        elif place not in before.values:
            leaks.append(Leak(place, "added", _text(after[place])))
        elif not _same(before.values[place], after[place]):
            leaks.append(Leak(place, "changed", f"{_text(before.values[place])} to {_text(after[place])}"))
    return sorted(leaks, key=lambda leak: leak.place)


def _quietly(
    modules: frozenset[str], models: Sequence[torch.nn.Module], loaded: frozenset[str]
) -> dict[str, Any]:
    # Some attributes of torch are objects that warn when they are looked at.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {**dict(_values(modules, models)), **dict(_registries(loaded))}


def _same(before: Any, after: Any) -> bool:
    return before is after or (type(before) is type(after) and _is_plain(before) and bool(before == after))


def _is_plain(value: Any) -> bool:
    """Whether equality says everything: constants, and containers of them."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device))


def _text(value: Any) -> str:
    if callable(value) and not isinstance(value, torch.nn.Module):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}".lstrip(".")
    return type(value).__name__ if not isinstance(value, (bool, int, str)) else repr(value)


def _values(modules: frozenset[str], models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for name in modules:
        module = sys.modules.get(name)
        if module is None:
            continue
        for key, value in list(vars(module).items()):
            if _is_function(value):
                yield f"{name}.{key}", value
            elif isinstance(value, type) and value.__module__ == name:
                yield from _of_class(value)
            elif isinstance(key, str) and key.isupper():
                yield from _of_table(f"{name}.{key}", value)
    for model in models:
        for path, part in model.named_modules():
            where = f"vars({path or 'model'})"
            for key, value in vars(part).items():
                # Modules, parameters, buffers and hooks are dicts: their entries, not the dicts.
                if isinstance(value, dict):
                    for inner, item in value.items():
                        yield f"{where} {key}[{inner!r}]", item
                else:
                    yield f"{where} {key}", value


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(cls).items()):
        if key not in _LAZY and (
            _is_function(value) or isinstance(value, (staticmethod, classmethod, property))
        ):
            yield f"{cls.__module__}.{cls.__qualname__}.{key}", value


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, ModuleType, torch.nn.Module))


def _of_table(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    tables = [value] if type(value) is dict else []
    tables += [
        table
        for name in ("_global_mapping", "_local_mapping")
        if type(table := getattr(value, name, None) if hasattr(type(value), "register") else None) is dict
    ]
    for table in tables:
        for key, item in list(table.items()):
            if isinstance(key, str) and _is_function(item):
                yield f"{place}[{key!r}]", item


def _registries(loaded: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Entries about classes of `loaded` modules: others were registered when their module was imported."""
    for label, table in (
        ("pytree node", _pytree.SUPPORTED_NODES),
        ("serialized pytree type", _pytree.SUPPORTED_SERIALIZED_TYPES),
        ("fx pytree node", fx_pytree.SUPPORTED_NODES),
        ("fx pytree exact match", fx_pytree.SUPPORTED_NODES_EXACT_MATCH),
    ):
        for cls, entry in list(table.items()):
            if getattr(cls, "__module__", None) in loaded:
                yield f"{label} {getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}", entry
    anchors = getattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS", ())
    for anchor in list(anchors):
        yield f"stack trace anchor {anchor}", True
    yield from _operators(loaded)


def _operators(loaded: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Kernels that Python registered for operators of torch, by dispatch key, and what stands for an operator
    in a decomposition.
    """
    for name in list(getattr(torch.library, "_impls", ())):  # ``aten/add.Tensor/CPU``
        if name.partition("/")[0] in ("aten", "prims"):
            yield f"operator kernel {name}", True
    packets = [value for key, value in list(vars(torch.ops.aten).items()) if not key.startswith("_")]
    operators = [
        value
        for packet in packets
        for value in list(getattr(packet, "__dict__", {}).values())
        if isinstance(value, torch._ops.OpOverload)
    ]
    for operator in [*operators, *getattr(torch._ops, "_higher_order_ops", {}).values()]:
        for key, kernel in list(operator.py_kernels.items()):
            if getattr(kernel, "__module__", None) in loaded:
                yield f"kernel of {operator} for {key}", kernel
    tables = getattr(sys.modules.get("torch._decomp"), "global_decomposition_table", {})
    for kind, table in tables.items():
        for decomposed, function in list(table.items()):
            if getattr(function, "__module__", None) in loaded:
                yield f"decomposition ({kind}) of {decomposed}", function
