"""The `expect` list of a spec: which failures are known, and how they become native strict xfails.

An item names the cases it is about (`when`) and the stage at which they fail. The first item that applies
to a case wins. Version keys (``torch: ">=2.14"``) are compared with the installed distributions; nothing is
imported for it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from .cases import CaseId
from .errors import Problem
from .plan import export_cases, shape_cases

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .spec.model import When

__all__ = ["VERSION_KEYS", "Expectation", "expectation_for", "expectation_problems"]

_AXES = ("exporter", "patch_mode", "device", "dtype", "graph")
VERSION_KEYS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "python")

#: Stages that a shapes check can fail at.
_SHAPES_CHECK = ("load", "observe", "shapes")


@dataclass(frozen=True)
class Expectation:
    """A known failure of a case.

    Attributes
    ----------
    stage:
        Where it fails.
    reason:
        Why, in the spec author's words.
    line:
        1-based line of the item in the spec.
    """

    stage: str
    reason: str
    line: int


def expectation_for(spec: ModelSpec, case: CaseId) -> Expectation | None:
    """The first item of the spec that applies to `case` with the installed versions."""
    for index, item in enumerate(spec.expect):
        when = _given(item.when)
        if _applies(item.fails, when, case) and _versions_hold(when):
            return Expectation(item.fails, item.reason, spec.location("expect", index)[0])
    return None


def expectation_problems(spec: ModelSpec) -> list[Problem]:
    """Items that can never apply: their `when` matches no case, or earlier items take every case."""
    if not spec.expect:
        return []
    cases = [*shape_cases(spec), *export_cases(spec)]
    taken: set[CaseId] = set()
    problems = []
    for index, item in enumerate(spec.expect):
        when = _given(item.when)
        matched = {case for case in cases if _applies(item.fails, when, case)}
        if not matched:
            message = f"when {_show(when)} matches no case of this spec ({_axes_of(cases)})"
        elif matched <= taken:
            message = f"when {_show(when)} never applies: earlier items match all of its cases"
        else:
            message = None
        if message:
            problems.append(Problem(spec.relative, *spec.location("expect", index, "when"), message))
        if not any(key in when for key in VERSION_KEYS):
            taken |= matched
    return problems


def _given(when: When) -> dict[str, tuple[str, ...]]:
    """The conditions of `when` that were written, by key."""
    values = {key: tuple(getattr(when, key)) for key in (*_AXES, *VERSION_KEYS)}
    return {key: value for key, value in values.items() if value}


def _applies(stage: str, when: Mapping[str, tuple[str, ...]], case: CaseId) -> bool:
    names_program = "exporter" in when or "patch_mode" in when
    if case.exporter is None:
        if stage not in _SHAPES_CHECK or names_program:
            return False
    elif stage == "shapes" and not names_program:
        # Accepted shapes are compared once per spec, by the shapes check; the exports do not fail with it.
        return False
    return all(
        _names_of(case, axis).intersection(when[axis])
        for axis in _AXES
        if axis in when and not (axis == "graph" and case.exporter is None)
    )


def _names_of(case: CaseId, axis: str) -> set[str]:
    """What a condition may call the case's value: a graph (`decoder.prefill`) also by its target."""
    value = getattr(case, axis)
    return {value, value.partition(".")[0]} if axis == "graph" and value is not None else {value}


def _versions_hold(when: Mapping[str, tuple[str, ...]]) -> bool:
    for key in VERSION_KEYS:
        installed = _installed(key) if key in when else None
        if key in when and (
            installed is None
            or not any(SpecifierSet(value).contains(installed, prereleases=True) for value in when[key])
        ):
            return False
    return True


@cache
def _installed(package: str) -> str | None:
    if package == "python":
        return platform.python_version()
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _show(when: Mapping[str, tuple[str, ...]]) -> str:
    return "{" + ", ".join(f"{key}: {', '.join(values)}" for key, values in when.items()) + "}"


def _axes_of(cases: Iterable[CaseId]) -> str:
    parts = []
    for axis in _AXES:
        values = dict.fromkeys(getattr(case, axis) for case in cases if getattr(case, axis) is not None)
        if values:
            parts.append(f"{axis}: {', '.join(values)}")
    return "; ".join(parts)
