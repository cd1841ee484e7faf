"""What one pytest process knows of its run: options, specs read so far, the case that is running.

Made once per process by `start`, in the controller as well as in every worker, and found again through
`plugin.session_of(config)`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .cache_settings import CacheSettings
from .crashes import StageMarker, StageMarkers, running_in_workers
from .errors import SpecError
from .garbage import Garbage
from .options import DEVICES, DTYPES, Options
from .plan import OWN_PATCHES, PlannedCase, export_cases, marker, shape_cases
from .registry import (
    COMPARISONS,
    EXPORTERS,
    PATCH_MODES,
    comparison_names,
    exporter_names,
    patch_mode_names,
)

if TYPE_CHECKING:
    from .fresh.client import FreshProcesses
    from .judge import Confirmation
    from .spec import ModelSpec

__all__ = ["RunningCase", "Session", "register_added", "start"]


@dataclass
class RunningCase:
    """The test that runs now, if it is about a case.

    Attributes
    ----------
    nodeid, file, line:
        The test and where it is (1-based line).
    planned:
        Its case and spec.
    record:
        Filled while it runs; becomes the case's record in the reports.
    stage:
        The stage entered last; ``load`` before any.
    checked:
        The check of the case came to its end. A test that passes without it says nothing about the case.
    """

    nodeid: str
    file: str
    line: int
    planned: PlannedCase
    markers: StageMarkers | None = None
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    stage: str = "load"
    checked: bool = False
    _entered: tuple[str, float, float] | None = field(default=None, repr=False)
    _durations: dict[str, dict[str, float]] = field(default_factory=dict, repr=False)

    def enter(self, stage: str) -> None:
        """Note that `stage` starts now. Called by the engine; cheap (a clock and one small file)."""
        self._leave()
        self.stage = stage
        self._entered = (stage, time.perf_counter(), time.process_time())
        if self.markers is not None:
            self.markers.write(StageMarker(self.nodeid, self.planned.case, stage, self.file, self.line))

    def durations(self) -> dict[str, dict[str, float]]:
        """Wall and CPU seconds per stage so far."""
        self._leave()
        return self._durations

    @property
    def stage_seconds(self) -> float:
        """How long the stage has been running."""
        entered = self._entered
        return 0.0 if entered is None else time.perf_counter() - entered[1]

    def _leave(self) -> None:
        if self._entered is None:
            return
        stage, wall, cpu = self._entered
        self._entered = None
        total = self._durations.setdefault(stage, {"wall_s": 0.0, "cpu_s": 0.0})
        total["wall_s"] += time.perf_counter() - wall
        total["cpu_s"] += time.process_time() - cpu


class Session:
    """State of this process.

    Attributes
    ----------
    options:
        The options of the run.
    worker:
        Index of this xdist worker, ``None`` in the controller and without xdist.
    running:
        The case that runs now.
    markers:
        Where this worker leaves its stage markers, ``None`` without xdist.
    stages_of_workers:
        In the controller of workers: the folder of their stage markers.
    remembered:
        Spec path -> seconds of an earlier run, the same in every worker.
    judged:
        The cases judged in this process so far, in order.
    confirmations:
        What fresh processes said about failures that several cases share, by what they share.
    garbage:
        When this process looks for it.
    """

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self.config = config
        self.options = options
        self.running: RunningCase | None = None
        self.markers: StageMarkers | None = None
        self.remembered: dict[str, float] = {}
        self.worker: int | None = None
        self.judged: list[str] = []
        self.confirmations: dict[tuple[str | None, ...], Confirmation] = {}
        self.stages_of_workers: Path | None = None
        self.garbage = Garbage()
        config.add_cleanup(self.garbage.bring_back)
        self._fresh: FreshProcesses | None = None
        self.note_environment()
        self.exporters = exporter_names()
        self.patch_modes = patch_mode_names()
        self.comparisons = comparison_names()
        self._specs: dict[Path, ModelSpec | SpecError] = {}
        self._planned: dict[tuple[Path, str], list[PlannedCase]] = {}
        self._markers: set[str] = set()

    def note_environment(self) -> None:
        """Remember what fresh processes inherit, before tests change it."""
        self._environment, self._path = dict(os.environ), list(sys.path)

    @property
    def fresh(self) -> FreshProcesses:
        """Runs cases in fresh processes; starts none before it is asked to."""
        if self._fresh is None:
            from .fresh.client import FreshProcesses

            self._fresh = FreshProcesses(self.config, self._environment, self._path)
            self.config.add_cleanup(self._fresh.close)
        return self._fresh

    def cache_settings(self) -> CacheSettings | None:
        """Where conversions are kept, ``None`` where they are not.

        What a conftest file does to torch may change a conversion: its text is part of every key.
        """
        folder, megabytes = self.options.cache, self.options.cache_mb
        if folder is None:
            return None
        files = {str(getattr(plugin, "__file__", "")) for plugin in self.config.pluginmanager.get_plugins()}
        texts = sorted(Path(file).read_bytes() for file in files if Path(file).name == "conftest.py")
        digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
        return CacheSettings(folder, int(megabytes * 1e6), digest)

    def long_stages(self, least: float) -> list[tuple[float, str, str]]:
        """(seconds, stage, case) of what has been running for `least` seconds, here or in workers."""
        found = [entry for entry in _running_stages(self) if entry[0] >= least]
        return sorted(found, reverse=True)

    def spec(self, path: Path) -> ModelSpec:
        """The spec at `path`, read once per process. Raises `SpecError` with every problem of the file."""
        if path not in self._specs:
            self._specs[path] = self._read(path)
        spec = self._specs[path]
        if isinstance(spec, SpecError):
            raise spec
        return spec

    def planned(self, spec: ModelSpec, kind: str) -> list[PlannedCase]:
        """The cases of `spec`: its ``"shapes"`` checks or its ``"exports"``; the same objects every time."""
        key = (spec.path, kind)
        if key not in self._planned:
            cases = shape_cases(spec) if kind == "shapes" else export_cases(spec)
            self._planned[key] = [PlannedCase(spec, case) for case in cases]
        return self._planned[key]

    def mark(self, name: str) -> pytest.MarkDecorator:
        """``pytest.mark.<name>``, declared first so that ``--strict-markers`` accepts it."""
        self.declare_marker(name, "tests of the specs that carry this mark")
        decorator: pytest.MarkDecorator = getattr(pytest.mark, name)
        return decorator

    def declare_marker(self, name: str, what: str) -> None:
        """Add `name` to the registered markers, once, unless the user's configuration has it."""
        if name in self._markers:
            return
        self._markers.add(name)
        known = {str(line).split(":")[0].split("(")[0].strip() for line in self.config.getini("markers")}
        if name not in known:
            self.config.addinivalue_line("markers", f"{name}: {what}")

    def _read(self, path: Path) -> ModelSpec | SpecError:
        from .expectations import expectation_problems
        from .spec import load_spec

        try:
            spec = load_spec(
                path,
                self.config.rootpath,
                known={
                    "exporters": self.exporters,
                    "patch_modes": self.patch_modes,
                    "comparisons": self.comparisons,
                },
            )
        except SpecError as error:
            return error
        problems = expectation_problems(spec)
        return SpecError(problems) if problems else spec

    def case_of(self, item: pytest.Item) -> PlannedCase | None:
        """The case that `item` is about, from its parameters."""
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            return None
        for name in ("export_case", "observed_inputs"):
            planned = callspec.params.get(name)
            if isinstance(planned, PlannedCase):
                return planned
        return None


def _running_stages(session: Session) -> Iterator[tuple[float, str, str]]:
    if session.running is not None:
        yield session.running.stage_seconds, session.running.stage, str(session.running.planned.case)
    if session.stages_of_workers is not None:
        for seconds, marker_of in running_in_workers(session.stages_of_workers):
            yield seconds, marker_of.stage, str(marker_of.case)


def _shown_plugin(impl: Any) -> str:
    return str(getattr(impl.plugin, "__file__", None) or impl.plugin_name)


def _described(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:120]


def register_added(config: pytest.Config) -> None:
    """Register the exporters, patch modes and comparisons that hooks add, until the end of the run."""
    for registry, hook in (
        (EXPORTERS, config.hook.pytest_exportcheck_exporters),
        (PATCH_MODES, config.hook.pytest_exportcheck_patch_modes),
        (COMPARISONS, config.hook.pytest_exportcheck_comparisons),
    ):
        # Pluggy calls the last registered implementation first; the most specific one must win.
        for added in reversed(hook(config=config)):
            if not isinstance(added, Mapping) or not all(isinstance(name, str) for name in added):
                where = ", ".join(_shown_plugin(impl) for impl in hook.get_hookimpls())
                raise pytest.UsageError(
                    f"{hook.name} returned {_described(added)}, not {{name: what it stands for}} ({where})"
                )
            for name, value in added.items():
                registry.register(name, value)
                config.add_cleanup(lambda registry=registry, name=name: registry.unregister(name))  # type: ignore[misc]


def start(config: pytest.Config) -> Session:
    """Make the state of this process and register the plugins that run, collect and report cases."""
    from . import collection, runtest

    register_added(config)
    options = Options.from_config(config)
    session = Session(config, options)
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workerinput is None:
        options.check(session.exporters, session.patch_modes)
    _declare_markers(session)
    if options.flag:
        # A bad spec is the problem of that spec; the others still run.
        config.option.continue_on_collection_errors = True
    manager = config.pluginmanager
    manager.register(collection.ItemOrder(session), "exportcheck-order")
    manager.register(runtest.CaseRunner(session), "exportcheck-runner")
    if workerinput is None:
        from .controller import Controller
        from .new_shapes import NewShapes
        from .progress import Progress
        from .repeated import Repeated
        from .signals import interrupt_on_sigterm

        controller = Controller(session)
        interrupt_on_sigterm(config)
        manager.register(Progress(session), "exportcheck-progress")
        manager.register(controller, "exportcheck-controller")
        manager.register(Repeated(), "exportcheck-repeated")
        manager.register(NewShapes(config, controller.records), "exportcheck-new-shapes")
        if manager.hasplugin("xdist") and config.getoption("tx", None):
            from .xdist_support import ControllerSide

            manager.register(ControllerSide(session, controller), "exportcheck-xdist")
    else:
        from .xdist_support import WorkerSide

        manager.register(WorkerSide(session, workerinput), "exportcheck-xdist")
    return session


def _declare_markers(session: Session) -> None:
    for axis, values in (
        ("exporter", session.exporters),
        ("patch", [*session.patch_modes, OWN_PATCHES]),
        ("device", DEVICES),
        ("dtype", DTYPES),
    ):
        for value in values:
            session.declare_marker(marker(axis, value), f"cases with {axis} {value} (pytest-exportcheck)")
