"""Rewritten control flow in a run of pytest, whose test functions have spec files for sources."""

from __future__ import annotations

MODEL = """
from torch import nn


class Sign(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return -x


class Straight(nn.Module):
    def forward(self, x):
        return x * 2
"""

SPEC = """
exportcheck: 1
model: {{factory: "net.py:{name}"}}
observe:
  calls: [{{forward: {{x: "float32[2, 9]"}}}}, {{forward: {{x: "float32[3, 6]"}}}}]
matrix: {{exporters: [torch-export], patch_modes: [none, rewrite, all]}}
"""


def test_nothing_beyond_the_model_is_rewritten(project):
    (project.folder / "net.py").write_text(MODEL)
    for name in ("Sign", "Straight"):
        project.spec(name.lower(), SPEC.format(name=name))
    project.run("--exportcheck-report=report.json", "-k", "test_export")
    assert project.verdicts() == {
        "sign[torch-export-none]": "fail export",
        "sign[torch-export-rewrite]": "pass",
        "sign[torch-export-all]": "pass",
        "straight[torch-export-none]": "pass",
        "straight[torch-export-rewrite]": "pass",
        "straight[torch-export-all]": "pass",
    }
