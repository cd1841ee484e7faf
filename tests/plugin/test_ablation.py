"""``--ablate-patches``: what each patch is worth, in the text, in the JSON, and in no verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .conftest import Project

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

MODELS = """
import torch
from pytest_exportcheck import Patch


class Net(torch.nn.Module):
    def branch(self, x):
        return x * 2 if x.sum() > 0 else x

    def shift(self, x):
        return x + 1

    def forward(self, x):
        return self.shift(self.branch(x))


def cured(self, x):
    return torch.where(x.sum() > 0, x * 2, x)


def same(self, x):
    return x + 1


def dies(self, x):
    import os
    if torch.compiler.is_exporting():
        os._exit(3)
    return x * 2 if x.sum() > 0 else x


mode = [Patch("models.Net.branch", cured, owner=Net, name="cured"),
        Patch("models.Net.shift", same, owner=Net, name="same")]
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_what_each_patch_is_worth(pytester: pytest.Pytester, warm_python: WarmPython, workers: str) -> None:
    project = Project(pytester, (workers,))
    project.warm = warm_python
    for name, modes in (("a", "none, 'models.py:mode'"), ("b", "'models.py:mode'")):
        project.spec(name, factory="models.py:Net", accepted=False, matrix=f", patch_modes: [{modes}]")
    (pytester.path / "specs" / "models.py").write_text(MODELS)
    project.run("--exportcheck-report=plain.json")
    result = project.run("--exportcheck-report=report.json", "--ablate-patches")
    # Neither the needed nor the missing patches of the runs that were made show in a verdict.
    assert project.verdicts() == project.verdicts("plain.json")
    assert project.verdicts()["cpu-float32-torch-export-models.py:mode"] == "pass"
    result.stdout.fnmatch_lines(
        [
            "models.py:mode  cured",
            "    needed for: a, b",
            "models.py:mode  same",
            "    neutral for: a, b",
            "patch mode models.py:mode: 2 cases, 2 of 2 patches called; no case needs same",
        ]
    )
    records = {(case["spec"], case["patch_mode"]): case for case in project.report()}
    assert "ablation" not in records["specs/a.yaml", "none"]
    for spec in ("specs/a.yaml", "specs/b.yaml"):
        found = records[spec, "models.py:mode"]["ablation"]
        assert (found["with"], found["without_any"]) == ("pass", "export")
        assert {name: one["kind"] for name, one in found["patches"].items()} == {
            "cured": "needed",
            "same": "neutral",
        }
    assert "ablation" not in project.report("plain.json")[-1]


def test_an_ablation_that_dies_costs_its_run_only(pytester: pytest.Pytester, warm_python: WarmPython) -> None:
    """The case itself, with all patches, never comes to where the model dies."""
    project = Project(pytester)
    project.warm = warm_python
    project.spec("a", factory="models.py:Net", accepted=False, matrix=", patch_modes: ['models.py:mode']")
    (pytester.path / "specs" / "models.py").write_text(MODELS + "\n\nNet.branch = dies\n")
    result = project.run("--exportcheck-report=report.json", "--ablate-patches", "-k", "test_export")
    assert project.verdicts() == {"cpu-float32-torch-export-models.py:mode": "pass"}
    assert result.ret == 0
    found = project.report()[0]["ablation"]["patches"]["cured"]
    assert (found["kind"], found["without"]) == ("needed", "crash export")
