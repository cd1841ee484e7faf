"""What one graph must accept: its tensors and constants by path, the sizes of symbols, what a call lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from ..dims import DimExpr
from ..errors import ObserveError
from ..keypaths import root_of
from ..pytrees import flatten_with_paths
from ..pytrees.caches import is_cache
from ..pytrees.cloning import blank
from .records import RecordedCall

__all__ = ["ConstantLeaf", "GraphShapes", "TensorLeaf", "ThinRelation", "ThinTie", "ValueIfMissing"]

#: Given an argument name and the sizes of the symbols in a call (``None``: not known yet), the value that
#: stands in for the argument where it is missing, or ``None`` if there is none.
ValueIfMissing = Callable[[str, Mapping[str, int] | None], Any]


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor argument of the graph: ``int64[batch, seq]``."""

    path: str
    dtype: str
    dims: tuple[int | DimExpr, ...]

    @property
    def dynamic(self) -> dict[int, DimExpr]:
        """Axis -> expression, for the dynamic axes."""
        return {axis: dim for axis, dim in enumerate(self.dims) if isinstance(dim, DimExpr)}

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dim) for dim in self.dims)}]"


@dataclass(frozen=True)
class ConstantLeaf:
    """An argument that is no tensor: it is baked into the graph."""

    path: str
    value: Any

    def __str__(self) -> str:
        return "none" if self.value is None else f"{type(self.value).__name__} = {self.value!r}"


@dataclass(frozen=True)
class ThinRelation:
    """A sum of sizes, or an equality, that was seen in two different calls and no more.

    Attributes
    ----------
    dim:
        ``a + b``; of an equality the symbol that the axes share with others.
    symbol:
        What its axes are called without it.
    axes:
        (path, axis) of each.
    seen:
        ``(5, 2, 3)``: the size and its terms, of each different call.
    sizes:
        Size of the axes by call index.
    like:
        Of an equality: the other axes of the symbol.
    limit:
        Largest valid size of the axes.
    """

    dim: DimExpr
    symbol: str
    axes: tuple[tuple[str, int], ...]
    seen: tuple[tuple[int, ...], ...]
    sizes: Mapping[int, int]
    like: tuple[tuple[str, int], ...] = ()
    limit: int | None = None

    @property
    def label(self) -> str:
        """What tells it from other relations of its graph: its axes and what they are taken for."""
        return f"{self.dim} {self.symbol} {', '.join(f'{path}[{axis}]' for path, axis in self.axes)}"


@dataclass(frozen=True)
class ThinTie:
    """The axes of one symbol, in parts that at most two different sizes hold together.

    Attributes
    ----------
    parts:
        (path, axis) of the axes of each; the first part keeps the symbol.
    names:
        What each part is called without the others.
    sizes:
        Size by call index, of each part.
    """

    symbol: str
    parts: tuple[tuple[tuple[str, int], ...], ...]
    names: tuple[str, ...]
    sizes: tuple[Mapping[int, int], ...]


@dataclass
class GraphShapes:
    """Shapes that one graph must accept.

    Attributes
    ----------
    leaves:
        By path, in signature and flatten order.
    containers:
        Path -> class name, for every container that is neither a list nor a dict with names as keys, and for
        those too where they are empty: no leaf tells of them.
    sizes:
        For each call (by its index) the size of each symbol that is known there.
    limits:
        Largest valid size of a symbol (a sliding-window cache holds window - 1 positions).
    thin:
        Relations between sizes that may be chance.
    ties:
        Axes of one symbol, of which it is not known whether they are equal by chance.
    warnings:
        What a person should know: axes that never varied, a single call, ...
    """

    leaves: dict[str, TensorLeaf | ConstantLeaf]
    containers: dict[str, str]
    sizes: dict[int, dict[str, int]]
    limits: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    thin: list[ThinRelation] = field(default_factory=list)
    ties: list[ThinTie] = field(default_factory=list)
    value_if_missing: ValueIfMissing = field(default=lambda name, sizes: None, repr=False)
    template: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def symbols(self) -> list[str]:
        """Free symbols in order of first appearance."""
        names: dict[str, None] = {}
        for leaf in self.tensors():
            for dim in leaf.dynamic.values():
                names.update(dict.fromkeys(dim.names))
        return list(names)

    def tensors(self) -> list[TensorLeaf]:
        """The tensor leaves in order."""
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, TensorLeaf)]

    def dims(self, path: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the leaf at `path` for given symbol sizes."""
        leaf = self.leaves[path]
        assert isinstance(leaf, TensorLeaf)
        return tuple(dim if isinstance(dim, int) else dim.evaluate(sizes) for dim in leaf.dims)

    def missing(self, call: RecordedCall) -> list[str]:
        """Paths of tensors of the graph that `call` does not have."""
        have = call.shapes().leaves()
        return [leaf.path for leaf in self.tensors() if not isinstance(have.get(leaf.path), torch.Tensor)]

    def complete(self, call: RecordedCall) -> dict[str, Any]:
        """Arguments of `call` with what it lacks filled in: stand-ins, and empty caches as length-0 tensors.

        The keys of dicts are in the order of the template: a nested dict in another order has another tree
        spec, and an ExportedProgram refuses it.

        Raises
        ------
        ObserveError
            The call lacks an argument that nothing stands in for.
        """
        missing = self.missing(call)
        arguments = dict(call.arguments)  # the only time the values of the call are loaded
        roots = dict.fromkeys(root_of(path) for path in missing)
        # A constant may have a stand-in as well.
        unset = [root for root in self.template if root not in roots and arguments.get(root) is None]
        sizes = self.sizes.get(call.index, {})
        lost = []
        for root in [*roots, *unset]:
            value = self.value_if_missing(root, sizes)
            if value is not None:
                arguments[root] = value
            elif root in unset:
                continue
            elif arguments.get(root) is not None:
                try:
                    arguments[root] = self._empty(root, sizes, arguments[root])
                except _Lost as error:
                    lost.append(str(error))
                except KeyError as error:
                    lost.append(f"{root} (the size of {error.args[0]} is not known in this call)")
            else:
                lost.append(root)
        if lost:
            raise ObserveError(
                f"call {call.index} has no {', '.join(lost)}, which other calls of this graph have: "
                "give observe.value_if_missing, or put the calls into groups with observe.graphs"
            )
        return {
            name: _in_order_of(value, arguments[name])
            for name, value in self.template.items()
            if name in arguments
        }

    def _empty(self, root: str, sizes: Mapping[str, int], given: Any) -> Any:
        """A cache as in the template; what `given` lacks is zeros of `sizes`, mostly of length 0.

        The states of linear attention have no length, and begin at zero. (`checks.numbers` asks eager whether
        it agrees, where a program fails on such a call.) `_Lost` for any other container: nobody passed
        zeros.
        """
        of_cache = is_cache(self.template[root])
        have = dict(flatten_with_paths(given, root))
        leaves, spec = _pytree.tree_flatten(self.template[root])
        paths = [path for path in self._template_paths() if root_of(path) == root]
        built = []
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(have.get(path), torch.Tensor):
                built.append(have[path])
            elif isinstance(leaf, torch.Tensor):
                shape = self.dims(path, sizes)
                if not of_cache and 0 not in shape:
                    raise _Lost(path)
                built.append(blank(leaf, shape))
            elif isinstance(self.leaves.get(path), TensorLeaf):
                raise _Lost(path)
            else:
                built.append(leaf)
        return _pytree.tree_unflatten(built, spec)

    def _template_paths(self) -> list[str]:
        return [path for name, value in self.template.items() for path, _ in flatten_with_paths(value, name)]


class _Lost(Exception):
    """A tensor inside a container that a call lacks and nothing stands in for; the message is its path."""


def _in_order_of(template: Any, value: Any) -> Any:
    """`value` with the keys of its dicts as in `template`; new dicts, the same leaves."""
    if type(template) is not type(value):
        return value
    if type(value) is dict:
        names = [
            *(name for name in template if name in value),
            *(name for name in value if name not in template),
        ]
        return {name: _in_order_of(template.get(name), value[name]) for name in names}
    if type(value) in (list, tuple):
        rest = [*template, *[None] * len(value)]
        return type(value)(_in_order_of(each, item) for each, item in zip(rest, value, strict=False))
    return value
