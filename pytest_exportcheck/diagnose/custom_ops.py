"""A module as a custom op: opaque to an exporter, so that what is around it can be judged apart.

An operator of torch takes and returns tensors. The rest of a call (containers, caches, ``None``, numbers) is
kept beside it, one operator for each structure that the module is called with. What a module changes in place
(a cache that an attention layer updates, a tensor it writes into) comes back as further outputs and is
written into the caller's objects.

Shapes of the outputs come from the module itself, run on fake tensors. Where it cannot be (it is replaced
because it branches on data) they follow from those of the inputs as the recorded calls showed it, and what
does not is a size that is unknown until run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..observe import CallSignature
from ..pytrees import clone_tree, flatten_with_paths
from ..pytrees.paths import same_constant
from .shape_rules import find_rule

__all__ = ["NAMESPACE", "ModuleAsOperator", "ShapeFunctions", "installed"]

NAMESPACE = "diag_lib"

#: Class name or name of the custom op -> output number -> function of the tensor inputs that returns a
#: tensor of the right shape.
ShapeFunctions = Mapping[str, Mapping[int, Callable[..., Any]]]

_TENSOR = object()


@dataclass
class _Result:
    """The structure of what one run returned; its tensors are the operator's outputs, in order."""

    spec: Any
    leaves: list[Any]
    #: (argument, its structure, its leaves) of containers that were changed.
    changed: list[tuple[str, Any, list[Any]]] = field(default_factory=list)
    #: Positions of tensor inputs that were written into.
    written: list[int] = field(default_factory=list)


@dataclass
class _Structure:
    """One way of calling the module: everything but the tensors and the symbolic sizes."""

    name: str
    spec: Any
    leaves: list[Any]  # _TENSOR or int (a size, an operand too) or the constant itself
    types: list[str]  # of the operands in order: Tensor, SymInt
    paths: list[str]  # of the operands in order
    definition: Any = None
    result: _Result | None = None
    observed: list[tuple[list[Any], list[torch.Tensor], _Result]] | None = None
    #: Positions of tensors that the recorded calls write into; ``None`` before these were looked at.
    written: list[int] | None = None

    @property
    def schema(self) -> str:
        operands = ", ".join(f"{kind} x{k}" for k, kind in enumerate(self.types))
        return f"({operands}) -> Tensor[]"

    def matches(self, spec: Any, leaves: Sequence[Any]) -> bool:
        return (
            self.spec == spec
            and len(leaves) == len(self.leaves)
            and all(_same(a, b) for a, b in zip(self.leaves, leaves, strict=True))
        )


class _Size:
    """A symbolic size among the arguments."""

    def __repr__(self) -> str:
        return "size"


_SIZE = _Size()


def _same(known: Any, given: Any) -> bool:
    if known is _TENSOR or given is _TENSOR or known is _SIZE or given is _SIZE:
        return known is given
    return known is given or same_constant(known, given)


def _operands(value: Any) -> tuple[list[Any], list[Any], Any]:
    """(operands, leaves with markers in their places, structure)."""
    leaves, spec = _pytree.tree_flatten(value)
    operands: list[Any] = []
    marked: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            operands.append(leaf)
            marked.append(_TENSOR)
        elif isinstance(leaf, torch.SymInt):
            operands.append(leaf)
            marked.append(_SIZE)
        else:
            marked.append(leaf)
    return operands, marked, spec


def _filled(marked: Sequence[Any], operands: Sequence[Any], spec: Any) -> Any:
    remaining = list(operands)
    leaves = [remaining.pop(0) if leaf is _TENSOR or leaf is _SIZE else leaf for leaf in marked]
    return _pytree.tree_unflatten(leaves, spec)


def _write_back(original: Any, changed: Any) -> None:
    """Give the caller's object the content of `changed`."""
    if isinstance(original, list):
        original[:] = changed
    elif isinstance(original, dict):
        # A dict that is a dataclass too (ModelOutput) keeps its attributes in step by item assignment.
        for key in [key for key in original if key not in changed]:
            dict.pop(original, key)
        for key, value in changed.items():
            original[key] = value
    elif isinstance(original, tuple):
        for ours, theirs in zip(original, changed, strict=True):
            _write_back(ours, theirs)
    elif hasattr(original, "__dict__") and not isinstance(original, torch.Tensor):
        vars(original).update(vars(changed))


class ModuleAsOperator:
    """Replaces a method of a module by a custom op.

    Attributes
    ----------
    name:
        Of the operator of the first structure, in the namespace ``diag_lib``; others get a number.
    structures:
        What it was called with.
    guessed:
        Why the module could not be run on fake tensors, if so.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        method: str,
        name: str,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        shape_functions: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:
        self.module = module
        self.method = method
        self.name = re.sub(r"\W", "_", name)
        self.signature = CallSignature.of(getattr(module, method))
        # By name: an argument that is passed by position here and by keyword there is the same one.
        self.calls = [self.signature.bind(args, kwargs) for args, kwargs in calls]
        self.shape_functions = dict(shape_functions or {})
        self.structures: list[_Structure] = []
        self.guessed = ""
        self._original: Callable[..., Any] = getattr(module, method)
        self._had = vars(module).get(method)
        # Taken now: while a trace runs the module has stand-ins for its weights.
        self._weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def install(self) -> None:
        """Replace the method; the operators for the recorded calls are defined."""
        try:
            for arguments in self.calls:
                operands, marked, spec = _operands(arguments)
                self._structure(arguments, spec, marked, [_type_of(value) for value in operands])
        except BaseException:
            self._undefine()
            raise
        setattr(self.module, self.method, self._call)

    def remove(self) -> None:
        """Put the method back and forget the operators; nothing is left of either."""
        if self._had is None:
            vars(self.module).pop(self.method, None)
        else:
            setattr(self.module, self.method, self._had)
        self._undefine()

    def _undefine(self) -> None:
        for structure in self.structures:
            if structure.definition is not None:
                structure.definition._lib._destroy()
                structure.definition = None

    # calls

    def _structure(
        self, arguments: Mapping[str, Any], spec: Any, marked: list[Any], types: list[str]
    ) -> _Structure:
        for structure in self.structures:
            if structure.matches(spec, marked) and structure.types == types:
                return structure
        number = len(self.structures) + 1
        name = self.name if number == 1 else f"{self.name}_{number}"
        leaves = [pair for key, value in arguments.items() for pair in flatten_with_paths(value, key)]
        paths = [path for path, leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt))]
        structure = _Structure(name, spec, marked, types, paths)
        with _disable_current_modes():
            observed = self.observe(structure)
        structure.written = sorted({position for call in observed for position in call[2].written})
        self._define(structure)
        self.structures.append(structure)
        return structure

    def _define(self, structure: _Structure) -> None:
        def kernel(*operands: Any) -> list[torch.Tensor]:
            with torch.no_grad():
                return self._run(structure, operands, self._original)

        def fake(*operands: Any) -> list[torch.Tensor]:
            return self._shapes(structure, operands)

        structure.definition = torch.library.custom_op(
            f"{NAMESPACE}::{structure.name}", kernel, mutates_args=(), schema=structure.schema
        )
        structure.definition.register_fake(fake)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.signature.bind(args, kwargs)
        operands, marked, spec = _operands(arguments)
        structure = self._structure(arguments, spec, marked, [_type_of(value) for value in operands])
        operator = getattr(getattr(torch.ops, NAMESPACE), structure.name)
        outputs = list(operator(*operands))
        result = structure.result
        assert result is not None

        def take(leaves: Sequence[Any]) -> list[Any]:
            return [outputs.pop(0) if leaf is _TENSOR else leaf for leaf in leaves]

        returned = _pytree.tree_unflatten(take(result.leaves), result.spec)
        for name, changed, leaves in result.changed:
            _write_back(arguments[name], _pytree.tree_unflatten(take(leaves), changed))
        for position in result.written:
            operands[position].copy_(outputs.pop(0))
        return returned

    def _run(
        self, structure: _Structure, operands: Sequence[Any], method: Callable[..., Any]
    ) -> list[torch.Tensor]:
        """Run the module; returns every tensor that leaves it and notes the structure of the rest."""
        # An operator must not write into its inputs.
        own = [value.clone() if isinstance(value, torch.Tensor) else value for value in operands]
        versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in own]
        arguments = _filled(structure.leaves, own, structure.spec)
        before = {name: _pytree.tree_flatten(value) for name, value in arguments.items()}
        args, kwargs = self.signature.call(arguments)
        returned = method(*args, **kwargs)
        tensors: list[torch.Tensor] = []

        def note(leaves: Sequence[Any]) -> list[Any]:
            tensors.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            return [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        leaves, spec = _pytree.tree_flatten(returned)
        result = _Result(spec, note(leaves))
        for name, value in arguments.items():
            old, old_spec = before[name]
            now, now_spec = _pytree.tree_flatten(value)
            same = now_spec == old_spec and all(
                a is b or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor))
                for a, b in zip(now, old, strict=True)
            )
            if not same and not isinstance(value, torch.Tensor):
                result.changed.append((name, now_spec, note(now)))
        if structure.written is None:
            # Only here, outside of the operator: inside of it nothing counts versions.
            result.written = [
                position
                for position, (value, version) in enumerate(zip(own, versions, strict=True))
                if isinstance(value, torch.Tensor) and value._version != version
            ]
        else:
            result.written = structure.written
        tensors.extend(own[position] for position in result.written)
        structure.result = result
        # No output may share memory with an input or with another output.
        return [tensor.clone() for tensor in tensors]

    # shapes

    def _shapes(self, structure: _Structure, operands: Sequence[Any]) -> list[torch.Tensor]:
        mode = next((v.fake_mode for v in operands if isinstance(v, FakeTensor)), None)
        outputs: list[torch.Tensor] | None = None
        if mode is not None and not self.guessed:
            try:
                outputs = self._run_fake(structure, operands, mode)
                outputs = [_bound(tensor, mode) for tensor in outputs]
            except Exception as error:  # it branches on data, or calls what knows no fake tensors
                self.guessed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        given = self._given_shapes(operands, mode)
        if outputs is None:
            outputs = self._from_observations(structure, operands, given)
        for index, shape in given.items():
            if index < len(outputs):
                outputs[index] = torch.empty(shape, dtype=outputs[index].dtype, device=outputs[index].device)
        return outputs

    def _given_shapes(
        self, operands: Sequence[Any], mode: FakeTensorMode | None
    ) -> dict[int, tuple[Any, ...]]:
        """Shapes of the outputs for which there is a shape function."""
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        with mode if mode is not None else nullcontext():
            return {index: tuple(f(*tensors).shape) for index, f in self.shape_functions.items()}

    def _run_fake(
        self, structure: _Structure, operands: Sequence[Any], mode: FakeTensorMode
    ) -> list[torch.Tensor]:
        # What the module learns about its data on the way is not for the graph around it.
        unseen = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext()
        with mode, torch.no_grad(), unseen:
            weights = {name: mode.from_tensor(value) for name, value in self._weights.items()}
            allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
            try:
                return self._run(structure, operands, self._with(weights))
            finally:
                mode.allow_non_fake_inputs = allowed

    def _with(self, weights: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
        """The method with these weights, whatever a trace has put into the module."""
        holder = _Holder(self.module, self._original)
        named = {f"module.{name}": value for name, value in weights.items()}

        def call(*args: Any, **kwargs: Any) -> Any:
            with _untraced_calls():
                return torch.func.functional_call(holder, named, args, kwargs)

        return call

    def observe(self, structure: _Structure) -> list[tuple[list[Any], list[torch.Tensor], _Result]]:
        """(operands, outputs, structure of the outputs) of the recorded calls of one structure."""
        if structure.observed is None:
            structure.observed = []
            for call in self.calls:
                operands, marked, spec = _operands(clone_tree(call))
                if structure.spec == spec and all(
                    known is _SIZE or _same(known, given)
                    for known, given in zip(structure.leaves, marked, strict=True)
                ):
                    # A symbolic size is a plain number in a recorded call.
                    sizes = [
                        given for known, given in zip(structure.leaves, marked, strict=True) if known is _SIZE
                    ]
                    merged = [
                        operands.pop(0) if kind == "Tensor" else sizes.pop(0) for kind in structure.types
                    ]
                    with torch.no_grad():
                        outputs = self._run(structure, merged, self._with(self._weights))
                    assert structure.result is not None
                    structure.observed.append((merged, outputs, structure.result))
        return structure.observed

    def _observed_otherwise(
        self, structure: _Structure
    ) -> tuple[list[tuple[list[Any], list[torch.Tensor], _Result]], list[list[Any]]]:
        """Recorded calls of another structure, inputs matched by path.

        A trace makes other calls than eager: transformers leaves a mask out that masks nothing, and makes it
        while it is traced.
        """
        for other in self.structures:
            if other.observed and not any(call[2].written for call in other.observed):
                rows = [dict(zip(other.paths, _shapes_of(c[0]), strict=True)) for c in other.observed]
                return other.observed, [[row.get(path) for path in structure.paths] for row in rows]
        return [], []

    def _from_observations(
        self, structure: _Structure, operands: Sequence[Any], given: Mapping[int, tuple[Any, ...]]
    ) -> list[torch.Tensor]:
        observed = self.observe(structure)
        seen = [_shapes_of(call[0]) for call in observed]
        if not observed:
            observed, seen = self._observed_otherwise(structure)
        if not observed:
            raise RuntimeError(
                f"{type(self.module).__name__} cannot be run on fake tensors ({self.guessed}) and no "
                "recorded call has these arguments: give shape_functions for its outputs"
            )
        structure.result = observed[0][2]
        now = _shapes_of(operands)
        made = []
        for index, output in enumerate(observed[0][1]):
            sizes: list[Any] = list(given.get(index, ()))
            for axis in range(len(sizes), output.dim()):
                rule = find_rule(seen, [call[1][index].shape[axis] for call in observed])
                # Not known before the module runs: what the trace makes of such a size is its own affair.
                sizes.append(
                    rule.evaluate(now) if rule is not None else torch.library.get_ctx().new_dynamic_size()
                )
            made.append(torch.empty(sizes, dtype=output.dtype, device=output.device))
        return made


@contextmanager
def _untraced_calls() -> Iterator[None]:
    """Calls of modules inside the block are no part of a running trace.

    A trace of torch.fx replaces ``Module.__call__`` to note where it is, and does not find back after an
    exception, which a module that branches on data raises by design (torch 2.13).
    """
    traced = torch.nn.Module.__call__
    torch.nn.Module.__call__ = torch.nn.Module._wrapped_call_impl  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = traced  # type: ignore[method-assign]


def _bound(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """`tensor` with sizes that depend on data as sizes of the operator's own."""
    sizes = [
        torch.library.get_ctx().new_dynamic_size() if free_unbacked_symbols(size) else size
        for size in tensor.shape
    ]
    if not any(free_unbacked_symbols(size) for size in tensor.shape):
        return tensor
    with mode:
        return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


class _Holder(torch.nn.Module):
    """Lets `torch.func.functional_call` swap the weights of a module and call any of its methods."""

    def __init__(self, module: torch.nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


def _type_of(value: Any) -> str:
    return "Tensor" if isinstance(value, torch.Tensor) else "SymInt"


def _shapes_of(operands: Sequence[Any]) -> list[Any]:
    """Shapes of tensors; a size counts as the one axis of a shape of its own."""
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else (value,) for value in operands]


#: (id of a module, method) -> what replaces it, with how many holders.
_INSTALLED: dict[tuple[int, str], tuple[ModuleAsOperator, int]] = {}


def installed() -> list[str]:
    """Names of the custom ops that stand in for modules now."""
    return [operator.name for operator, _ in _INSTALLED.values()]


def hold(key: tuple[int, str], make: Callable[[], ModuleAsOperator]) -> ModuleAsOperator:
    """The replacement of a module, installed by the first holder: call sites of one module share it."""
    if key in _INSTALLED:
        operator, count = _INSTALLED[key]
    else:
        operator, count = make(), 0
        operator.install()
    _INSTALLED[key] = (operator, count + 1)
    return operator


def release(key: tuple[int, str]) -> None:
    """Undo one `hold`; the last one removes the replacement."""
    operator, count = _INSTALLED.pop(key)
    if count > 1:
        _INSTALLED[key] = (operator, count - 1)
    else:
        operator.remove()
