"""A project over the real engine, each run in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

TOY = Path(__file__).with_name("toy_exporter")

MODELS = '''
import os, sys
import torch


class Affine(torch.nn.Module):
    """(batch, 4) -> (batch, 3)"""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


class Frozen(torch.nn.Module):
    """A loop over a dimension: refused with a dynamic one."""

    def forward(self, x):
        total = x[:, 0]
        for step in range(1, x.shape[1]):
            total = total + x[:, step]
        return total


class Generates(Affine):
    def generate(self, **kwargs):
        raise ValueError("no prompt given")


def build():
    return Affine()


def raises():
    raise RuntimeError("no weights here")


def no_module():
    return 42


def leaves():
    sys.exit(3)
'''


class RealProject:
    """Specs in a folder `specs`, and pytest run on them."""

    def __init__(self, pytester: pytest.Pytester, warm: WarmPython) -> None:
        self.pytester = pytester
        self._warm = warm
        self.folder = pytester.path / "specs"
        self.folder.mkdir()
        # A failure of these runs is what is tested; confirming it would take a process more for each.
        pytester.makeini("[pytest]\naddopts = --strict-markers\nexportcheck_confirm = false\n")
        (self.folder / "models.py").write_text(MODELS)

    def spec(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def simple(
        self, name: str, factory: str = "Affine", exporters: str = "[torch-export]", more: str = ""
    ) -> Path:
        return self.spec(
            name,
            "exportcheck: 1\n"
            f'model: {{factory: "models.py:{factory}"}}\n'
            "observe:\n"
            '  calls: [{forward: {x: "float32[2, 4]"}}, {forward: {x: "float32[3, 4]"}}]\n'
            f"matrix: {{exporters: {exporters}}}\n" + more,
        )

    def run(self, *args: str) -> pytest.RunResult:
        given = args if any(arg.startswith("specs") for arg in args) else (*args, "specs")
        if sys.platform == "linux":
            return self._warm.pytest(("--exportcheck", *given), timeout=300)
        given = ("--exportcheck", "-p", "no:hypothesispytest", *given)
        return self.pytester.runpytest_subprocess(*given, timeout=300)

    def verdicts(self) -> dict[str, str]:
        """``name[label]`` -> verdict, of the last run with ``--exportcheck-report=report.json``."""
        cases: list[dict[str, Any]] = json.loads((self.pytester.path / "report.json").read_text())["cases"]
        return {
            f"{Path(c['spec']).stem}[{c['exporter'] or 'shapes'}-{c['patch_mode']}]": c["verdict"]
            for c in cases
        }


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython
) -> RealProject:
    for name in (
        "CI",
        "GITHUB_STEP_SUMMARY",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "EXPORTCHECK_ALLOW_CI_UPDATE",
    ):
        monkeypatch.delenv(name, raising=False)
    return RealProject(pytester, warm_python)
