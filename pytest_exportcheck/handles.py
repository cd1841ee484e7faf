"""What the fixtures hand out: lazy objects, so that a stage fails in the test and not in a fixture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache_settings import CacheSettings
from .cases import CaseId
from .errors import (
    CrashError,
    ExportCheckError,
    HistoryError,
    ObserveError,
    ShapesError,
    StageTimeoutError,
)
from .fresh.messages import Work
from .fresh.work import foreign_exits
from .garbage import Garbage
from .goldens import Golden, golden_of
from .judge import ablation_of, judge
from .plan import OWN_PATCHES, PlannedCase

if TYPE_CHECKING:
    from .pipeline import SpecRun
    from .session import RunningCase, Session
    from .spec import ModelSpec

__all__ = ["ExportCase", "ObservedInputs", "SpecRuns"]


class SpecRuns:
    """The models in memory for one test module: one spec at a time, closed before the next one loads."""

    def __init__(
        self, share: bool = True, cache: CacheSettings | None = None, garbage: Garbage | None = None
    ) -> None:
        self._share = share
        self._cache = cache
        self._garbage = garbage or Garbage()
        self._spec: ModelSpec | None = None
        self._run: SpecRun | None = None

    def of(self, spec: ModelSpec) -> SpecRun:
        """The run of `spec`; closes the one of another spec."""
        if self._run is None or self._spec is None or self._spec.path != spec.path:
            if self._run is not None:
                self.close()
                self._garbage.after_spec()
            from .pipeline import SpecRun

            self._spec, self._run = spec, SpecRun(spec, self._share, self._cache)
        return self._run

    def close(self) -> None:
        """Let go of the model and the programs."""
        run, self._run, self._spec = self._run, None, None
        if run is not None:
            run.close()


@dataclass(repr=False)
class _Handle:
    session: Session
    runs: SpecRuns
    planned: PlannedCase

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.case}>"

    @property
    def spec(self) -> ModelSpec:
        """The spec the case comes from."""
        return self.planned.spec

    @property
    def case(self) -> CaseId:
        """Which case this is."""
        return self.planned.case

    @property
    def run(self) -> SpecRun:
        """The spec's run in this process: model, observations, programs."""
        return self.runs.of(self.spec)

    @property
    def running(self) -> RunningCase:
        """The test that uses this object now."""
        running = self.session.running
        if running is None:
            raise RuntimeError(f"the fixture of {self.case} is used outside of its test")
        return running

    @property
    def record(self) -> dict[str, Any]:
        """What the reports will say about this case; plain builtins that a test may add to."""
        return self.running.record

    def _work(self, golden: str | None = None, golden_name: str = "") -> Work:
        root = str(self.session.config.rootpath)
        return Work(str(self.spec.path), root, self.case, golden, golden_name, self.session.options.share)

    def _judge(self, work: Work) -> None:
        judge(self.session, self.running, work, lambda: self.run)


class ObservedInputs(_Handle):
    """The recorded calls of a spec on one device and dtype.

    Everything an observation has can be asked of this object; the model runs on first use.
    """

    @property
    def observation(self) -> Any:
        """The observation; runs the model the first time. Raises `LoadError` or `ObserveError`."""
        running = self.running
        with foreign_exits(lambda: running.stage):
            return self.run.observe(self.case.device, self.case.dtype, enter=running.enter)

    @property
    def golden(self) -> Golden:
        """Where the accepted shapes of the spec are."""
        return golden_of(self.spec)

    @property
    def golden_path(self) -> Path:
        """The golden file."""
        return self.golden.path

    @property
    def golden_text(self) -> str | None:
        """The content of the golden file, ``None`` if there is none."""
        return self.golden.read()

    @property
    def update(self) -> bool:
        """Whether a difference is accepted (``--update-shapes``)."""
        return self.session.options.update

    def check_shapes(self) -> None:
        """See `pytest_exportcheck.suite.assert_dynamic_shapes`."""
        running = self.running
        try:
            accepted = self.golden.read()
        except (OSError, UnicodeDecodeError) as error:
            running.enter("shapes")
            raise ShapesError(f"{self.golden.display} cannot be read: {error}") from error
        try:
            self._judge(self._work(accepted, self.golden.display))
        except ShapesError:
            if not self.update:
                raise
            refused = running.record.pop("golden_refused", None)
            if refused is not None:
                raise ObserveError(refused["message"], details=refused["details"]) from None
            self._propose(running.record.pop("proposed_golden"), changed=True)
        else:
            if self.update and accepted is not None:
                self._propose(accepted, changed=False)
        running.checked = True

    def _propose(self, text: str, *, changed: bool) -> None:
        self.running.record["golden"] = {"path": self.golden.relative, "text": text, "changed": changed}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.observation, name)


class ExportCase(_Handle):
    """One case: what to export, how, and on what."""

    @property
    def observation(self) -> Any:
        """The observation of the case's device and dtype. Raises `LoadError` or `ObserveError`."""
        running = self.running
        with foreign_exits(lambda: running.stage):
            return self.run.observe(self.case.device, self.case.dtype, enter=running.enter)

    def run_stages(self) -> None:
        """See `pytest_exportcheck.suite.assert_export`."""
        work = self._work()
        try:
            self._judge(work)
        except ExportCheckError as error:
            if not isinstance(error, CrashError | StageTimeoutError | HistoryError):
                self._ablate(work)
            raise
        self.running.checked = True
        self._ablate(work)

    def _ablate(self, work: Work) -> None:
        """Note what the patches of the case are worth; its verdict is there already."""
        if not self.session.options.ablate or self.case.patch_mode in ("none", OWN_PATCHES):
            return
        self.running.durations()  # The last stage has ended.
        self.record["ablation"] = ablation_of(self.session, work)
