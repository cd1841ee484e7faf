"""What is observed: how `observe.target` names it, and the rules that hold for its calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .tensors import TensorSpec

__all__ = ["ObservedTarget", "is_target", "split_target"]

_TARGET = re.compile(r"([^\s.:]+(\.[^\s.:]+)*)?(:[A-Za-z_][A-Za-z0-9_]*)?\Z")


def is_target(text: str) -> bool:
    """Whether `text` names a submodule, with or without a method: ``encoder:encode``, ``:encode``."""
    return bool(text) and _TARGET.match(text) is not None


def split_target(text: str) -> tuple[str, str]:
    """(path of the submodule, ``""`` for the model itself; method)."""
    path, _, method = text.partition(":")
    return path, method or "forward"


@dataclass(frozen=True)
class ObservedTarget:
    """One target of a spec, whichever way it is written, and how its calls are read.

    Attributes
    ----------
    name:
        As in ``target: {name: ...}``; ``None`` for the single target of a spec.
    path, method:
        The submodule, ``""`` for the model itself, and what of it is called.
    named:
        Node of the file that names the target.
    rules:
        Node of the file below which ``graphs``, ``value_if_missing``, ... of the target stand.
    graphs, ignore_calls, example, value_if_missing, batch_dims, store_n_calls:
        As in `Observe`.
    """

    name: str | None
    path: str
    method: str
    named: tuple[Any, ...]
    rules: tuple[Any, ...]
    graphs: Literal["one"] | Mapping[str, tuple[int, ...]] = "one"
    ignore_calls: tuple[int, ...] = ()
    example: int | Mapping[str, int] | None = None
    value_if_missing: Mapping[str, TensorSpec] = field(default_factory=dict)
    batch_dims: bool | tuple[str, ...] = False
    store_n_calls: int = 20

    def graph_name(self, group: str | None) -> str | None:
        """Name of the graph of a group: ``decoder.prefill``, or what there is of the two."""
        return ".".join(part for part in (self.name, group) if part is not None) or None

    @property
    def graph_names(self) -> tuple[str | None, ...]:
        """One name per program."""
        groups = (None,) if self.graphs == "one" else tuple(self.graphs)
        return tuple(self.graph_name(group) for group in groups)
