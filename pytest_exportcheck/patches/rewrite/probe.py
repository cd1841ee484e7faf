"""Run a function in eager and note what its values are: at every test, and around every branch.

The function runs an instrumented copy of its own code. What it computes is unchanged, unless an outcome is
forced, which shows the branch that no input takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree

from ...pytrees.cloning import clone_cache

__all__ = ["PROBE", "Call", "Endless", "Kind", "Probe", "copy_arguments", "describe", "storages"]

#: The global under which instrumented code finds its probe.
PROBE = "__exportcheck_probe__"

_ROUNDS = 5_000  # a forced outcome may keep a loop running for ever


@dataclass(frozen=True)
class Kind:
    """What a value is.

    Attributes
    ----------
    kind:
        ``tensor``, ``number`` (bool, int, float), ``none``, ``container`` (tuple, list or dict with string
        keys), ``other``.
    type:
        Name of the Python type.
    value:
        A number itself.
    items:
        The kinds in a container, by index or key.
    """

    kind: str
    type: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    contiguous: bool = True
    value: Any = None
    items: tuple[tuple[Any, Kind], ...] = ()

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape or ())}"
        return f"{self.type} {self.value!r}" if self.kind == "number" else self.type


def describe(value: Any) -> Kind:
    """The kind of `value`."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return Kind("tensor", name, value.dtype, tuple(value.shape), value.is_contiguous())
    if value is None:
        return Kind("none", name)
    if type(value) in (bool, int, float):
        return Kind("number", name, value=value)
    if type(value) in (tuple, list):
        return Kind("container", name, items=tuple((i, describe(item)) for i, item in enumerate(value)))
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return Kind("container", name, items=tuple((key, describe(item)) for key, item in value.items()))
    return Kind("other", name)


def storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors that `value` reaches: containers, modules, caches."""
    found: set[int] = set()

    def note(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                found.add(item.untyped_storage().data_ptr())

    for leaf in _pytree.tree_leaves(value):
        note(leaf)
        if isinstance(leaf, torch.nn.Module):
            for part in leaf.modules():
                for item in [*vars(part).values(), *part._parameters.values(), *part._buffers.values()]:
                    note(item)
        for layer in getattr(leaf, "layers", None) or []:
            for item in getattr(layer, "__dict__", {}).values():
                note(item)
    return found - {0}


def copy_arguments(value: Any) -> Any:
    """Arguments with every tensor and cache copied, memory shared by them shared by the copies; other objects
    are the same ones."""
    memo: dict[int, Any] = {}

    def copy(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in memo:
                memo[id(item)] = item.detach().clone()
            return memo[id(item)]
        return clone_cache(item) if _is_cache(item) else item

    return _pytree.tree_map(copy, value, is_leaf=_is_cache)


def _is_cache(value: Any) -> bool:
    return not isinstance(value, torch.nn.Module) and (
        hasattr(value, "layers") or hasattr(value, "self_attention_cache")
    )


class Endless(RuntimeError):
    """A call did not end after very many tests: values that were made for it keep a loop running."""


@dataclass(frozen=True)
class Call:
    """One recorded call of a function: the values of its parameters, by name."""

    values: Mapping[str, Any]


@dataclass
class Probe:
    """Collects what instrumented code reports.

    Attributes
    ----------
    atoms:
        By number of an expression in a test: the kinds it had.
    outcomes:
        By number of a test: the outcomes it had, counted.
    before, after:
        By number of a branch: the kinds of the local variables before it, and by outcome after it.
    shared:
        By number of a branch: the variables whose memory something else than themselves refers to.
    forced:
        Outcomes that are forced, by number of the test.
    once:
        Tests of loops: forced in the first round only.
    limit:
        How many calls are kept.
    """

    atoms: dict[int, set[Kind]] = field(default_factory=dict)
    outcomes: dict[int, dict[bool, int]] = field(default_factory=dict)
    before: dict[int, dict[str, set[Kind]]] = field(default_factory=dict)
    after: dict[tuple[int, bool], dict[str, set[Kind]]] = field(default_factory=dict)
    shared: dict[int, set[str]] = field(default_factory=dict)
    forced: dict[int, bool] = field(default_factory=dict)
    once: set[int] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    limit: int = 8
    used: set[int] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    rounds: int = 0

    def enter(self, values: Mapping[str, Any]) -> None:
        """The function was called."""
        own = {name: value for name, value in values.items() if name != "__class__"}
        self.arguments, self.rounds = storages(list(own.values())), 0
        if len(self.calls) < self.limit:
            self.calls.append(Call(copy_arguments(dict(own))))

    def atom(self, number: int, value: Any) -> Any:
        """An expression in a test was evaluated."""
        kind = describe(value)
        self.atoms.setdefault(number, set()).add(kind)
        if kind.kind == "tensor":
            self.outcomes.setdefault(number, {})
            if self._is_forced(number):
                return self.forced[number]
        return value

    def _is_forced(self, number: int) -> bool:
        if number not in self.forced or (number in self.once and number in self.used):
            return False
        self.used.add(number)
        return True

    def decide(self, number: int, value: Any, values: Mapping[str, Any] | None = None) -> Any:
        """A test was evaluated."""
        if values is not None:
            _note(self.before.setdefault(number, {}), values)
            self.shared.setdefault(number, set()).update(self._shared(values))
        self.rounds += 1
        if self.rounds > _ROUNDS:
            raise Endless(f"{_ROUNDS} tests were evaluated, and the function did not end")
        if self._is_forced(number):
            wanted = self.forced[number]
            value = (
                torch.full_like(value, wanted, dtype=torch.bool)
                if isinstance(value, torch.Tensor)
                else wanted
            )
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            counts = self.outcomes.setdefault(number, {})
            counts[bool(value)] = counts.get(bool(value), 0) + 1
        return value

    def leave(self, number: int, outcome: bool, values: Mapping[str, Any]) -> None:
        """A branch ended."""
        _note(self.after.setdefault((number, outcome), {}), values)

    def _shared(self, values: Mapping[str, Any]) -> set[str]:
        memory = {name: storages(value) for name, value in values.items() if name != "__class__"}
        return {
            name
            for name, own in memory.items()
            if own & self.arguments or any(own & other for key, other in memory.items() if key != name)
        }

    @contextlib.contextmanager
    def active(self, function: FunctionType) -> Iterator[None]:
        """Let instrumented code of `function` report to this probe."""
        scope = function.__globals__
        outer = scope.get(PROBE)
        scope[PROBE] = self
        try:
            yield
        finally:
            if outer is None:
                del scope[PROBE]
            else:
                scope[PROBE] = outer


def _note(kinds: dict[str, set[Kind]], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name != "__class__":
            kinds.setdefault(name, set()).add(describe(value))
