"""Groups of calls, from their structure: what one graph cannot serve, two can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import ObserveError
from ..pytrees import flatten_with_paths, is_constant
from ..pytrees.caches import is_cache
from ..pytrees.hidden import hidden_tensors, how_to_show
from ..pytrees.paths import render_path
from .infer import infer_shapes
from .records import RecordedCall
from .shapes import GraphShapes

__all__ = ["CallGroup", "groups_as_yaml", "item_counts", "propose_groups", "serve"]

#: So many differences a reason tells.
_MOST_REASONS = 3


@dataclass(frozen=True)
class CallGroup:
    """Calls that one graph can serve.

    Attributes
    ----------
    name:
        ``prefill`` and ``decode`` where a cache tells them apart, otherwise ``graph_0``, ``graph_1``, ...
    indices:
        Of the recorded calls, ascending.
    reason:
        What sets the group apart from the first one.
    """

    name: str
    indices: tuple[int, ...]
    reason: str


def serve(calls: Sequence[RecordedCall], **options: Any) -> GraphShapes:
    """What one graph must accept so as to serve `calls`; `options` as for `infer_shapes`.

    Needs the flattening functions.

    Raises
    ------
    ObserveError
        No graph can: the calls are of different structure, one lacks what others have, or an argument holds
        tensors of which torch does not know.
    """
    _refuse_two_cross_attentions(calls)
    _refuse_hidden_tensors(calls)
    try:
        shapes = infer_shapes(calls, **options)
        for call in calls:
            shapes.complete(call)  # one that lacks an argument can be fed to no program
    except ObserveError as error:
        for path, counts in item_counts(calls).items():
            if f"{path}." in error.message:
                # That it has no `images.2` would say less, and advise a stand-in that nobody can write.
                held = "; ".join(f"{n} in {_call_text(indices)}" for n, indices in counts.items())
                raise ObserveError(
                    f"argument {path} holds a varying number of items ({held}): a program takes a fixed "
                    "number of tensors",
                    facts=error.facts,
                ) from error
        raise
    return shapes


def item_counts(calls: Sequence[RecordedCall]) -> dict[str, dict[int, list[int]]]:
    """Path of each list or tuple whose length differs between the calls -> length -> indices of calls."""
    counts: dict[str, dict[int, list[int]]] = {}
    for call in calls:
        for (path, aspect), text in _outline(call, {}).items():
            if aspect == "items":
                counts.setdefault(path, {}).setdefault(int(text.split()[-1]), []).append(call.index)
    return {path: found for path, found in counts.items() if len(found) > 1}


def _call_text(indices: Sequence[int]) -> str:
    return ("call " if len(indices) == 1 else "calls ") + ", ".join(map(str, indices))


def _refuse_hidden_tensors(calls: Sequence[RecordedCall]) -> None:
    """To torch an object that is no pytree node is a constant, with all that it holds."""
    for call in calls:
        for name, value in call.shapes().arguments.items():
            for path, leaf in flatten_with_paths(value, name):
                if found := hidden_tensors(leaf, path):
                    more = " and more" if len(found) > _MOST_REASONS else ""
                    raise ObserveError(
                        f"argument {path} is a {type(leaf).__name__}, a constant and no container to "
                        f"torch.export, and holds tensors ({', '.join(found[:_MOST_REASONS])}{more}): no "
                        "program can be given them",
                        details=[how_to_show(leaf)],
                    )


def _refuse_two_cross_attentions(calls: Sequence[RecordedCall]) -> None:
    """A cross attention that is computed and one that is read from the cache are two branches of the code."""
    for name in dict.fromkeys(name for call in calls for name in call.shapes().arguments):
        computed: dict[bool, list[int]] = {}
        for call in calls:
            updated = getattr(call.shapes().arguments.get(name), "is_updated", None)
            if updated is not None:
                computed.setdefault(any(updated.values()), []).append(call.index)
        if len(computed) > 1:
            raise ObserveError(
                f"argument {name}: the cross attention is computed in {_call_text(computed[False])} and "
                f"read from the cache in {_call_text(computed[True])}: two branches of the model, "
                "one graph has one of them"
            )


# the structure of a call

#: (path, aspect) -> text. Aspects: ``given`` (a tensor or a container), ``value`` (of a constant), ``kind``
#: (a container's class), ``items`` (of a list), ``keys`` (of a dict), ``rank``, ``dtype``, ``device``,
#: ``cross`` and ``cache``.
_Outline = dict[tuple[str, str], str]

#: Aspects that torch.export bakes into a program, whatever tensors a container holds.
_CONTAINER = ("kind", "items", "keys")

#: States of the cache of an encoder-decoder: the first call fills it, the others read what it holds.
_COMPUTED = "cross attention computed"
_READ = "cross attention read from the cache"


def _cache_state(value: Any) -> str:
    """``filled``, ``empty``, or what the call does about the cross attention; ``""`` for what is no cache."""
    if hasattr(value, "self_attention_cache"):
        return _READ if any(getattr(value, "is_updated", {}).values()) else _COMPUTED
    if is_cache(value):
        return "filled" if _pytree.tree_leaves(value) else "empty"
    return ""


def _is_node(value: Any) -> bool:
    return type(value) in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value)


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    pairs, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    for keys, child in pairs:
        yield render_path(keys, path), child


def _add_tensor(path: str, tensor: torch.Tensor, found: _Outline) -> None:
    found[path, "rank"] = f"{path} has rank {tensor.dim()}"
    found[path, "dtype"] = f"{path} is {str(tensor.dtype).removeprefix('torch.')}"
    found[path, "device"] = f"{path} is on {tensor.device}"


def _add(path: str, value: Any, found: _Outline) -> None:
    state = _cache_state(value)
    if state:
        found[path, "cross" if "cross" in state else "cache"] = (
            state if "cross" in state else f"{path} {state}"
        )
        # An empty cache of a decoder has no leaves and is served by the graph of the filled ones.
        for leaf_path, leaf in flatten_with_paths(value, path):
            if isinstance(leaf, torch.Tensor):
                _add_tensor(leaf_path, leaf, found)
    elif isinstance(value, torch.Tensor):
        found[path, "given"] = f"{path} given"
        _add_tensor(path, value, found)
    elif _is_node(value):
        found[path, "given"] = f"{path} given"
        found[path, "kind"] = f"{path} is of class {type(value).__name__}"
        children = list(_children(value, path))
        if isinstance(value, (list, tuple)) and not _pytree.is_namedtuple_instance(value):
            found[path, "items"] = f"{path} holds {len(children)}"
        if isinstance(value, dict):
            found[path, "keys"] = f"{path} has the keys {', '.join(sorted(map(str, value)))}"
        for child_path, child in children:
            _add(child_path, child, found)
    elif value is not None:
        shown = repr(value) if is_constant(value) else f"a {type(value).__name__}"
        found[path, "value"] = f"{path}={shown if len(shown) <= 40 else shown[:37] + '...'}"


def _outline(call: RecordedCall, defaults: Mapping[str, Any], skip: Collection[str] = ()) -> _Outline:
    """The structure of a call; without arguments that have their default, and without those of `skip`."""
    found: _Outline = {}
    arguments = call.shapes().arguments
    for name in dict.fromkeys([*arguments, *defaults]):
        value = arguments.get(name)
        default = defaults.get(name)
        if name in skip:
            continue
        if value is None and name in arguments and default is not None:
            found[name, "value"] = f"{name}=None"
        elif value is not None and not (
            is_constant(value) and is_constant(default) and _same(value, default)
        ):
            _add(name, value, found)
    return found


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _reason(
    mine: Sequence[_Outline], first: Sequence[_Outline], defaults: Mapping[str, Any], fallback: str
) -> str:
    """What all calls of a group have otherwise than those of the first one, from the outside inwards."""
    texts: dict[tuple[str, str], str] = {}
    for key in dict.fromkeys(key for outline in (*mine, *first) for key in outline):
        path, aspect = key
        here, there = ({outline.get(key) for outline in outlines} for outlines in (mine, first))
        if here & there or (aspect not in ("given", "value") and None in here | there):
            continue
        absent_text = f"no {path}" if defaults.get(path) is None else f"{path}={defaults[path]!r}"
        texts[key] = min(text or absent_text for text in here)
    absent = {path for path, aspect in texts if aspect in ("given", "value")}
    shown = {}
    for (path, aspect), text in texts.items():
        parts = path.split(".")
        parents = {".".join(parts[:n]) for n in range(1, len(parts))}
        # The length of a list tells more than which items are not there.
        counted = any((parent, "items") in texts for parent in parents)
        if not parents & absent and not counted and (path not in absent or aspect in ("given", "value")):
            shown[path, aspect] = text
    strong = [text for (_, aspect), text in shown.items() if aspect not in ("cache", "keys")]
    listed = list(dict.fromkeys(strong or shown.values()))
    more = f" and {len(listed) - _MOST_REASONS} more" if len(listed) > _MOST_REASONS else ""
    return (", ".join(listed[:_MOST_REASONS]) or fallback) + more


# groups


def propose_groups(
    calls: Sequence[RecordedCall],
    defaults: Mapping[str, Any] | None = None,
    serves: Callable[[Sequence[RecordedCall]], object] | None = None,
    stand_ins: Collection[str] = (),
) -> list[CallGroup]:
    """As few groups as a first fit finds, each of which one graph can serve.

    Calls of one structure (the arguments they have and what these hold, constants, states of caches) are
    tried together, then with the groups there are. Calls whose containers differ in class, length or keys are
    kept apart even where their tensors agree (a list and a tuple): an ExportedProgram refuses them.

    Needs the flattening functions.

    Parameters
    ----------
    defaults:
        Of the arguments.
    serves:
        Raises `ObserveError` for calls that one graph cannot serve; `serve` with `defaults` by default.
    stand_ins:
        Arguments that may be missing: no reason for a group.

    Returns
    -------
    list of CallGroup
        In order of first appearance; empty if a call cannot be
        served at all, which no grouping changes.
    """
    known = dict(defaults or {})
    check = serves or (lambda some: serve(some, defaults=known))

    def fits(some: Sequence[RecordedCall]) -> bool:
        try:
            check(sorted(some, key=lambda call: call.index))
        except ObserveError:
            return False
        return True

    def same_containers(some: Sequence[RecordedCall]) -> bool:
        containers: dict[tuple[str, str], str] = {}
        return all(
            containers.setdefault(key, text) == text
            for call in some
            for key, text in outlines[call.index].items()
            if key[1] in _CONTAINER
        )

    outlines = {call.index: _outline(call, known, stand_ins) for call in calls}
    blocks: dict[frozenset[Any], list[RecordedCall]] = {}
    for call in calls:
        blocks.setdefault(frozenset(outlines[call.index].items()), []).append(call)
    groups: list[list[RecordedCall]] = []
    for block in blocks.values():
        # What an outline does not tell, such as attributes of objects, can set apart the calls of a block.
        for piece in [block] if fits(block) else [[call] for call in block]:
            home = next((g for g in groups if same_containers([*g, *piece]) and fits([*g, *piece])), None)
            if home is not None:
                home += piece
            elif len(piece) > 1 or fits(piece):
                groups.append(list(piece))
            else:
                return []
    groups = [sorted(group, key=lambda call: call.index) for group in groups]
    groups.sort(key=lambda group: group[0].index)
    names = _names(groups)
    first = [outlines[call.index] for call in groups[0]]
    return [
        CallGroup(
            name,
            tuple(call.index for call in group),
            _reason([outlines[call.index] for call in group], first, known, f"not as in {names[0]}")
            if k
            else "",
        )
        for k, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def _names(groups: Sequence[Sequence[RecordedCall]]) -> list[str]:
    names: list[str] = []
    for position, members in enumerate(groups):
        arguments = (value for call in members for value in call.shapes().arguments.values())
        states = {_cache_state(value) for value in arguments} - {""}
        name = f"graph_{position}"
        if len(groups) > 1 and states:
            if states <= {"empty", _COMPUTED}:
                name = "prefill"
            elif states <= {"filled", _READ}:
                name = "decode"
        count = sum(other.rpartition("_")[0] == name or other == name for other in names)
        names.append(f"{name}_{count + 1}" if count else name)
    return names


def groups_as_yaml(groups: Sequence[CallGroup], examples: Collection[int] = ()) -> str:
    """The keys for a spec: ``graphs: {prefill: [0], decode: [1, 2]}``, and ``example`` for chosen calls."""
    inner = ", ".join(f"{group.name}: [{', '.join(map(str, group.indices))}]" for group in groups)
    chosen = {group.name: index for group in groups for index in examples if index in group.indices}
    text = f"graphs: {{{inner}}}"
    if chosen:
        text += ", example: {" + ", ".join(f"{name}: {index}" for name, index in chosen.items()) + "}"
    return text
