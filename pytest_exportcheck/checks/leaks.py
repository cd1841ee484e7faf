"""What an export left behind in the process: changed functions, registrations, attributes of the model.

`snapshot` before, `difference` after. Functions of loaded classes and modules of torch and transformers (and
of packages named by the caller) are compared by identity, and those that models run through by what they run
with; registries by their keys and values.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree

from .in_place import Insides
from .namespaces import (
    ABSENT,
    Group,
    Leak,
    Library,
    Space,
    group_of_module,
    library_of_modules,
    same,
    spaces_of_model,
    text_of,
)
from .operators import KERNEL, Key, Operators, operators_now

__all__ = ["Leak", "Snapshot", "difference", "snapshot"]

#: Where dynamo marks functions as not to be traced, once in a process, when it first compiles anything.
_MARKED_ONCE = ("torch.jit.", "torch.fx.", "torch.optim.")


@dataclass(frozen=True)
class Snapshot:
    """What `snapshot` saw: namespaces of libraries and of further modules, those of models by label,
    registries, those of operators, and the modules that were loaded then.
    """

    library: Library
    further: Sequence[Group]
    insides: Insides
    parts: Mapping[str, Space]
    registries: Mapping[Key, Any]
    operators: Operators
    loaded: frozenset[str]
    models: tuple[torch.nn.Module, ...] = ()


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
    loaded = frozenset(sys.modules)
    names = sorted(name for name in loaded if name.partition(".")[0] in packages)
    # Some attributes of torch are objects that warn when they are looked at.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = library_of_modules(names)
        further = [
            group
            for name in sorted(loaded.intersection(modules).difference(names))
            if (group := group_of_module(name, sys.modules.get(name), keep=False))
        ]
        groups = [*library.groups, *further]
        functions = itertools.chain.from_iterable(group.functions for group in groups)
        insides = Insides(functions, itertools.chain.from_iterable(group.containers for group in groups))
        registries, operators = dict(_registries(loaded)), operators_now()
        parts = _parts(models)
        return Snapshot(library, further, insides, parts, registries, operators, loaded, models)


def difference(before: Snapshot) -> list[Leak]:
    """What has changed since `before`, sorted by place. Modules imported meanwhile are no leak, nor is what
    dynamo sets up once in a process, or compiled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = [*before.library.candidates(), *before.further]
        changed = [
            space
            for group in sorted(groups, key=lambda group: group.module)
            if not group.is_as_it_was()
            for space in group.spaces
            if not space.is_as_it_was()
        ]
        # A table that several modules import is one of the first.
        once = {id(getattr(space.live, "table", space.live)): space for space in reversed(changed)}
        leaks = [leak for space in once.values() for leak in space.leaks() if not _is_of_dynamo(leak)]
        leaks += [
            Leak(place, "changed", f"{text_of(old)} to {text_of(new)}", undo, new)
            for place, old, new, undo in before.insides.changes()
        ]
        parts = _parts(before.models)
        for label in before.parts.keys() | parts.keys():
            space, new = before.parts.get(label), parts.get(label)
            if new is None:
                assert space is not None
                leaks += replace(space, live={}).leaks()
            else:
                leaks += replace(new, before={} if space is None else space.before).leaks()
        known, now = dict(before.registries), dict(_registries(before.loaded))
        if not before.operators.are_as_they_were():
            known.update(before.operators.entries_of(before.loaded))
            now.update(operators_now().entries_of(before.loaded))
    # Nobody knows who registered a kernel: a module of torch does so when it is imported.
    imported = any(name.partition(".")[0] == "torch" for name in sys.modules.keys() - before.loaded)
    for key in known.keys() | now.keys():
        old, new = known.get(key, ABSENT), now.get(key, ABSENT)
        if old is new:
            continue
        place = str(key[0]).format(*key[1:])
        if new is ABSENT:
            leaks.append(Leak(place, "removed", text_of(old)))
        elif old is ABSENT:
            if not (imported and key[0] == KERNEL):
                leaks.append(Leak(place, "added", text_of(new), value=new))
        elif not same(old, new):
            leaks.append(Leak(place, "changed", f"{text_of(old)} to {text_of(new)}", value=new))
    return sorted(leaks, key=lambda leak: leak.place)


def _is_of_dynamo(leak: Leak) -> bool:
    if leak.place.startswith("torch._dynamo.backends."):
        return leak.change == "added"  # the names of its compilers
    if "__compiled_fn" in leak.place:
        return True  # what it compiled, among the names of the module of the code: a reset takes it away
    if getattr(leak.value, "__module__", None) == "torch._dynamo.mutation_guard":
        # Marks modules that are made inside a `forward`, put around `Module.__init__` once: taken back, it
        # would never come again.
        return True
    return leak.place.startswith(_MARKED_ONCE) and hasattr(leak.value, "_torchdynamo_disable_msg")


def _parts(models: Sequence[torch.nn.Module]) -> dict[str, Space]:
    return {space.label: space for model in models for space in spaces_of_model(model)}


def _registries(loaded: frozenset[str]) -> Iterator[tuple[Key, Any]]:
    """Entries about classes of `loaded` modules: others were registered when their module was imported."""
    for label, table in (
        ("pytree node", _pytree.SUPPORTED_NODES),
        ("serialized pytree type", _pytree.SUPPORTED_SERIALIZED_TYPES),
        ("fx pytree node", fx_pytree.SUPPORTED_NODES),
        ("fx pytree exact match", fx_pytree.SUPPORTED_NODES_EXACT_MATCH),
    ):
        for cls, entry in list(table.items()):
            if getattr(cls, "__module__", None) in loaded:
                name = f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"
                yield ("{} {}", label, name), entry
    anchors = getattr(torch.fx.proxy, "_STACK_TRACE_ANCHORS", ())
    for anchor in list(anchors):
        yield ("stack trace anchor {}", anchor), True
