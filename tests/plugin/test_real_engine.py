"""The plugin over the real engine: from a first golden to verdicts."""

from __future__ import annotations

import pytest

from .conftest import Project
from .test_reports import validated

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
    validated(real)
    passed = real.report()[-1]
    assert {"export", "run", "compare", "resize"} <= set(passed["durations"])


CACHED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ))


def calls():
    return [((), {"input_ids": torch.randint(5, 90, size)}) for size in ((2, 4), (3, 9))]
"""


def test_a_foreign_layout_is_said_before_the_export(pytester):
    """As somebody else's import leaves it: without us, no ONNX export of a cached model works any more."""
    project = Project(pytester)
    project.in_process = False
    pytester.makeconftest(
        "from transformers.integrations.executorch import register_dynamic_cache_export_support\n"
        "register_dynamic_cache_export_support()\n"
    )
    path = project.spec("cached", exporters=("onnx-dynamo",), accepted=False)
    path.write_text(
        'exportcheck: 1\nmodel: {factory: "cached.py:build"}\nobserve: {calls: "cached.py:calls"}\n'
        "matrix: {exporters: [onnx-dynamo]}\n"
    )
    (pytester.path / "specs" / "cached.py").write_text(CACHED)
    result = project.run("-k", "test_export")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*FlatteningWarning: DynamicCache was registered as a pytree node by *in "
            "transformers.integrations.executorch (a list of keys and a list of values); its layout is *"
            "exports of your own fail with it: call torch.onnx.export inside register_flattening_functions()*"
        ]
    )
