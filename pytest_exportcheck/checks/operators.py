"""What Python registered for operators of torch: kernels, and what stands for an operator in a decomposition.

That is some thousands of entries, which hardly ever change: what was read of them is kept, and one look at
the tables shows whether it can be used again.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KERNEL", "Key", "Operators", "operators_now"]

KERNEL = "operator kernel {}"

#: Of an entry of a registry: a text, and what is put into it when it is shown.
Key = tuple[Any, ...]

_EVERY = itertools.chain.from_iterable
_VALUES = operator.methodcaller("values")
_KERNELS = operator.attrgetter("py_kernels")


@dataclass(frozen=True)
class Operators:
    """The tables of operators, and what was in them.

    Attributes
    ----------
    implementations:
        Names of kernels of libraries, ``aten/add.Tensor/CPU``.
    decompositions:
        The table of the tables of decompositions, by kind.
    places:
        All mappings but those of kernels: of packets, of their overloads, and of decompositions.
    operators, kernels:
        Operators, and the table of kernels of each.
    held:
        Keys and values of all of these mappings, in order.
    entries:
        Of registries, with the module that each comes from.
    """

    implementations: frozenset[str]
    decompositions: Mapping[str, Mapping[Any, Any]]
    places: tuple[Mapping[Any, Any], ...]
    operators: tuple[Any, ...]
    kernels: tuple[Mapping[Any, Any], ...]
    held: list[Any]
    entries: list[tuple[Key, Any, Any]]

    @staticmethod
    def of_now() -> Operators:
        """What is in the tables now."""
        packets = [value for key, value in list(vars(torch.ops.aten).items()) if not key.startswith("_")]
        overloads = [names for one in packets if isinstance(names := getattr(one, "__dict__", None), dict)]
        higher = getattr(torch._ops, "_higher_order_ops", {})
        found = (
            value for value in _EVERY(map(_VALUES, overloads)) if isinstance(value, torch._ops.OpOverload)
        )
        operators = (*found, *higher.values())
        decompositions = _decompositions()
        places = (vars(torch.ops.aten), *overloads, higher, decompositions, *decompositions.values())
        kernels = tuple(map(_KERNELS, operators))
        entries: list[tuple[Key, Any, Any]] = [
            (("kernel of {} for {}", one, key), kernel, getattr(kernel, "__module__", None))
            for one, table in zip(operators, kernels, strict=True)
            for key, kernel in list(table.items())
        ]
        entries += [
            (("decomposition ({}) of {}", kind, one), function, getattr(function, "__module__", None))
            for kind, table in decompositions.items()
            for one, function in list(table.items())
        ]
        held = _held(places, kernels)
        return Operators(_implementations(), decompositions, places, operators, kernels, held, entries)

    def are_as_they_were(self) -> bool:
        """Functions are equal to themselves alone, and as keys there are operators and names."""
        kernels = tuple(map(_KERNELS, self.operators))
        try:
            return (
                _decompositions() is self.decompositions
                and _implementations() == self.implementations
                and all(map(operator.is_, kernels, self.kernels))
                and _held(self.places, kernels) == self.held
            )
        except Exception:  # what is there now does not compare
            return False

    def entries_of(self, loaded: frozenset[str]) -> dict[Key, Any]:
        """Those of `loaded` modules: others were registered when their module was imported."""
        found: dict[Key, Any] = {
            (KERNEL, name): True
            for name in self.implementations
            if name.partition("/")[0] in ("aten", "prims")
        }
        found.update((key, entry) for key, entry, module in self.entries if module in loaded)
        return found


_known: list[Operators] = []


def operators_now() -> Operators:
    """What is in the tables now; the same object again while nothing changes."""
    if not _known or not _known[0].are_as_they_were():
        _known[:] = [Operators.of_now()]
    return _known[0]


def _implementations() -> frozenset[str]:
    return frozenset(getattr(torch.library, "_impls", ()))


def _decompositions() -> Mapping[str, Mapping[Any, Any]]:
    found: Mapping[str, Mapping[Any, Any]] = getattr(
        sys.modules.get("torch._decomp"), "global_decomposition_table", _NONE
    )
    return found


_NONE: Mapping[str, Mapping[Any, Any]] = {}


def _held(places: Iterable[Mapping[Any, Any]], kernels: Iterable[Mapping[Any, Any]]) -> list[Any]:
    tables = [*places, *kernels]
    return [*_EVERY(tables), *_EVERY(map(_VALUES, tables))]
