"""Dynamic shapes of a piece, from its recorded calls; shapes of its outputs, from those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..pytrees import register_flattening_functions
from .shape_rules import find_rule

__all__ = ["PieceShapes", "dataclass_like"]


class PieceShapes:
    """What `ModelDiagnoseOutput` knows of shapes; its attributes are documented there."""

    model: torch.nn.Module
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]
    _results: list[Any]

    @property
    def full_name(self) -> str:
        """As `ModelDiagnoseOutput` says it."""
        raise NotImplementedError

    @property
    def custom_op_name(self) -> str:
        """As `ModelDiagnoseOutput` says it."""
        raise NotImplementedError

    def guess_dynamic_dimensions(self, *tensors: torch.Tensor) -> dict[int, Any]:
        """``{axis: Dim.DYNAMIC}`` for the axes whose size differs; `ValueError` if the ranks do."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({len(shape) for shape in shapes}) > 1:
            raise ValueError(f"{self.full_name}: the ranks of an input differ between calls: {shapes}")
        return {
            axis: torch.export.Dim.DYNAMIC
            for axis, sizes in enumerate(zip(*shapes, strict=True))
            if len(set(sizes)) > 1
        }

    def guess_dynamic_shape_object(self, *objs: Any, msg: Callable[[], str] | None = None) -> Any:
        """Dynamic shapes of one argument from its values in several calls.

        A tensor gives ``{axis: Dim.DYNAMIC}``, a constant or ``None`` gives ``None``; dicts, lists and tuples
        keep their type; a cache, or another class registered as a pytree node, gives the list of its leaves.

        Raises
        ------
        ValueError
            The structures differ; `msg` says where.
        """
        where = msg() if msg is not None else ""
        present = [value for value in objs if value is not None]
        if not present:
            return None
        if len({type(value) for value in present}) > 1:
            names = ", ".join(sorted({type(value).__name__ for value in present}))
            raise ValueError(f"{self.full_name}: an argument is of several types: {names}{where}")
        first = present[0]
        if isinstance(first, torch.Tensor):
            return self.guess_dynamic_dimensions(*present)
        if isinstance(first, (bool, int, float, complex, str, bytes)):
            return None
        with register_flattening_functions(None):
            flat = [_children(value) for value in present]
        if flat[0] is None:
            return None
        # An empty cache has no leaves: those of the fuller calls count.
        longest = max(len(children) for children in flat if children is not None)
        full = [children for children in flat if children is not None and len(children) == longest]
        if any(children is not None and len(children) not in (0, longest) for children in flat):
            raise ValueError(f"{self.full_name}: a container has several lengths{where}")
        shapes = [self.guess_dynamic_shape_object(*column, msg=msg) for column in zip(*full, strict=True)]
        if isinstance(first, dict) and not dataclass_like(first):
            return (
                type(first)(zip(first, shapes, strict=True))
                if type(first) is dict
                else dict(zip(first, shapes, strict=True))
            )
        return tuple(shapes) if type(first) is tuple else shapes

    def guess_dynamic_shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of dynamic shapes; with one recorded call every axis is static."""
        count = max((len(args) for args, _ in self.inputs), default=0)
        names = dict.fromkeys(name for _, kwargs in self.inputs for name in kwargs)
        args = tuple(
            self.guess_dynamic_shape_object(
                *[given[k] if k < len(given) else None for given, _ in self.inputs],
                msg=lambda k=k: f" (input {k})",  # type: ignore[misc]
            )
            for k in range(count)
        )
        kwargs = {
            name: self.guess_dynamic_shape_object(
                *[given.get(name) for _, given in self.inputs],
                msg=lambda name=name: f" (input {name!r})",  # type: ignore[misc]
            )
            for name in names
        }
        return args, kwargs

    def _flat(self) -> tuple[list[list[Any]], list[list[Any]]]:
        with register_flattening_functions(None):
            inputs = [_pytree.tree_leaves(given) for given in self.inputs]
            return inputs, [_pytree.tree_leaves(result) for result in self._results]

    def build_shape_mapping_indices(
        self, shape_functions: Mapping[str, Any] | None = None, verbose: int = 0
    ) -> tuple[tuple[Any, torch.dtype, Callable[..., Any] | None], ...]:
        """For each output tensor, where its shape comes from.

        Returns
        -------
        tuple
            ``(source, dtype, function)``: `source` is the number of the input leaf of the same shape, or the
            shape itself if it never differs, or ``None``; then `function` makes an empty tensor of the shape
            from the input leaves, and is ``None`` where no rule was found.
        """
        inputs, outputs = self._flat()
        found: list[tuple[Any, torch.dtype, Callable[..., Any] | None]] = []
        for index, leaf in enumerate(outputs[0] if outputs else []):
            if not isinstance(leaf, torch.Tensor):
                continue
            shapes = [tuple(call[index].shape) for call in outputs]
            same = [
                position
                for position, value in enumerate(inputs[0])
                if isinstance(value, torch.Tensor)
                and all(_shape(call[position]) == shape for call, shape in zip(inputs, shapes, strict=True))
            ]
            constant = shapes[0] if len(set(shapes)) == 1 else None
            source = same[0] if same and (constant is None or len(shapes) == 1) else constant
            function = (
                self.determine_shape_fct(index, inputs, outputs, verbose, shape_functions)
                if source is None
                else None
            )
            found.append((source, leaf.dtype, function))
        if verbose:
            print(f"[shapes] {self.full_name}: {found}")
        return tuple(found)

    def determine_shape_fct(
        self,
        output_index: int,
        flattened_inputs: Sequence[Sequence[Any]],
        flattened_outputs: Sequence[Sequence[Any]],
        verbose: int = 0,
        shape_functions: Mapping[str, Any] | None = None,
    ) -> Callable[..., torch.Tensor] | None:
        """A function that makes an empty tensor of the shape of an output from the inputs.

        A function given for the class or the name of the custom op wins; otherwise each size is derived from
        the sizes of the inputs. ``None``: an axis follows no rule.
        """
        given = self._shape_functions(shape_functions)
        if output_index in given:
            function: Callable[..., torch.Tensor] = given[output_index]
            return function
        inputs = [[_shape(value) for value in call] for call in flattened_inputs]
        leaf = flattened_outputs[0][output_index]
        rules = []
        for axis in range(leaf.dim()):
            rule = find_rule(inputs, [call[output_index].shape[axis] for call in flattened_outputs])
            if rule is None:
                return None
            rules.append(rule)
        if verbose:
            print(f"[shapes] {self.full_name}: output {output_index} = {[rule.text for rule in rules]}")

        def make(*values: Any) -> torch.Tensor:
            shapes = [_shape(value) for value in values]
            return torch.empty([rule.evaluate(shapes) for rule in rules], dtype=leaf.dtype)

        return make

    def _shape_functions(self, given: Mapping[str, Any] | None) -> dict[int, Callable[..., Any]]:
        for key in (type(self.model).__name__, self.custom_op_name):
            if given and key in given:
                return dict(given[key])
        return {}


def _children(value: Any) -> list[Any] | None:
    """Values one level below, ``None`` for a leaf; all leaves of a cache."""
    if not isinstance(value, (dict, list, tuple)) and type(value) in _pytree.SUPPORTED_NODES:
        return list(_pytree.tree_leaves(value))
    if dataclass_like(value):
        return list(_pytree.tree_leaves(value))
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else None


def dataclass_like(value: Any) -> bool:
    """A dict that is a class of its own (ModelOutput): torch.export knows it by its leaves."""
    return isinstance(value, dict) and hasattr(type(value), "__dataclass_fields__")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
