"""Collecting spec files as test modules, giving tests their cases, and ordering the specs.

A spec file becomes a `pytest.Module` whose object is made here: it holds the built-in suite, whose code
objects name the YAML file and the line of its ``model`` key. Its tests are therefore ordinary Functions.
Nothing in this module imports torch, and YAML is parsed only for the files that are specs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from . import suite
from .cases import CaseId
from .errors import SpecError
from .filepaths import relative_text
from .goldens import FOLDER
from .plan import PlannedCase, is_selected, marker_names
from .plugin import session_of

if TYPE_CHECKING:
    from .session import Session
    from .spec import ModelSpec

__all__ = ["ItemOrder", "SpecFile", "collect_yaml", "parametrize"]


def collect_yaml(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The collector of a YAML file: a spec, or an error if one that is none was named or mistypes its key."""
    from .spec import is_spec_file, mistyped_key

    named = parent.session.isinitpath(path)
    if FOLDER in path.parts:
        why = f"is a file of accepted shapes ({FOLDER}), not a spec: name the spec it belongs to"
    elif is_spec_file(path):
        collector: SpecFile = SpecFile.from_parent(parent, path=path, nodeid=_nodeid(path, parent))
        return collector
    elif mistyped := mistyped_key(path):
        named = True
        why = f"is not a spec: it begins with {mistyped!r}, the first key must be 'exportcheck: 1'"
    else:
        why = "is not a spec: its first key must be 'exportcheck: 1'"
    if not named:
        return None
    refused: _NotASpec = _NotASpec.from_parent(parent, path=path, nodeid=_nodeid(path, parent))
    refused.why = why
    return refused


def _nodeid(path: Path, parent: pytest.Collector) -> str:
    """From the root directory on, also for a file outside of it.

    pytest (9.2) begins such node ids at the argument of the command line, so that a file that is named has
    none, and files of one name in two folders share one.
    """
    return relative_text(path, parent.config.rootpath)


class _NotASpec(pytest.File):
    """A YAML file that was named on the command line, or was meant to be a spec, and is none."""

    why = ""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        raise self.CollectError(f"{_relative(self)} {self.why}")


class SpecFile(pytest.Module):
    """A spec file, as a module with the built-in suite in it."""

    @property
    def spec(self) -> ModelSpec:
        """The spec. Raises `CollectError` with every problem of the file, one a line."""
        from .spec import is_spec_file

        twin = self.path.with_suffix(".yaml")
        if self.path.suffix == ".yml" and is_spec_file(twin):
            shown = self.path.name
            raise self.CollectError(
                f"{_relative(self)}:1:1: {shown} and {twin.name} would share one golden: rename one of them"
            )
        try:
            return session_of(self.config).spec(self.path)
        except SpecError as error:
            raise self.CollectError(str(error)) from None

    def _getobj(self) -> ModuleType:
        spec = self.spec
        module = ModuleType(spec.name, f"The export checks of {spec.relative}.")
        module.__file__ = str(self.path)
        line = spec.line("model")
        for test in suite.BUILTIN_TESTS:
            code = test.__code__.replace(co_filename=str(self.path), co_firstlineno=line)
            setattr(module, test.__name__, FunctionType(code, vars(suite), test.__name__))
        return module

    def funcnamefilter(self, name: str) -> bool:
        # The user's `python_functions` is about their own tests.
        return name.startswith("test_")

    def repr_failure(  # type: ignore[override]
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> Any:
        # Without this, --full-trace shows our frames instead of the user's problems.
        if isinstance(excinfo.value, self.CollectError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


def _relative(node: pytest.Collector) -> str:
    return relative_text(node.path, node.config.rootpath)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a test that uses our fixtures its cases: those of its spec file, or of the specs it names."""
    session = session_of(metafunc.config)
    specs, in_spec_file = _specs_of(metafunc, session)
    if not specs:
        return  # The fixture explains, unless the user's own fixture needs no spec.
    names = [
        name for name in ("export_case", "observed_inputs", "model_spec") if name in metafunc.fixturenames
    ]
    only_spec = names == ["model_spec"]
    kind = "exports" if "export_case" in names else "shapes"
    params = []
    for spec in specs:
        own = [session.mark(name) for name in spec.marks]
        planned = session.planned(spec, kind)
        if only_spec:
            planned = planned[:1]
        for each in planned:
            marks = [*(session.mark(name) for name in marker_names(each.case)), *own]
            if only_spec:
                marks = own
            label = _test_id(each.case, spec, specs, in_spec_file, names)
            params.append(pytest.param(*[each] * len(names), marks=marks, id=label))
    metafunc.parametrize(names, params, indirect=True)


def _test_id(
    case: CaseId, spec: ModelSpec, specs: Sequence[ModelSpec], in_spec_file: bool, names: Sequence[str]
) -> str:
    if in_spec_file:
        return case.label()
    ambiguous = sum(other.name == spec.name for other in specs) > 1
    prefix = spec.relative.rsplit(".", 1)[0] if ambiguous else spec.name
    return prefix if list(names) == ["model_spec"] else f"{prefix}-{case.label()}"


def _specs_of(metafunc: pytest.Metafunc, session: Session) -> tuple[list[ModelSpec], bool]:
    node = metafunc.definition
    spec_file = node.getparent(SpecFile)
    if spec_file is not None:
        return [spec_file.spec], True
    marks = list(node.iter_markers("exportcheck"))
    paths: dict[Path, None] = {}
    for mark in reversed(marks):  # The closest mark comes first, users read them from the top.
        if not mark.args or mark.kwargs:
            _refuse(node, "@pytest.mark.exportcheck takes the paths of spec files")
        for argument in mark.args:
            paths[_find(str(argument), node)] = None
    try:
        return [session.spec(path) for path in paths], False
    except SpecError as error:
        _refuse(node, f"the spec it names cannot be used:\n{error}")


def _find(argument: str, node: pytest.Item) -> Path:
    tried = [Path(node.config.rootpath, argument), Path(node.path.parent, argument)]
    for path in tried:
        if path.is_file():
            return path.resolve()
    _refuse(node, f"no spec file {argument!r} (tried {tried[0]} and {tried[1]})")


def _refuse(node: pytest.Item, message: str) -> NoReturn:
    pytest.fail(f"{node.nodeid}: {message}", pytrace=False)


class ItemOrder:
    """Deselects the cases that the axis options exclude, and starts the longest spec first under xdist."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        # First, so that --ff, --sw and other orderings, which the user asked for, have the last word.
        self._deselect(config, items)
        if self._session.worker is not None:
            self._longest_spec_first(items)

    def _deselect(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        options = self._session.options
        if not (options.exporters or options.patch_modes or options.devices or options.dtypes):
            return
        planned = [(item, self._session.case_of(item)) for item in items]
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item, each in planned:
            (kept if each is None or self._wanted(each) else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept
        if dropped and all(self._session.case_of(item) is None for item in kept):
            # A warning and no error: the run may hold other tests, and every xdist worker comes by here.
            message = self._nobody_names([each.case for _, each in planned if each is not None])
            config.issue_config_time_warning(pytest.PytestWarning(message), stacklevel=2)

    def _nobody_names(self, cases: list[CaseId]) -> str:
        """Which axis option leaves no case, and what the specs name instead."""
        options = self._session.options
        axes = (
            ("--exporter", options.exporters, {case.exporter for case in cases}),
            ("--patch-mode", options.patch_modes, {case.patch_mode for case in cases}),
            ("--export-device", options.devices, {case.device for case in cases}),
            ("--export-dtype", options.dtypes, {case.dtype for case in cases}),
        )
        for option, wanted, there in axes:
            if wanted and not set(wanted) & there:
                known = ", ".join(sorted(name for name in there if name))
                return f"{option} {', '.join(wanted)}: no collected spec names it, they name {known}"
        return "no case has all of the given exporters, patch modes, devices and dtypes"

    def _wanted(self, planned: PlannedCase) -> bool:
        options, case = self._session.options, planned.case
        if case.exporter is not None or not (options.exporters or options.patch_modes):
            return is_selected(case, options)
        # The shapes check runs where one of the exports that rely on it does.
        return any(
            (other.case.device, other.case.dtype) == (case.device, case.dtype)
            and is_selected(other.case, options)
            for other in self._session.planned(planned.spec, "exports")
        )

    def _longest_spec_first(self, items: list[pytest.Item]) -> None:
        """Reorder whole spec files, within the places that spec files have; the same in every worker."""
        blocks: dict[str, list[pytest.Item]] = {}
        places = []
        for place, item in enumerate(items):
            spec_file = item.getparent(SpecFile)
            if spec_file is not None:
                blocks.setdefault(spec_file.nodeid, []).append(item)
                places.append(place)
        seconds = self._session.remembered
        known = [seconds[name] / len(block) for name, block in blocks.items() if name in seconds]
        per_test = sum(known) / len(known) if known else 1.0

        def estimate(entry: tuple[str, list[pytest.Item]]) -> float:
            return -seconds.get(entry[0], per_test * len(entry[1]))

        ordered = [item for _, block in sorted(blocks.items(), key=estimate) for item in block]
        for place, item in zip(places, ordered, strict=True):
            items[place] = item
