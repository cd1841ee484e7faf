"""Rules that involve more than one place of a spec.

They run on the raw data, whether or not its types are right, so that a file with a mistake in one section
still gets every problem of the others told. A rule that meets a wrong type says nothing: `validate` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from ..plurals import counted
from .names import choices, suggest
from .nodes import NodePath, Report
from .target_paths import split_target
from .values import CALL_KINDS, REF, check_ref

__all__ = ["check_rules"]

_SOURCES = ("type", "pretrained", "factory")

#: Keys of `model` that make sense only with some of the sources.
_ONLY_WITH = {
    "auto_class": ("type", "pretrained"),
    "config": ("type",),
    "online": ("pretrained",),
    "revision": ("pretrained",),
    "kwargs": ("factory",),
    "attn_implementation": ("type", "pretrained"),
}

#: Lists in which an item that stands twice is a mistake.
_SETS: tuple[NodePath, ...] = (
    ("requires",),
    ("marks",),
    ("observe", "dims"),
    ("observe", "batch_dims"),
    ("observe", "ignore_calls"),
    ("matrix", "exporters"),
    ("matrix", "patch_modes"),
    ("matrix", "devices"),
    ("matrix", "dtypes"),
)


def check_rules(data: Mapping[str, Any], known: Mapping[str, Sequence[str]], report: Report) -> None:
    """Report whatever breaks a rule.

    Parameters
    ----------
    data:
        The whole file as plain data.
    known:
        Names that exist: ``exporters``, ``patch_modes``, ``comparisons``. A kind that is absent is not
        checked.
    report:
        Where problems go.
    """
    if isinstance(data.get("model"), dict):
        _check_model(data["model"], report)
    observe = _mapping(data.get("observe"))
    _check_graphs(observe, ("observe",), _call_limit(observe), report)
    _check_targets(observe, report)
    for where in _SETS:
        _check_duplicates(_get(data, where), where, report)
    _check_compare(_mapping(data.get("compare")), report)
    resize = data.get("resize")
    for symbol, sizes in _mapping(resize).items():
        _check_duplicates(sizes, ("resize", symbol), report)
    _check_known(data, known, report)
    graphs = _graph_names(observe)
    for index, when in _whens(data):
        _check_graph_condition(when.get("graph"), graphs, ("expect", index, "when", "graph"), report)


def _mapping(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _get(data: Mapping[str, Any], where: NodePath) -> Any:
    current: Any = data
    for part in where:
        current = _mapping(current).get(part)
    return current


def _whens(data: Mapping[str, Any]) -> Iterator[tuple[int, dict[Any, Any]]]:
    expect = data.get("expect")
    for index, item in enumerate(expect if isinstance(expect, list) else []):
        yield index, _mapping(_mapping(item).get("when"))


def _check_model(model: dict[Any, Any], report: Report) -> None:
    sources = [key for key in _SOURCES if key in model]
    if not sources:
        mistyped = any(suggest(key, _SOURCES) for key in model if key not in (*_SOURCES, *_ONLY_WITH))
        if not mistyped:
            report.value(("model",), "needs one of the keys type, pretrained, factory")
        return
    for key in sources:
        if model[key] is None:
            report.value(("model", key), "expected text, got nothing")
    for extra in sources[1:]:
        report.key(
            ("model", extra), f"{extra!r} and {sources[0]!r}: give exactly one of {', '.join(_SOURCES)}"
        )
    if len(sources) == 1:
        for key in model:
            only = _ONLY_WITH.get(key, sources)
            if sources[0] not in only:
                report.key(("model", key), f"{key!r} goes with {' or '.join(only)}, not with {sources[0]}")
    if isinstance(model.get("factory"), str):
        check_ref(model["factory"], ("model", "factory"), report)


#: A rule of `compare` has one of them.
_RULES = ("where", "ties", "by")


def _check_compare(compare: dict[Any, Any], report: Report) -> None:
    for pattern, rule in compare.items():
        if not isinstance(rule, dict):
            continue
        where: NodePath = ("compare", pattern)
        given = [key for key in _RULES if key in rule]
        if not given and not any(suggest(key, _RULES) for key in rule):
            report.value(where, f"needs one of the keys {', '.join(_RULES)}")
        for extra in given[1:]:
            report.key(
                (*where, extra), f"{extra!r} and {given[0]!r}: give exactly one of {', '.join(_RULES)}"
            )
        for key in given:
            if rule[key] is None:
                report.value((*where, key), "expected text, got nothing")
        axis = rule.get("axis")
        if given == ["where"] and isinstance(axis, int) and not isinstance(axis, bool) and axis < 1:
            report.value((*where, "axis"), f"must be at least 1, got {axis}")
        if given == ["by"] and "axis" in rule:
            report.key((*where, "axis"), "'axis' goes with where or ties, not with by")


def _check_graphs(
    section: dict[Any, Any], where: NodePath, limit: tuple[int | None, str], report: Report
) -> None:
    """The groups of one target; `section` is ``observe``, or the target's mapping."""
    graphs, example = section.get("graphs", "one"), section.get("example")
    most, why = limit
    owner: dict[int, str] = {}
    for name, indices in _mapping(graphs).items():
        for position, index in enumerate(indices if isinstance(indices, list) else []):
            here: NodePath = (*where, "graphs", name, position)
            if not _is_index(index):
                continue
            if index in owner:
                twice = "twice in" if owner[index] == name else f"in both {owner[index]!r} and"
                report.value(here, f"call {index} is {twice} {name!r}: a call belongs to one graph")
            elif most is not None and index >= most:
                report.value(here, f"there is no call {index}: {why}")
            owner.setdefault(index, name)
    ignored = section.get("ignore_calls")
    ignored = ignored if isinstance(ignored, list) else []
    for position, index in enumerate(ignored):
        if _is_index(index) and index in owner:
            here = (*where, "ignore_calls", position)
            report.value(here, f"call {index} is in graph {owner[index]!r}: it cannot be ignored as well")
    here = (*where, "example")
    if isinstance(graphs, dict):
        for name, index in _mapping(example).items():
            if name not in graphs:
                report.key((*here, name), f"unknown graph {name!r}{choices(name, graphs)}")
            elif _is_index(index) and isinstance(graphs[name], list) and index not in graphs[name]:
                report.value((*here, name), f"call {index} is not in graph {name!r} ({graphs[name]})")
        if _is_index(example):
            report.value(here, "with several graphs, example is a mapping: {graph: index}")
    elif isinstance(example, dict):
        report.value(here, "with one graph, example is the index of a call")
    elif _is_index(example) and example in ignored:
        report.value(here, f"call {example} is ignored (ignore_calls): it cannot be the example")
    elif _is_index(example) and most is not None and example >= most:
        report.value(here, f"there is no call {example}: {why}")


#: Keys of `observe` that are about one target.
_OF_ONE_TARGET = ("graphs", "value_if_missing", "ignore_calls", "example")


def _check_targets(observe: dict[Any, Any], report: Report) -> None:
    targets = observe.get("target")
    if not isinstance(targets, dict):
        return
    if "path" in targets and set(targets).intersection((*_OF_ONE_TARGET, "batch_dims", "store_n_calls")):
        report.key(
            ("observe", "target", "path"),
            "a mapping gives names to several targets: for one, write its path alone (target: path), and its "
            "rules beside it in 'observe'",
        )
    owner: dict[tuple[str, str], str] = {}
    for name, target in targets.items():
        here: NodePath = ("observe", "target", name)
        path = target
        if isinstance(target, dict):
            path, here = target.get("path"), (*here, "path")
            for at in ("ignore_calls", "batch_dims"):
                _check_duplicates(target.get(at), ("observe", "target", name, at), report)
            _check_graphs(target, ("observe", "target", name), _call_limit(observe), report)
        if not isinstance(path, str):
            continue
        where = split_target(path)
        if where in owner:
            report.value(here, f"{path!r} is the target {owner[where]!r} already")
        owner.setdefault(where, name)
    name = next(iter(targets), "name")
    for key in _OF_ONE_TARGET:
        if key in observe:
            report.key(
                ("observe", key),
                f"{key!r} is about one target, and here are several: write it at the target it is about "
                f"(target: {{{name}: {{path: ..., {key}: ...}}}})",
            )


def _graph_names(observe: dict[Any, Any]) -> list[str]:
    """What `when: {graph: ...}` may name: graphs, and targets for all graphs of theirs."""
    targets = observe.get("target")
    if not isinstance(targets, dict):
        return [str(name) for name in _mapping(observe.get("graphs"))]
    names = []
    for name, target in targets.items():
        groups = _mapping(_mapping(target).get("graphs"))
        names += [str(name), *(f"{name}.{group}" for group in groups)]
    return names


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _call_limit(observe: dict[Any, Any]) -> tuple[int | None, str]:
    """How many calls are made at most, and why; None if only running the model can tell."""
    calls = observe.get("calls")
    if not isinstance(calls, list) or "target" in observe:
        # A submodule may be called several times in one call of the model, or not at all.
        return None, ""
    if any(set(_mapping(call)).intersection(CALL_KINDS) != {"forward"} for call in calls):
        return None, ""
    return len(
        calls
    ), f"{counted(len(calls), 'call')} {'is' if len(calls) == 1 else 'are'} made, counted from 0"


def _check_duplicates(items: object, where: NodePath, report: Report) -> None:
    if not isinstance(items, list):
        return
    seen: list[object] = []
    for index, item in enumerate(items):
        if isinstance(item, list | dict):
            continue
        if item in seen:
            report.value((*where, index), f"{item!r} is in the list twice")
        seen.append(item)


_KINDS = {"exporters": "exporter", "patch_modes": "patch mode", "comparisons": "comparison"}


def _check_known(data: Mapping[str, Any], known: Mapping[str, Sequence[str]], report: Report) -> None:
    named: list[tuple[str, NodePath, object, bool]] = []
    for kind in ("exporters", "patch_modes"):
        listed = _get(data, ("matrix", kind))
        for index, name in enumerate(listed if isinstance(listed, list) else []):
            named.append((kind, ("matrix", kind, index), name, False))
    for pattern, rule in _mapping(data.get("compare")).items():
        named.append(("comparisons", ("compare", pattern, "by"), _mapping(rule).get("by"), False))
    options = _mapping(data.get("exporter_options"))
    named += [("exporters", ("exporter_options", name), name, True) for name in options]
    for index, when in _whens(data):
        for key, kind in (("exporter", "exporters"), ("patch_mode", "patch_modes")):
            where: NodePath = ("expect", index, "when", key)
            value = when.get(key)
            if isinstance(value, list):
                named += [(kind, (*where, at), name, False) for at, name in enumerate(value)]
            else:
                named.append((kind, where, value, False))
    for kind, where, name, is_key in named:
        if kind not in known or not isinstance(name, str) or not name or name in known[kind]:
            continue
        if kind != "exporters" and not is_key and REF.match(name):
            continue  # the user's: file.py:name
        message = f"unknown {_KINDS[kind]} {name!r}{choices(name, known[kind])}"
        if kind == "comparisons" and not known[kind]:
            message += ": no package or conftest.py brings one; one of your own is 'file.py:callable'"
        if is_key:
            report.key(where, message)
        else:
            report.value(where, message)


def _check_graph_condition(value: object, graphs: Sequence[str], where: NodePath, report: Report) -> None:
    names = value if isinstance(value, list) else [value]
    for index, name in enumerate(names):
        here = (*where, index) if isinstance(value, list) else where
        if not isinstance(name, str):
            continue
        if not graphs:
            report.value(here, "observe.graphs and observe.target name no graphs, so no case has one")
        elif name not in graphs:
            report.value(here, f"unknown graph {name!r}{choices(name, graphs)}")
