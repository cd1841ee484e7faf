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


def test_from_first_golden_to_verdicts(real, warm_python):
    update = ["--exportcheck", "--update-shapes", "specs/linear.yaml", "specs/branch.yaml"]
    result = warm_python.pytest(update, timeout=120)
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


def test_what_only_rounding_explains_passes_and_is_named(real, warm_python):
    real.warm = warm_python
    real.golden_path("linear").parent.mkdir(parents=True, exist_ok=True)
    models = real.pytester.path / "specs" / "models.py"
    models.write_text(
        "import torch\n\n"
        "class Variance(torch.nn.Module):\n"
        "    def forward(self, input):\n"
        "        x = input + 100\n"
        "        return (x**2).mean(-1) - x.mean(-1) ** 2\n"
    )
    for name in ("branch", "broken"):
        (real.pytester.path / "specs" / f"{name}.yaml").unlink()
    spec = real.pytester.path / "specs" / "linear.yaml"
    spec.write_text(
        "exportcheck: 1\n"
        'model: {factory: "models.py:Variance"}\n'
        'observe: {calls: [{forward: {input: "float32[20, 300]"}}, {forward: {input: "float32[33, 300]"}}]}\n'
        "matrix: {exporters: [onnx-dynamo]}\n"
    )
    result = real.run("--exportcheck-report=report.json", "-k", "test_export")
    result.stdout.fnmatch_lines(
        [
            "linear  pass",
            "rounding: specs/linear.yaml *: call 1 of 2: output is off by *, eager itself moves by up to *",
        ]
    )
    validated(real)
    (case,) = real.report()
    assert case["verdict"] == "pass"
    assert len(case["rounding"]) > 2
    assert case["outputs"][0]["eager_moves"] > case["outputs"][0]["atol"]


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


def test_a_foreign_layout_is_said_before_the_export(pytester, warm_python):
    """As somebody else's import leaves it: without us, no ONNX export of a cached model works any more."""
    project = Project(pytester)
    project.warm = warm_python
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
