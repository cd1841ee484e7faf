"""The plugin over the real engine: from a first golden to verdicts."""

from __future__ import annotations

import pytest

from .conftest import Project

MODELS = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())

class Branch(torch.nn.Module):
    def forward(self, input):
        return input if input.sum() > 0 else -input

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def real(pytester):
    """A project that uses `pytest_exportcheck.pipeline` itself."""

    project = Project(pytester)
    project.in_process = False
    for name, factory in (("linear", "build"), ("branch", "Branch"), ("broken", "broken")):
        path = project.spec(name, factory=f"models.py:{factory}", accepted=False)
        path.write_text(path.read_text().replace("{x:", "{input:"))
    (pytester.path / "specs" / "models.py").write_text(MODELS)
    return project


def test_from_first_golden_to_verdicts(real, warm_pytest):
    update = ["--exportcheck", "--update-shapes", "specs/linear.yaml", "specs/branch.yaml"]
    result = warm_pytest.run(update, timeout=120)
    result.stdout.fnmatch_lines(
        ["updated: specs/__shapes__/branch.yaml", "updated: specs/__shapes__/linear.yaml"]
    )
    result.stdout.no_fnmatch_line("*torch.__trace*")
    assert "input: float32[" in real.golden_path("linear").read_text()
    result = real.run("-n1", "--exportcheck-report=report.json", "--junitxml=junit.xml")
    result.stdout.fnmatch_lines(
        [
            "E   stage export: torch-export refuses the model: *",
            "branch  pass       FAIL export",
            "broken  FAIL load  FAIL load",
            "linear  pass       pass",
            "3 cases: 1 pass, 2 FAIL   shapes: 2 ok, 1 FAIL   report: report.json",
        ]
    )
    result.stdout.no_fnmatch_line("*torch.__trace*")
    assert [case["verdict"] for case in real.report()] == [
        "pass",
        "fail export",
        "fail load",
        "fail load",
        "pass",
        "pass",
    ]
    passed = real.report()[-1]
    assert {"export", "run", "compare", "resize"} <= set(passed["durations"])
