"""Names that a person gives to arguments and axes: of batches, of inputs, in `dim_names`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..dims import DimExpr
from ..pytrees import flatten_with_paths
from ..spec.names import choices, suggest
from .dynamic import symbol_label
from .shapes import ConstantLeaf, GraphShapes, TensorLeaf
from .signature import CallSignature

__all__ = ["argument_named", "check_names", "with_labels", "with_suggested_labels"]

#: Symbol -> label that transformers' own exporters use.
_LABELS = {
    "batch": "batch_size",
    "seq": "sequence_length",
    "past": "past_sequence_length",
    "length": "total_sequence_length",
    "past + seq": "total_sequence_length",
    "source": "encoder_sequence_length",
}

#: Shapes, and what stands for each expression in them.
Labelled = tuple[GraphShapes, Callable[[DimExpr], Any]]

_Key = tuple[str, int]


def check_names(
    names: Collection[Any], signature: CallSignature, passed: Iterable[str], strict: bool = True
) -> None:
    """Refuse names of arguments that do not exist.

    Parameters
    ----------
    passed:
        Names that a call had: with ``**kwargs`` in the signature, names of its own.
    strict:
        ``False``: with ``**kwargs`` only those that look like an existing one.

    Raises
    ------
    ValueError
        With the name that was meant, if one is close.
    """
    known = dict.fromkeys([*signature.names, *passed])
    for name in names:
        if not isinstance(name, str) or name in known:
            continue
        if name in (signature.var_positional, signature.var_keyword):
            more = [other for other in known if other not in signature.names]
            raise ValueError(f"{name!r} is variadic: name what it caught ({', '.join(more) or 'nothing'})")
        if strict or signature.var_keyword is None or suggest(name, known):
            raise ValueError(f"the signature has no argument {name!r}{choices(name, known)}")


def argument_named(signature: CallSignature, key: int | str) -> str:
    """Name of an argument that is given by name or position.

    Raises
    ------
    TypeError
        `key` is neither.
    ValueError
        There is no such position.
    """
    if isinstance(key, str):
        return signature.known_as(key)
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(f"Unexpected type {type(key)} for {key!r}: a name or a position of an argument")
    names = signature.positions(max(key + 1, 0))
    if not 0 <= key < len(names):
        raise ValueError(f"the signature has no position {key}")
    return names[key]


def with_suggested_labels(shapes: GraphShapes) -> Labelled:
    """`shapes`, and a label for every expression, no label for two of them."""
    labels: dict[DimExpr, str] = {}
    for leaf in shapes.tensors():
        for dim in leaf.dynamic.values():
            if dim not in labels:
                label = _LABELS.get(str(dim), symbol_label(dim))
                taken = set(labels.values())
                labels[dim] = label if label not in taken else _unused(symbol_label(dim), taken)
    return shapes, labels.__getitem__


def with_labels(
    shapes: GraphShapes, dim_names: Mapping[Any, Any], signature: CallSignature, template: Mapping[str, Any]
) -> tuple[Labelled, list[str]]:
    """`shapes` with an expression of its own for each dynamic axis, its label, and what had no effect.

    Raises
    ------
    TypeError
        `dim_names` is no ``{argument: {axis: label}}``.
    ValueError
        An argument, path or axis does not exist or is given twice, or axes of one label have different sizes.
    """
    given, unused = _given(shapes, dim_names, signature, template)
    _check_sizes(shapes, given)
    taken = {_name_of(label) for label in given.values()}
    labels: dict[DimExpr, Any] = {}
    leaves: dict[str, TensorLeaf | ConstantLeaf] = {}
    for path, leaf in shapes.leaves.items():
        leaves[path] = leaf
        if isinstance(leaf, TensorLeaf):
            dims = list(leaf.dims)
            for axis in leaf.dynamic:
                dims[axis] = dim = DimExpr.symbol(f"{path}_dim_{axis}")
                if (path, axis) in given:
                    labels[dim] = given[path, axis]
                else:
                    labels[dim] = _unused(symbol_label(dim), taken)
                    taken.add(labels[dim])
            leaves[path] = TensorLeaf(path, leaf.dtype, tuple(dims))
    return (replace(shapes, leaves=leaves), labels.__getitem__), unused


def _given(
    shapes: GraphShapes, dim_names: Mapping[Any, Any], signature: CallSignature, template: Mapping[str, Any]
) -> tuple[dict[_Key, Any], list[str]]:
    """(label by (path, axis) of the dynamic axes that are given one, what had no effect)."""
    found: dict[_Key, Any] = {}
    unused: list[str] = []
    ranks = {leaf.path: len(leaf.dims) for leaf in shapes.tensors()}
    known = [path for name, value in template.items() for path, _ in flatten_with_paths(value, name)]
    seen: dict[str, Any] = {}
    for key, labels in dim_names.items():
        name = argument_named(signature, key)
        if isinstance(key, str) and name not in template:
            name = key  # a path inside an argument
        if name in seen:
            raise ValueError(f"dim_names names {name} twice, as {seen[name]!r} and as {key!r}")
        seen[name] = key
        paths = [path for path in ranks if path == name or path.startswith(f"{name}.")]
        if not paths:
            if name not in known and "." in name:
                raise ValueError(f"dim_names: the calls have no {name!r}{choices(name, ranks)}")
            check_names([name], signature, template, strict=isinstance(key, int))
            unused.append(f"{name}, which is a tensor in no call")
        if not isinstance(labels or {}, Mapping):
            raise TypeError(
                f"Unexpected type {type(labels)} for dim_names[{key!r}]: {{axis: label}} is expected"
            )
        # A path inside an argument says more than the argument.
        deeper = [other for other in map(str, dim_names) if other.startswith(f"{name}.")]
        for axis, label in (labels or {}).items():
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise TypeError(f"Unexpected type {type(axis)} for axis {axis!r} in dim_names[{key!r}]")
            with_axis = [path for path in paths if -ranks[path] <= axis < ranks[path]]
            if paths and not with_axis:
                text = ", ".join(f"{path} has {ranks[path]} axes" for path in paths[:4])
                raise ValueError(f"dim_names[{key!r}] names axis {axis}: {text}")
            places = [(path, axis % ranks[path]) for path in with_axis if not _covered(path, deeper)]
            for place in places:
                if found.setdefault(place, label) is not label and found[place] != label:
                    raise ValueError(
                        f"dim_names gives {_text(place)} two labels, {found[place]!r} and {label!r}"
                    )
            if places and not any(_is_dynamic(shapes, place) for place in places):
                unused.append(f"{_text(places[0])} ({label!r}), which has one size in every call")
    return {place: label for place, label in found.items() if _is_dynamic(shapes, place)}, unused


def _covered(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def _is_dynamic(shapes: GraphShapes, place: _Key) -> bool:
    leaf = shapes.leaves[place[0]]
    return isinstance(leaf, TensorLeaf) and place[1] in leaf.dynamic


def _check_sizes(shapes: GraphShapes, given: Mapping[_Key, Any]) -> None:
    """Axes of one label become one dimension of the program: no call may give them two sizes."""
    places: dict[str, list[_Key]] = {}
    for place, label in given.items():
        name = _name_of(label)
        if name is not None:
            places.setdefault(name, []).append(place)
    for name, axes in places.items():
        for index, sizes in shapes.sizes.items():
            seen: dict[int, _Key] = {}
            for path, axis in axes:
                leaf = shapes.leaves[path]
                assert isinstance(leaf, TensorLeaf)
                dim = leaf.dynamic[axis]
                if all(symbol in sizes for symbol in dim.names):
                    seen.setdefault(dim.evaluate(sizes), (path, axis))
            if len(seen) > 1:
                text = " and ".join(f"{_text(place)} of size {size}" for size, place in seen.items())
                raise ValueError(
                    f"dim_names gives the label {name!r} to axes that differ in call {index}: {text}; axes "
                    "of one label are one dimension: give each a label of its own"
                )


def _name_of(label: Any) -> str | None:
    """What makes two labels one dimension; ``None`` for a hint such as ``Dim.DYNAMIC``: it ties nothing."""
    if isinstance(label, str):
        return label
    return label.__name__ if isinstance(label, torch.export.Dim) else None


def _text(place: _Key) -> str:
    return f"{place[0]} axis {place[1]}"


def _unused(label: str, taken: Container[str | None]) -> str:
    return next(
        text
        for suffix in itertools.chain([""], (f"_{k}" for k in itertools.count(2)))
        if (text := label + suffix) not in taken
    )
