"""Lists and tables that a model holds, the very objects of before an export.

`torch.export` puts a copy in the place of every container that an attribute of a module is (2.13), with what
was in it before the trace. The module then no longer shares it with another module or with its own code, and
a later call answers otherwise.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["SharedContainers"]


class SharedContainers:
    """Made right before an export, in the scope of its pytree registrations.

    Parameters
    ----------
    module:
        The whole model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        #: Alive and by identity: one may be reached by several names.
        self._inside: dict[int, tuple[Any, Any]] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, tuple[Any, list[Any], Any]]]] = []
        own = vars(torch.nn.Module())
        for part in module.modules():
            held = {
                name: (value, *flat)
                for name, value in vars(part).items()
                if name not in own and (flat := _flat(value)) is not None
            }
            for value, _, _ in held.values():
                self._remember(value)
            self._attributes.append((vars(part), held))

    def _remember(self, value: Any) -> None:
        if isinstance(value, (list, dict, tuple)) and id(value) not in self._inside:
            items = dict(value) if isinstance(value, dict) else list(value)
            self._inside[id(value)] = (value, items)
            for item in items.values() if isinstance(items, dict) else items:
                self._remember(item)

    def put_back(self) -> None:
        """Undo what `torch.export` did. What holds anything else than before is left as it is."""
        for held, before in self._attributes:
            for name, (value, leaves, structure) in before.items():
                now = held.get(name, value)
                if now is value or not _holds(now, leaves, structure):
                    continue
                self._undo(value)
                if _holds(value, leaves, structure):
                    held[name] = value

    def _undo(self, value: Any) -> None:
        """What the trace wrote into it."""
        if id(value) not in self._inside:
            return
        _, items = self._inside[id(value)]
        if type(value) is list and not _same(value, items):
            value[:] = items
        elif type(value) is dict and not (
            list(value) == list(items) and _same(value.values(), items.values())
        ):
            value.clear()
            value.update(items)
        for item in items.values() if isinstance(items, dict) else items:
            self._undo(item)


def _same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


def _flat(value: Any) -> tuple[list[Any], Any] | None:
    """(leaves, structure) of a container; ``None`` for all else."""
    with contextlib.suppress(Exception):  # a class may be registered with functions that fail
        leaves, structure = _pytree.tree_flatten(value)
        return None if structure.is_leaf() else (leaves, structure)
    return None


def _holds(value: Any, leaves: list[Any], structure: Any) -> bool:
    flat = _flat(value)
    return flat is not None and flat[1] == structure and _same(flat[0], leaves)
