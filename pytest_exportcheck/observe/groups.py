"""Groups of calls, from their structure: what one graph cannot serve, two can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree

from ..pytrees import flatten_with_paths, is_constant
from ..pytrees.caches import is_cache
from .records import RecordedCall

__all__ = ["CallGroup", "groups_as_yaml", "propose_groups"]


@dataclass(frozen=True)
class CallGroup:
    """Calls of one structure.

    Attributes
    ----------
    name:
        ``prefill`` and ``decode`` where a cache tells them apart, otherwise ``graph_0``, ``graph_1``, ...
    indices:
        Of the recorded calls.
    reason:
        What sets the group apart from the first one.
    """

    name: str
    indices: tuple[int, ...]
    reason: str


def _cache_state(value: Any) -> str:
    """``filled``, ``empty``, or whether the cross attention was computed; ``""`` for what is no cache."""
    if hasattr(value, "self_attention_cache"):
        computed = any(getattr(value, "is_updated", {}).values())
        return "cross attention computed" if computed else "cross attention not computed yet"
    if is_cache(value):
        return "filled" if _pytree.tree_leaves(value) else "empty"
    return ""


def _features(call: RecordedCall, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Feature -> value as text; calls with equal features can share a graph."""
    features: dict[str, str] = {}
    for name, value in call.arguments.items():
        state = _cache_state(value)
        if state:
            # An empty cache of a decoder is aligned with the filled ones, one graph serves both.
            if "cross" in state:
                features[name] = state
            continue
        leaves = flatten_with_paths(value, name)
        for path, leaf in leaves:
            if is_constant(leaf):
                if leaf is not None and leaf != defaults.get(path):
                    features[path] = f"{path}={leaf!r}"
            else:
                features[name] = f"{name} given"
    return features


def propose_groups(
    calls: Sequence[RecordedCall], defaults: Mapping[str, Any] | None = None
) -> list[CallGroup]:
    """Calls put together by the arguments they have, their constants, and the state of their caches.

    Needs the flattening functions.

    Returns
    -------
    list of CallGroup
        In order of first appearance; a single group if nothing tells the calls apart.
    """
    defaults = defaults or {}
    found: dict[tuple[tuple[str, str], ...], list[RecordedCall]] = {}
    for call in calls:
        found.setdefault(tuple(sorted(_features(call, defaults).items())), []).append(call)
    keys = list(found)
    groups = []
    for position, (key, members) in enumerate(found.items()):
        first = dict(keys[0])
        mine = dict(key)
        differing = sorted({*first, *mine} - {name for name in mine if first.get(name) == mine[name]})
        reason = ", ".join(mine.get(name, f"no {name}") for name in differing) if position else ""
        groups.append(CallGroup(_name(members, position, len(keys)), tuple(c.index for c in members), reason))
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        groups = [CallGroup(f"graph_{k}", group.indices, group.reason) for k, group in enumerate(groups)]
    return groups


def _name(members: Sequence[RecordedCall], position: int, count: int) -> str:
    states = {_cache_state(value) for call in members for value in call.arguments.values()} - {""}
    if count > 1 and states:
        if states <= {"empty", "cross attention not computed yet"}:
            return "prefill"
        if states <= {"filled", "cross attention computed"}:
            return "decode"
    return f"graph_{position}"


def groups_as_yaml(groups: Sequence[CallGroup]) -> str:
    """The line for a spec: ``observe: {graphs: {prefill: [0], decode: [1, 2]}}``."""
    inner = ", ".join(f"{group.name}: [{', '.join(map(str, group.indices))}]" for group in groups)
    return f"observe: {{graphs: {{{inner}}}}}"
