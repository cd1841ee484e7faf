"""Conversions that were made already: of the same graph under another patch mode, or in an earlier run.

A conversion depends on the captured program, its options, and on what changes the conversion itself. Where
all of these are the same it is not made again, and the numbers of what it made are judged as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..observe import GraphShapes
from .fingerprint import graph_digest, tensors_of, version_of
from .guards import CaptureWatch, Decided

if TYPE_CHECKING:
    from .conversion_cache import ConversionCache

__all__ = ["KNOWN_OPERATORS", "CaseConversions", "Conversions", "Weights", "operators_of_others"]

#: Namespaces of operators beside torch's whose version in a key tells what they do.
KNOWN_OPERATORS = frozenset({"transformers"})


@dataclass(frozen=True)
class Weights:
    """The tensors of a program, held without a copy, and how often they had been written to."""

    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[str, int]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram) -> Weights:
        """Those of `program`."""
        tensors = tensors_of(program)
        return cls(tensors, {name: version_of(tensor) for name, tensor in tensors.items()})

    def equal(self, other: Weights) -> bool:
        """By identity, or by value."""
        if self.tensors.keys() != other.tensors.keys():
            return False
        if any(version_of(tensor) != self.versions[name] for name, tensor in self.tensors.items()):
            return False  # Written to since: what was made of them is of other values.
        return all(_equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device, one.stride()) != (
        other.shape,
        other.dtype,
        other.device,
        other.stride(),
    ):
        return False
    if one.numel() == 0 or (one.data_ptr() == other.data_ptr() != 0):
        return True
    # Bit by bit: nan is nan, and 0 is not -0.
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


@dataclass(frozen=True)
class _Kept:
    scope: tuple[Any, ...]
    weights: Weights
    origin: str
    model: Any
    decided: Decided


@dataclass
class Conversions:
    """The conversions of one spec in one process.

    Attributes
    ----------
    keep:
        Whether another case may come that can use them.
    cache:
        Those of other runs.
    """

    keep: bool = False
    cache: ConversionCache | None = None
    _kept: list[_Kept] = field(default_factory=list)

    def clear(self) -> None:
        """Forget, and free, what was made in this process."""
        self._kept.clear()


@dataclass(frozen=True)
class CaseConversions:
    """`Conversions` as one case sees them.

    Attributes
    ----------
    case:
        What two cases must have in common: exporter, device, dtype, graph.
    origin:
        How a record names the case: its patch mode.
    reach:
        Given whether the program has operators that are not torch's: what the patch mode changes in a
        conversion, as ``values`` (to be equal) and ``text`` (for other runs, or ``None``); ``None``: that
        cannot be told, and nothing is shared.
    renew:
        A conversion that is known failed: make a new one, and keep that in its place.
    aside:
        As that of `captures.CaseCaptures`.
    """

    conversions: Conversions
    case: tuple[str | None, ...]
    origin: str
    watch: CaptureWatch
    shapes: GraphShapes
    reach: Callable[[bool], Any]
    renew: bool = False
    aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def obtain(
        self,
        program: torch.export.ExportedProgram,
        settings: str,
        make: Callable[[], torch.onnx.ONNXProgram],
    ) -> tuple[torch.onnx.ONNXProgram, dict[str, Any]]:
        """What `make` returns, or the same from an earlier case or run; and what the record says of it.

        Parameters
        ----------
        program:
            As it is converted: fixes of a patch mode are in it.
        settings:
            Options and names as text.
        """
        cache = self.conversions.cache
        others = operators_of_others(program)
        reach = self.reach(bool(others)) if self.conversions.keep or cache is not None else None
        if reach is None:
            return make(), {}
        with self.aside():
            digest = graph_digest(program, self.watch, self.shapes)
            weights = Weights.of(program)
            known = others <= KNOWN_OPERATORS
            found, scope, key, notes = self._look_up(digest, settings, weights, reach, known)
        if found is not None:
            return torch.onnx.ONNXProgram(found[0], program), found[1]
        before, frozen = self.watch.mark(), list(self.watch.frozen())
        made = make()
        if list(self.watch.frozen()) != frozen:
            return made, {"conversion": "new"}  # Why an axis froze is only known here.
        decided = self.watch.decided(self.shapes, before)
        self._keep(scope, weights, made.model, decided)
        if cache is not None and key is not None:
            with self.aside():
                notes += cache.write(key, made.model, weights.tensors, decided)
        return made, _facts("new", notes)

    def find(
        self, digest: str, settings: str, weights: Weights, custom: bool
    ) -> tuple[Any, dict[str, Any]] | None:
        """(ONNX model, facts for the record) of a program whose capture was kept; ``None``: not made.

        Parameters
        ----------
        digest:
            `fingerprint.graph_digest` of the program as it was converted.
        custom:
            It has operators of `KNOWN_OPERATORS`.
        """
        reach = self.reach(custom)
        with self.aside():
            return None if reach is None else self._look_up(digest, settings, weights, reach, True)[0]

    def _look_up(
        self, digest: str, settings: str, weights: Weights, reach: Any, known: bool
    ) -> tuple[tuple[Any, dict[str, Any]] | None, tuple[Any, ...], dict[str, Any] | None, list[str]]:
        """(model and facts or ``None``, scope in this process, key for other runs or ``None``, notes).

        Parameters
        ----------
        known:
            The versions in a key tell what all operators of the program do.
        """
        store, cache = self.conversions, self.conversions.cache
        scope = (self.case, digest, settings, reach.values)
        if self.renew:
            store._kept[:] = [kept for kept in store._kept if kept.scope != scope]
        for kept in store._kept:
            if kept.scope == scope and kept.weights.equal(weights):
                self.watch.add(kept.decided)
                return (kept.model, {"same_graph_as": kept.origin, "conversion": "shared"}), scope, None, []
        key: dict[str, Any] | None = None
        notes: list[str] = []
        if cache is not None and reach.text is not None and known:
            key = cache.key(
                graph=digest,
                weights=weights.tensors,
                settings=settings,
                patches=reach.text,
                exporter=str(self.case[0]),
            )
        if cache is not None and key is not None and not self.renew:
            found, notes = cache.read(key, weights.tensors)
            if found is not None:
                self.watch.add(found.decided)
                self._keep(scope, weights, found.model, found.decided)
                return (found.model, _facts("cached", notes)), scope, key, notes
        return None, scope, key, notes

    def _keep(self, scope: tuple[Any, ...], weights: Weights, model: Any, decided: Decided) -> None:
        if self.conversions.keep:
            self.conversions._kept.append(_Kept(scope, weights, self.origin, model, decided))


def _facts(conversion: str, notes: list[str]) -> dict[str, Any]:
    return {"conversion": conversion, **({"cache_notes": notes} if notes else {})}


def operators_of_others(program: torch.export.ExportedProgram) -> set[str]:
    """Namespaces of the operators in `program` that are not torch's: what they do is not known."""
    found = set()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload):
                found.add(node.target.namespace)
            elif node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
                found.add(str(getattr(node.target, "__module__", "")).partition(".")[0])
    return found - {"aten", "prims", "prim", "_operator", "math", "builtins", "torch"}
