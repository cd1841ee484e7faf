"""From recorded calls to shapes: which axes are dynamic, which symbol each is, which constants are baked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..dims import DimExpr
from ..errors import ObserveError
from ..keypaths import root_of
from ..pytrees import flatten_with_paths, is_constant
from ..pytrees.caches import is_cache
from ..pytrees.cloning import Unkept
from ..pytrees.paths import render_path, same_constant
from ..spec.names import suggest
from ..user_files import with_user_files
from .records import RecordedCall
from .relations import thin_relations, thin_ties
from .shapes import ConstantLeaf, GraphShapes, TensorLeaf, ValueIfMissing
from .structure import differing_contexts
from .symbols import Axis, name_axes

__all__ = [
    "ConstantLeaf",
    "ConstantsDiffer",
    "GraphShapes",
    "TensorLeaf",
    "container_name",
    "infer_shapes",
]


#: In the place of the default that an argument does not have.
_REQUIRED = object()


class ConstantsDiffer(ObserveError):
    """A constant argument has several values: one graph has one."""


def container_name(value: Any) -> str | None:
    """Class name of a container to be written down, ``None`` for what is no container or tells by its leaves.

    Those are lists, and dicts with names as keys: ``images.0`` is an item of a list.
    """
    if type(value) is list:
        return None if value else "list"
    if type(value) is dict:
        return None if value and all(isinstance(key, str) and not key.isdigit() for key in value) else "dict"
    if _pytree.is_namedtuple_instance(value):
        # torch.export wants that very class where it is given one, and a list of the children for any other
        # class.
        # A golden is for every checkout: no name with a digest of a path.
        return with_user_files(f"namedtuple {type(value).__module__}:{type(value).__qualname__}")
    return type(value).__name__ if _is_node(value) else None


def _is_node(value: Any) -> bool:
    return type(value) in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value)


def _containers(value: Any, path: str, found: dict[str, str]) -> None:
    name = container_name(value)
    if name is not None:
        found.setdefault(path, name)
    if _is_node(value):
        # One level only: each child knows its own kind.
        pairs, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
        for keys, child in pairs:
            _containers(child, render_path(keys, path), found)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _call_text(indices: Sequence[int]) -> str:
    return ("call " if len(indices) == 1 else "calls ") + ", ".join(map(str, indices))


def _check_constant(path: str, values: dict[int, Any]) -> Any:
    """The value that all calls agree on; `ObserveError` names argument, calls and values otherwise."""
    groups: list[tuple[Any, list[int]]] = []
    # Of those that mean the same, the value itself rather than what stands for it.
    for index, value in sorted(values.items(), key=lambda item: isinstance(item[1], Unkept)):
        for known, indices in groups:
            if same_constant(known, value):
                indices.append(index)
                break
        else:
            groups.append((value, [index]))
    if len(groups) > 1:
        text = "; ".join(f"{value!r} in {_call_text(indices)}" for value, indices in groups)
        raise ConstantsDiffer(
            f"argument {path} is a constant that differs between calls ({text}): "
            "it would be baked into the graph" + _as_an_input([value for value, _ in groups]),
            details=[
                "pin it in the calls, or give each value a graph of its own, for instance",
                "  observe: {graphs: {"
                + ", ".join(f"graph_{k}: {indices}" for k, (_, indices) in enumerate(groups))
                + "}}",
            ],
        )
    return groups[0][0]


def _as_an_input(values: Sequence[Any]) -> str:
    """A float can be a tensor instead; an integer may make a shape or a branch, which no tensor serves."""
    if not all(type(value) is float for value in values):
        return ""
    return (
        f"; as a 0-d tensor (torch.tensor({values[0]!r}), in a spec float32[]) it is an input of the program"
    )


def _union(values: Sequence[Any]) -> Any:
    """The value with most leaves; where it has ``None`` or an empty container, what another one has there."""
    best = max(values, key=lambda value: len(_pytree.tree_leaves(value)))
    if not _is_node(best) or is_cache(best):
        return best

    def one_level(value: Any) -> tuple[list[Any], _pytree.TreeSpec]:
        return _pytree.tree_flatten(value, is_leaf=lambda child: child is not value)

    children, spec = one_level(best)
    levels = [one_level(value) for value in values if type(value) is type(best)]
    columns = zip(*(found for found, other in levels if other == spec), strict=True)
    merged = []
    for child, column in zip(children, columns, strict=True):
        there = [item for item in column if item is not None]
        merged.append(_union(there) if there else child)
    if all(new is old for new, old in zip(merged, children, strict=True)):
        return best
    return _pytree.tree_unflatten(merged, spec)


def infer_shapes(
    calls: Sequence[RecordedCall],
    *,
    signature_order: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    batch_dims: bool | Collection[str] = False,
    value_if_missing: ValueIfMissing = lambda name, sizes: None,
    declared: Mapping[tuple[str, int], DimExpr] | None = None,
) -> GraphShapes:
    """Infer what one graph must accept so as to serve `calls`.

    Parameters
    ----------
    calls:
        At least one recorded call.
    signature_order:
        Parameter names in order; extra arguments come after them. One that no call passes counts if something
        stands in for it.
    defaults:
        Value of a constant argument where a call does not pass it.
    batch_dims:
        ``True``: axis 0 of every tensor is dynamic; names: of these arguments only.
    value_if_missing:
        Stand-ins for arguments that some calls lack.
    declared:
        Expressions that the spec gives to axes, by (path, axis): these axes are dynamic, whatever their
        sizes.

    Raises
    ------
    ObserveError
        The calls cannot be served by one graph: ranks, dtypes or constants differ.
    """
    calls = [call.shapes() for call in calls]
    defaults = dict(defaults or {})
    # First without the stand-ins whose sizes are symbols, then with them.
    known_sizes: Mapping[int, Mapping[str, int]] | None = None
    for _ in range(2):
        shapes = _infer(
            calls, signature_order, defaults, batch_dims, value_if_missing, declared or {}, known_sizes
        )
        known_sizes = shapes.sizes
    return shapes


def _infer(
    calls: Sequence[RecordedCall],
    signature_order: Sequence[str],
    defaults: Mapping[str, Any],
    batch_dims: bool | Collection[str],
    value_if_missing: ValueIfMissing,
    declared: Mapping[tuple[str, int], DimExpr],
    known_sizes: Mapping[int, Mapping[str, int]] | None,
) -> GraphShapes:
    # Roots in the order of the first call that has them, merged over the calls.
    roots: dict[str, None] = {}
    for call in sorted(calls, key=lambda c: -len(c.arguments)):
        roots.update(dict.fromkeys(call.arguments))
    some_sizes = None if known_sizes is None else known_sizes[calls[0].index]
    for name in signature_order:
        # What no call passes may still have a stand-in.
        if name not in roots and value_if_missing(name, some_sizes) is not None:
            roots[name] = None
    order = {name: position for position, name in enumerate(signature_order or defaults)}
    template: dict[str, Any] = {}
    paths: dict[str, None] = {}
    values: dict[int, dict[str, Any]] = {call.index: {} for call in calls}
    containers: dict[str, str] = {}
    for root in sorted(roots, key=lambda name: order.get(name, len(order))):
        given: list[Any] = []
        for call in calls:
            value = call.arguments.get(root)
            if value is None:
                sizes = None if known_sizes is None else known_sizes.get(call.index, {})
                value = value_if_missing(root, sizes)
            leaves = dict(flatten_with_paths(value, root))
            values[call.index].update(leaves)
            if value is not None:
                given.append(value)
                _containers(value, root, containers)
        if given:
            template[root] = _union(given)
        elif defaults.get(root, _REQUIRED) is not None:
            # A `None` that says something: the call needs it, and is another one without it.
            template[root] = None
    for root, value in template.items():
        paths.update(dict.fromkeys(path for path, _ in flatten_with_paths(value, root)))
    for call in calls:
        for path in values[call.index]:
            # An argument that is None where its default is another value is a constant like any other.
            says_none = path in call.arguments and defaults.get(path) is not None
            if path not in paths and (values[call.index][path] is not None or says_none):
                if isinstance(values[call.index][path], torch.Tensor):
                    raise ObserveError(
                        f"argument {root_of(path)} has a different structure in {_call_text([call.index])}: "
                        f"it holds {path}, other calls do not"
                    )
                paths[path] = None

    tensors: dict[str, dict[int, torch.Tensor]] = {}
    for path in paths:
        found = {call.index: values[call.index].get(path) for call in calls}
        seen = {index: value for index, value in found.items() if isinstance(value, torch.Tensor)}
        if seen:
            _check_tensors(path, found, seen)
            tensors[path] = seen
            default = defaults.get(path)
            left = [c.index for c in calls if path not in c.arguments and values[c.index].get(path) is None]
            if default is not None and is_constant(default) and left:
                raise ObserveError(
                    f"argument {path} is a tensor in {_call_text(list(seen))} and left to its default, "
                    f"{default!r}, in {_call_text(left)}: one graph has one of them"
                )
    constants: dict[str, Any] = {}
    for path in paths:
        if path in tensors:
            continue
        passed: dict[int, Any] = {}
        for call in calls:
            have = values[call.index]
            if path not in have and _lacks_container(path, have, tensors):
                continue
            # A call that says None means None; one that says nothing means the default.
            left_out = have.get(path) is None and path not in call.arguments
            passed[call.index] = defaults.get(path) if left_out else have.get(path)
        constants[path] = _check_constant(path, passed)

    axes = _axes(calls, tensors, batch_dims, declared)
    names = name_axes(axes, declared)
    if known_sizes is None:
        _check_stand_in_symbols(calls, axes, declared, value_if_missing)
    leaves_out: dict[str, TensorLeaf | ConstantLeaf] = {}
    for path in paths:
        if path in constants:
            # The value a parameter has anyway says nothing about the graph.
            is_default = path in defaults and same_constant(constants[path], defaults[path])
            # A `None` inside a container is a leaf of it, and counts where shapes are handed out leaf by
            # leaf; one in the place of another default is a constant like any other.
            says = constants[path] is not None or path != root_of(path) or defaults.get(path) is not None
            if not is_default and says:
                leaves_out[path] = ConstantLeaf(path, constants[path])
            continue
        first = next(iter(tensors[path].values()))
        dims = tuple(names.get((path, axis), size) for axis, size in enumerate(first.shape))
        leaves_out[path] = TensorLeaf(path, _dtype_name(first), dims)
    shapes = GraphShapes(
        leaves_out,
        containers,
        _sizes(calls, axes, names),
        value_if_missing=value_if_missing,
        template=template,
    )
    shapes.limits = _limits(shapes)
    shapes.thin = thin_relations(axes, names, declared, shapes.sizes)
    shapes.ties = thin_ties(axes, names, declared)
    for root in template:
        shapes.warnings += differing_contexts(root, {call.index: call.arguments.get(root) for call in calls})
    if len(calls) == 1:
        shapes.warnings.append("only one call was observed: an axis can be dynamic only through batch_dims")
    return shapes


def _lacks_container(path: str, have: Collection[str], tensors: Collection[str]) -> bool:
    """Whether a call that has the leaves `have` lacks the container around `path`, tensors included.

    Then its constants are missing and no other ones: the tensors decide what becomes of such a call.
    """
    parent = path
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent in have:
            return any(other.startswith(parent + ".") for other in tensors)
    return False


def _check_tensors(path: str, found: Mapping[int, Any], seen: Mapping[int, torch.Tensor]) -> None:
    other = {i: v for i, v in found.items() if not isinstance(v, torch.Tensor) and v is not None}
    if other:
        index, value = next(iter(other.items()))
        raise ObserveError(
            f"argument {path} is a tensor in {_call_text(list(seen))} and {type(value).__name__} "
            f"({value!r:.60}) in {_call_text([index])}"
        )
    for what, of in (
        ("rank", lambda t: t.dim()),
        ("dtype", _dtype_name),
        ("device", lambda t: str(t.device)),
    ):
        kinds: dict[Any, list[int]] = {}
        for index, tensor in seen.items():
            kinds.setdefault(of(tensor), []).append(index)
        if len(kinds) > 1:
            text = "; ".join(f"{kind} in {_call_text(indices)}" for kind, indices in kinds.items())
            raise ObserveError(f"argument {path} changes its {what}: {text}; one graph cannot serve both")


def _axes(
    calls: Sequence[RecordedCall],
    tensors: Mapping[str, Mapping[int, torch.Tensor]],
    batch: bool | Collection[str],
    declared: Mapping[tuple[str, int], DimExpr],
) -> list[Axis]:
    """The dynamic axes, each with its size in every call (``None``: not known)."""
    axes = []
    for path, seen in tensors.items():
        rank = next(iter(seen.values())).dim()
        for axis in range(rank):
            sizes: dict[int, int | None] = {i: tensor.shape[axis] for i, tensor in seen.items()}
            distinct = set(sizes.values())
            is_batch = axis == 0 and (
                batch is True or (not isinstance(batch, bool) and root_of(path) in batch)
            )
            for call in calls:
                if call.index in sizes:
                    continue
                # An empty cache: as many leaves as in later calls, of length 0 (axis 2 of keys and values).
                # States of linear attention have no length.
                is_length = path.endswith((".keys", ".values")) and rank == 4
                empty = is_length and is_cache(call.arguments.get(root_of(path)))
                sizes[call.index] = 0 if empty and axis == 2 else None
                if empty and axis == 2:
                    distinct.add(0)
            if len(distinct) > 1 or is_batch or (path, axis) in declared:
                axes.append(Axis(path, axis, rank, sizes, is_batch))
    return axes


def _check_stand_in_symbols(
    calls: Sequence[RecordedCall],
    axes: Sequence[Axis],
    declared: Mapping[tuple[str, int], DimExpr],
    value_if_missing: ValueIfMissing,
) -> None:
    """Refuse a symbol that only a stand-in declares, and that is another one or looks like one there is.

    Its axis would take the others of its sizes along, under the misspelt name. What makes stand-ins knows
    where they are written, and refuses a symbol without a size.
    """
    for (root, place), dim in declared.items():
        if len(dim.terms) > 1 or dim.offset:
            continue
        symbol = dim.names[0]
        others = {k: each for k, each in declared.items() if k[0] != root or symbol not in each.names}
        if any(symbol in each.names for each in others.values()):
            continue
        names = name_axes(axes, others)
        known = {name for each in names.values() for name in each.names}
        sizes = _sizes(calls, axes, names)
        if symbol not in known and suggest(symbol, known):
            lacking = [call for call in calls if call.arguments.get(root) is None]
            value_if_missing(root, sizes[(lacking or calls)[0].index])
        for index, size in next((a.sizes for a in axes if a.key == (root, place)), {}).items():
            other = sizes[index].get(symbol, size)
            if size is not None and other != size and value_if_missing(root, sizes[index]) is not None:
                raise ObserveError(
                    f"what stands in for {root} calls its axis {place} {symbol!r}, which is {other} in call "
                    f"{index}, where {root} has {size}"
                )


def _sizes(
    calls: Sequence[RecordedCall],
    axes: Sequence[Axis],
    names: Mapping[tuple[str, int], DimExpr],
) -> dict[int, dict[str, int]]:
    sizes: dict[int, dict[str, int]] = {call.index: {} for call in calls}
    for axis in axes:
        dim = names[axis.key]
        if len(dim.terms) == 1 and not dim.offset:
            for index, size in axis.sizes.items():
                if size is not None:
                    sizes[index].setdefault(dim.names[0], size)
    return sizes


def _limits(shapes: GraphShapes) -> dict[str, int]:
    limits: dict[str, int] = {}

    def visit(value: Any, path: str) -> None:
        for name in ("self_attention_cache", "cross_attention_cache"):
            if hasattr(value, name):
                visit(getattr(value, name), f"{path}.{name}")
        layers = getattr(value, "layers", None)
        # A constant may have a number there.
        for index, layer in enumerate(layers if isinstance(layers, (list, tuple)) else ()):
            window = getattr(layer, "sliding_window", None)
            leaf = shapes.leaves.get(f"{path}.layers.{index}.keys")
            if isinstance(window, int) and isinstance(leaf, TensorLeaf) and len(leaf.dims) == 4:
                dim = leaf.dims[2]
                if isinstance(dim, DimExpr) and len(dim.terms) == 1:
                    name = dim.names[0]
                    limits[name] = min(limits.get(name, window - 1), window - 1)

    for root, value in shapes.template.items():
        visit(value, root)
    # A patch mode may keep what the layer would drop: then the window is no limit.
    return {
        n: limit for n, limit in limits.items() if all(s.get(n, 0) <= limit for s in shapes.sizes.values())
    }
