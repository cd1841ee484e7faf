"""A pass says that something was checked: sizes that eager refuses, or outputs that vanish, are none."""

from __future__ import annotations

import pytest

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportError, ObserveError, ResizeError
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.spec import load_spec

MODELS = """
import torch


class Short(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 8:
            raise ValueError("too long")
        return x * 2


class Scalar(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2, "layers": 3}
"""


def run(tmp_path, model, exporter, more="", enter=lambda stage: None):
    (tmp_path / "models.py").write_text(MODELS)
    path = tmp_path / "one.yaml"
    path.write_text(
        f'exportcheck: 1\nmodel: {{factory: "models.py:{model}"}}\n'
        'observe:\n  dims: [rows]\n  calls:\n    - {forward: {x: "float32[rows, 3]"}, dims: {rows: 2}}\n'
        f'    - {{forward: {{x: "float32[rows, 3]"}}, dims: {{rows: 4}}}}\n{more}'
    )
    case = CaseId("one.yaml", exporter, "none", "cpu", "float32")
    record = {}
    run_case(SpecRun(load_spec(path, tmp_path)), case, enter, record)
    return record


def test_listed_sizes_that_eager_refuses_are_no_pass(tmp_path):
    with pytest.raises(ResizeError, match="eager refuses every size that resize lists: nothing was checked"):
        run(tmp_path, "Short", "torch-export", "resize: {rows: [9, 10]}\n")


def test_a_mistyped_name_of_a_size_is_told_before_the_export(tmp_path):
    meant = r"one.yaml:8:10: resize names rosw \(did you mean 'rows'\?\), the symbols of the graph are rows"
    stages = []
    with pytest.raises(ObserveError, match=meant):
        run(tmp_path, "Short", "torch-export", "resize: {rosw: [3]}\n", stages.append)
    assert stages == ["load", "load", "observe"]


def test_one_listed_size_that_eager_takes_is_checked(tmp_path):
    record = run(tmp_path, "Short", "onnx-torchscript", "resize: {rows: [6, 10]}\n")
    assert record["resize"]["passed"] == ["rows=6"]
    assert len(record["resize"]["refused_by_eager"]) == 1


def test_torchscript_drops_no_output_without_a_word(tmp_path):
    with pytest.raises(ExportError, match="TorchScript drops outputs that are no tensors: layers"):
        run(tmp_path, "Scalar", "onnx-torchscript")
