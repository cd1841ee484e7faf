"""Several targets of one spec, one of them with groups of its own, and what becomes of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conftest import RealProject

MODEL = """
import torch
from torch.nn import Linear


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = Linear(4, 4)

    def forward(self, x, past=None, scale=1.0):
        x = self.proj(x) * scale
        return x if past is None else torch.cat([past, x], 1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.decoder = Linear(3, 4), Decoder()

    def forward(self, image):
        x = self.decoder(self.tower(image), scale=2.0)
        return self.decoder(x[:, -1:], x)
"""

SPEC = """
exportcheck: 1
model: {{factory: "model.py:Model"}}
observe:
  calls:
    - forward: {{image: "float32[2, 5, 3]"}}
    - forward: {{image: "float32[4, 6, 3]"}}
  target:
    tower: tower
    decoder: {decoder}
matrix: {{exporters: [torch-export, onnx-dynamo]}}
{more}
"""

WHOLE = "{path: decoder, graphs: {prefill: [0, 2], decode: [1, 3]}}"


def write(project: RealProject, decoder: str, more: str = "") -> None:
    (project.folder / "model.py").write_text(MODEL)
    project.spec("parts", SPEC.format(decoder=decoder, more=more))


def verdicts(project: RealProject) -> dict[str, str]:
    cases: list[dict[str, Any]] = json.loads((project.pytester.path / "report.json").read_text())["cases"]
    return {
        case["nodeid"].partition("[")[2].removeprefix("cpu-float32")[:-1]: case["verdict"] for case in cases
    }


def golden(project: RealProject) -> Path:
    return project.folder / "__shapes__" / "parts.yaml"


def test_each_group_of_a_target_is_a_case(project):
    write(project, WHOLE)
    project.run("--update-shapes", "-k", "dynamic_shapes")
    text = golden(project).read_text()
    assert "\n  decoder.prefill:\n    inputs:\n      x: float32[" in text
    assert "\n  decoder.decode:\n    inputs:\n" in text
    result = project.run("--exportcheck-report=report.json")
    assert verdicts(project) == {
        "": "pass",
        **{
            f"-{exporter}-none-{graph}": "pass"
            for exporter in ("torch-export", "onnx-dynamo")
            for graph in ("tower", "decoder.prefill", "decoder.decode")
        },
    }
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["parts (decoder.prefill)  pass *", "parts (tower) *pass *"])


def test_a_broken_graph_fails_its_own_cases_and_the_shapes(project):
    write(project, WHOLE)
    project.run("--update-shapes", "-k", "dynamic_shapes")
    write(project, "decoder")
    before = golden(project).read_text()
    result = project.run("-k", "not onnx", "--exportcheck-report=report.json", "--update-shapes")
    assert verdicts(project) == {
        "": "fail observe",
        "-torch-export-none-tower": "pass",
        "-torch-export-none-decoder": "fail observe",
    }
    assert golden(project).read_text() == before
    result.stdout.fnmatch_lines(
        [
            "E   stage observe: graph decoder is broken (1 of 2)",
            "E     specs/__shapes__/parts.yaml is not written: it would lack a graph",
            "E     decoder: target decoder, decoder (Decoder.forward): *scale*",
            "E         decoder: {path: 'decoder', graphs: {graph_0: [[]0, 2[]], graph_1: [[]1, 3[]]}}",
        ]
    )
    golden(project).unlink()
    result = project.run("-k", "dynamic_shapes", "--update-shapes")
    assert not golden(project).exists()
    result.stdout.fnmatch_lines(
        ["E   stage observe: graph decoder is broken (1 of 2)", "E     proposed content, so far:"]
    )


def test_a_graph_that_is_expected_to_be_broken(project):
    write(project, WHOLE)
    project.run("--update-shapes", "-k", "dynamic_shapes")
    text = golden(project).read_text()
    tower_only = text[: text.index("  decoder.prefill:")]
    golden(project).write_text(tower_only)
    expect = "expect: [{when: {graph: decoder}, fails: observe, reason: r}]"
    write(project, "decoder", expect)
    project.run("-k", "not onnx", "--exportcheck-report=report.json")
    assert verdicts(project) == {
        "": "xfail observe",
        "-torch-export-none-tower": "pass",
        "-torch-export-none-decoder": "xfail observe",
    }
    # It hides no change of the others.
    golden(project).write_text(tower_only.replace("float32[", "float32[7, "))
    result = project.run("-k", "dynamic_shapes", "--exportcheck-report=report.json")
    assert verdicts(project) == {"": "fail shapes"}
    result.stdout.fnmatch_lines(["E   moved from observe to shapes: change line * of specs/parts.yaml"])
