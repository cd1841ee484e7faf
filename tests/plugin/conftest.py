"""A project with specs and the fake engine, and a way to run pytest in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Kept in this process from the start: pytester forgets what a run in this process imported, and neither
# yaml's C extension nor our classes exist twice without trouble.
import pytest_exportcheck.controller
import pytest_exportcheck.handles
import pytest_exportcheck.runtest
import pytest_exportcheck.spec.load  # noqa: F401

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

_FAKE = Path(__file__).with_name("fake_pipeline.py")

_CONFTEST = """
import importlib.util, sys
from types import SimpleNamespace
sys.modules["pytest_exportcheck.fresh.warm"] = SimpleNamespace(warm_up=lambda: lambda: None)
spec = importlib.util.spec_from_file_location("pytest_exportcheck.pipeline", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["pytest_exportcheck.pipeline"] = module
spec.loader.exec_module(module)
"""

#: Content that the fake engine proposes for `specs/<name>.yaml` by default.
ACCEPTED = "# {path}\ninputs:\n  x: float32[batch, 4]\n"


class Project:
    """A folder with specs.

    Attributes
    ----------
    pytester:
        pytest's own helper; its path is the rootdir.
    args:
        Arguments of every run, such as ``-n2``.
    in_process:
        Whether runs may share this process.
    interpreter:
        Starts workers, fresh processes, and pytest where it may not share this process, as forks of one
        that has imported the plugin; without it they are new interpreters.
    warm:
        Runs pytest over the real engine, if they may share what it imports.
    """

    in_process = True
    warm: WarmPython | None = None

    def __init__(
        self, pytester: pytest.Pytester, args: tuple[str, ...] = (), interpreter: WarmPython | None = None
    ) -> None:
        self.pytester = pytester
        self.args = args
        self.interpreter = interpreter
        # A failure of these runs is what is tested; confirming it would take a process more for each.
        self.ini("exportcheck_confirm = false")

    def ini(self, *lines: str) -> None:
        """Write the configuration file of pytest anew."""
        # The plugin of hypothesis is half of what a bare pytest takes to start and to end.
        addopts = "addopts = --strict-markers -p no:hypothesispytest"
        self.pytester.makeini("\n".join(["[pytest]", addopts, *lines, ""]))

    def fake(self, more: str = "") -> None:
        """Use the fake engine."""
        self.pytester.makeconftest(_CONFTEST.format(path=str(_FAKE)) + more)

    def spec(
        self,
        name: str,
        *,
        kwargs: dict[str, Any] | None = None,
        exporters: tuple[str, ...] = ("torch-export",),
        matrix: str = "",
        more: str = "",
        accepted: bool = True,
        observe: str = "",
        factory: str = "models.py:build",
    ) -> Path:
        """Write `specs/<name>.yaml`, with an accepted golden unless told otherwise."""
        path = self.pytester.path / "specs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "exportcheck: 1\n"
            "model:\n"
            f'  factory: "{factory}"\n'
            f"  kwargs: {json.dumps(kwargs or {})}\n"
            "observe:\n"
            '  calls: [{forward: {x: "float32[2, 4]"}}, {forward: {x: "float32[3, 4]"}}]\n'
            f"{observe}"
            f"matrix: {{exporters: {json.dumps(list(exporters))}{matrix}}}\n"
            f"{more}"
        )
        if accepted:
            self.golden(name, ACCEPTED.format(path=f"specs/__shapes__/{name}.yaml"))
        return path

    def golden(self, name: str, text: str) -> Path:
        """Write a golden file."""
        path = self.golden_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def golden_path(self, name: str) -> Path:
        return self.pytester.path / "specs" / "__shapes__" / f"{name}.yaml"

    def run(self, *args: str, flag: bool = True) -> pytest.RunResult:
        """Run pytest; in this process, beside its workers, which is several times as fast."""
        options = ["--exportcheck"] if flag else []
        if "no:exportcheck" in args:
            options = []
        given = (*options, *self.args, *args)
        if not any(not str(arg).startswith("-") for arg in args):
            given = (*given, "specs")
        if self.warm is not None:
            return self.warm.pytest(given, timeout=120)
        if not self.in_process:
            if self.interpreter is not None:
                # Its workers have it as their parent, as users' workers have.
                return self.interpreter.pytest(given, timeout=120, alone=True)
            return self.pytester.runpytest_subprocess(*given, timeout=120)
        with pytest.MonkeyPatch.context() as patch:
            if self.interpreter is not None:
                patch.setattr(sys, "executable", self.interpreter.executable)
            return self.pytester.runpytest_inprocess(*given)

    def report(self, path: str = "report.json") -> list[dict[str, Any]]:
        """The cases of a JSON report."""
        cases: list[dict[str, Any]] = json.loads((self.pytester.path / path).read_text())["cases"]
        return cases

    def verdicts(self, path: str = "report.json") -> dict[str, str]:
        """Bracketed part of the node id -> verdict."""
        return {case["nodeid"].partition("[")[2][:-1]: case["verdict"] for case in self.report(path)}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CI, the user or an outer xdist run sets must not reach the inner runs."""
    for name in (
        "CI",
        "EXPORTCHECK_ALLOW_CI_UPDATE",
        "GITHUB_STEP_SUMMARY",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "PYTEST_XDIST_TESTRUNUID",
        "COLUMNS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def project(pytester: pytest.Pytester, warm_plugin: WarmPython) -> Project:
    """A project with the fake engine, run in one process."""
    made = Project(pytester, interpreter=warm_plugin)
    made.fake()
    return made


@pytest.fixture(params=["-n0", "-n2"])
def any_project(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, warm_plugin: WarmPython
) -> Project:
    """The same, once in one process and once with two xdist workers."""
    if request.param != "-n0":
        pytest.importorskip("xdist")
    made = Project(pytester, (request.param,), warm_plugin)
    made.fake()
    return made
