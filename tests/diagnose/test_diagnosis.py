"""`diagnose_case`: from a failed case of a spec to lines and a plain record, within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.helpers import make_run, verdict

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.diagnose import Diagnosis, diagnose_case
from pytest_exportcheck.diagnose.diagnosis import diagnose
from pytest_exportcheck.diagnose.subject import Clock, subject_of
from pytest_exportcheck.errors import ConvertError, ExportCheckError, ExportError, LoadError
from pytest_exportcheck.pipeline import SpecRun

from .helpers import corrupted_runtime
from .test_faults import replace_gelu

pytestmark = pytest.mark.filterwarnings("ignore")

GELU = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return {"y": nn.functional.gelu(self.lin(x)), "none": None}


    def build_model():
        torch.manual_seed(0)
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, 4, generator=g),), {}) for n in (2, 5)]
"""


def explain(
    run: SpecRun, exporter: str, error: ExportCheckError | None = None, budget_s: float = 300
) -> Diagnosis:
    if error is None:
        _, error, _ = verdict(run, exporter)
    assert error is not None
    case = CaseId(run.spec.relative, exporter, "none", "cpu", "float32")
    found = diagnose_case(run, case, error, budget_s)
    assert json.loads(json.dumps(found.to_record())) == found.to_record()
    assert found.stage == error.stage
    assert found.seconds > 0
    return found


def test_a_refused_capture(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        """
        class Branch(nn.Module):
            def forward(self, x):
                if x.sum() > 0:
                    return x
                return -x


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.deep = nn.Sequential(nn.Linear(4, 4), Branch())

            def forward(self, x):
                return self.deep(x)


        def build_model():
            return Net()


        def calls():
            return [((torch.randn(n, 4),), {}) for n in (2, 5)]
        """,
    )
    found = explain(run, "onnx-dynamo")
    text = "\n".join(found.lines())
    assert "guilty: torch.export refuses the model" in text
    assert "culprit: deep[1] (Branch) cannot be exported" in text
    assert "net.py:8 in forward: if x.sum() > 0:" in text
    assert "known cause (data-dependent branch)" in text
    assert "deep exports with it replaced by a custom op" in text


@pytest.mark.parametrize(
    ("exporter", "guilty"),
    [
        ("onnx-dynamo", "onnxruntime ENABLE_EXTENDED"),
        ("onnx-torchscript", "onnxruntime ENABLE_EXTENDED"),
    ],
)
def test_wrong_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: str, guilty: str) -> None:
    def replace(proto: Any) -> None:
        replace_gelu(proto)
        for node in proto.graph.node:
            if node.op_type == "Erf":
                node.op_type = "Tanh"

    corrupted_runtime(monkeypatch, replace, "ORT_ENABLE_EXTENDED")
    found = explain(make_run(tmp_path, GELU, "resize: off\n"), exporter)
    assert found.ladder is not None
    assert found.ladder.guilty == guilty
    assert "level EXTENDED" in found.verdict
    assert "call 1 of 2" in "\n".join(found.lines())


def test_an_exporter_of_which_only_the_result_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxscript import opset18 as op

    run = make_run(tmp_path, GELU)
    wrong = {torch.ops.aten.gelu.default: lambda x, approximate="none": op.Relu(x)}
    from pytest_exportcheck.exporters.onnx_dynamo import OnnxDynamo
    from pytest_exportcheck.registry import EXPORTERS

    class Opaque:
        name = "opaque"

        def export(self, request: Any) -> Any:
            request.options["custom_translation_table"] = wrong
            return OnnxDynamo().export(request)

    EXPORTERS.register("opaque", Opaque())
    try:
        found = explain(run, "opaque")
    finally:
        EXPORTERS.unregister("opaque")
    assert found.ladder is not None
    assert found.ladder.guilty == "conversion"
    assert found.verdict.startswith("guilty: opaque to ONNX")


def test_only_other_sizes_fail(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        """
        class Table(nn.Module):
            def forward(self, x):
                return x * 2 if x.shape[0] != 1 else x


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = Table()

            def forward(self, x):
                return self.table(x) + 1


        def build_model():
            return Net()


        def calls():
            return [((torch.randn(n, 4),), {}) for n in (2, 5)]
        """,
    )
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "resize"
    found = explain(run, "onnx-dynamo", error)
    assert found.ladder is not None
    assert found.ladder.sample.startswith("sizes")
    assert found.ladder.guilty == "capture"
    assert found.pieces is not None
    assert [culprit.site for culprit in found.pieces.culprits] == ["table"]
    assert "baked scalar or threshold" in [cause.name for cause in found.causes]


def test_torch_export_alone(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        """
        class Net(nn.Module):
            def forward(self, x):
                return x[: int(x.sum())]


        def build_model():
            return Net()


        def calls():
            return [((torch.ones(n, 4),), {}) for n in (2, 5)]
        """,
    )
    found = explain(run, "torch-export")
    assert "guilty: torch.export refuses the model" in found.verdict
    assert found.pieces is not None
    assert found.pieces.culprits[0].line.endswith("return x[: int(x.sum())]")


def test_no_budget_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted_runtime(monkeypatch, replace_gelu)
    found = explain(make_run(tmp_path, GELU), "onnx-dynamo", budget_s=0)
    text = "\n".join(found.lines())
    assert "time budget was used up" in text
    assert "guilty" not in text


def test_a_failure_before_any_export(tmp_path: Path) -> None:
    found = explain(make_run(tmp_path, GELU), "onnx-dynamo", LoadError("no such file"))
    assert found.verdict == "the case fails at load, before any export"
    assert found.ladder is None


def test_a_failure_that_is_not_there_any_more(tmp_path: Path) -> None:
    found = explain(make_run(tmp_path, GELU), "onnx-dynamo", ConvertError("it failed once"))
    assert found.verdict == "not reproduced: every step agrees with eager"


def test_a_diagnosis_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr("pytest_exportcheck.diagnose.diagnosis.climb", broken)
    found = explain(make_run(tmp_path, GELU), "onnx-dynamo", ConvertError("x"))
    assert found.verdict == "nothing was found"
    assert found.notes == ["the steps could not be walked: KeyError: 'broken'"]


def test_sizes_beyond_a_comparison_are_looked_at(tmp_path: Path) -> None:
    """The check found them by what the capture decided, and drew their values: the diagnosis has the same."""
    run = make_run(
        tmp_path,
        """
        class Net(nn.Module):
            def forward(self, x):
                n = x.shape[1]
                return x[:, n // 2 + 1 if n > 32 else n // 2] * 2


        def build_model():
            return Net()


        def calls():
            g = torch.Generator().manual_seed(0)
            return [((torch.randn(b, n, 4, generator=g),), {}) for b, n in ((2, 9), (3, 7))]
        """,
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize"
    assert error is not None
    found = explain(run, "onnx-dynamo", error)
    assert found.ladder is not None
    assert found.ladder.sample == f"sizes {record['resize']['failed']}"
    assert found.ladder.guilty == "capture"
    assert found.ladder.inputs is not None
    known = run.observe("cpu", "float32", "none").graph(None).answers["sizes", record["resize"]["failed"]]
    assert torch.equal(found.ladder.inputs.arguments["x"], known.arguments["x"])


LOST = """
    class Net(nn.Module):
        def forward(self, x, mask):
            return x * 2 if torch.compiler.is_compiling() else x * 2 * mask


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, 4), torch.ones(n, 1)), {}) for n in (2, 5)]
"""


def test_an_input_that_the_program_does_not_read(tmp_path: Path) -> None:
    """Every step agrees with eager on the observed calls: that does not mean that it was not reproduced."""
    found = explain(make_run(tmp_path, LOST), "torch-export")
    assert found.stage == "compare"
    assert found.message.startswith("no output of the program depends on mask")
    assert found.verdict.startswith(
        "no step differs with the observed values: the program does not read an input"
    )
    assert "not reproduced" not in "\n".join(found.lines())


def test_axes_that_became_constants_are_named_as_the_failure_names_them() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * int(x.shape[1])

    subject = subject_of(Fixed(), [((torch.randn(n, m),), {}) for n, m in ((2, 9), (4, 7))])
    said = "axis 1 of x (x_dim_1) became a constant: x.shape[1] == 9 (net.py:3: return x * int(x.shape[1]))"
    failure = ExportError(f"onnx-dynamo refuses the model: {said}", details=["Constraints violated"])
    found = diagnose(subject, failure, Clock(1e6))
    assert found.verdict.startswith(f"guilty: torch.export refuses the model: {said}")
    found = diagnose(subject, ExportError("onnx-dynamo refuses the model: ValueError: no"), Clock(1e6))
    assert "Constraints violated" in found.verdict


def test_an_input_of_which_the_program_reads_a_part(tmp_path: Path) -> None:
    part = LOST.replace("return x * 2", "return x * 2 * mask[:1]")
    assert part != LOST
    found = explain(make_run(tmp_path, part), "torch-export")
    assert found.stage == "compare"
    assert found.message.startswith(
        "the program does not follow eager where not all values of mask are equal"
    )
    assert found.verdict.startswith(
        "no step differs with the observed values: all values of an input are equal"
    )
    assert "not reproduced" not in "\n".join(found.lines())
