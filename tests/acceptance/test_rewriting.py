"""Rewritten control flow in a run of pytest, whose test functions have spec files for sources."""

from __future__ import annotations

import json

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


LATER = """
class Later(nn.Module):
    def forward(self, x):
        x = x + 1 if torch.compiler.is_exporting() else x
        if x.sum() > 0:
            return x * 2
        return -x
"""


def test_the_rewriting_is_shown(project):
    """Of a case that fails after it, and, where that is asked for, of one that passes."""
    (project.folder / "net.py").write_text(f"import torch\n{MODEL}\n{LATER}")
    for name in ("Sign", "Later"):
        project.spec(name.lower(), SPEC.format(name=name))
    wanted = ("--exportcheck-report=report.json", "-k", "torch-export-rewrite")
    result = project.run(*wanted)
    assert project.verdicts()["later[torch-export-rewrite]"].startswith("fail ")
    shown = result.stdout.str()
    assert "- rewritten -" in shown
    assert "+    result = torch.where(" in shown
    assert "Sign.forward (rewritten)" not in shown
    assert "Sign.forward (rewritten)" in project.run(*wanted, "-rP").stdout.str()
    for record in json.loads((project.folder.parent / "report.json").read_text())["cases"]:
        (diff,) = record["rewritten"].values()
        assert "+    result = torch.where(" in diff
