"""The table of known causes, against the errors that torch and the others raise today."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.helpers import make_run, verdict
from onnxscript import opset18

from pytest_exportcheck.diagnose.causes import CAUSES, Evidence, causes_of_text, known_causes

from .test_faults import explain

D = torch.export.Dim.DYNAMIC


def names(evidence: Evidence) -> list[str]:
    return [cause.name for cause in known_causes(evidence)]


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function


class One(Module):
    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Many(Module):
    def forward(self, **kwargs: torch.Tensor) -> Any:
        return self.function(**kwargs)


@dataclasses.dataclass
class Box:
    x: torch.Tensor


def error_of(step: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        step()
    return str(caught.value)


def export(function: Callable[..., Any], x: Any = None, shapes: Any = None) -> Callable[[], Any]:
    x = torch.randn(4, 6) if x is None else x
    return lambda: torch.export.export(One(function), (x,), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (export(lambda x: x + 1, torch.randn(1, 6), ({0: D},)), "0/1 specialisation"),
        (export(lambda x: x.view(4, 6), None, ({0: D},)), "fixed axis"),
        (export(lambda x: x if x.sum() > 0 else -x), "data-dependent branch"),
        (export(lambda x: x[: int(x.sum())]), "data-dependent branch"),
        (export(lambda box: box.x + 1, Box(torch.ones(2))), "unregistered class"),
        (export(lambda x: Box(x)), "unregistered class"),
        (
            lambda: torch.export.export(
                Many(lambda **kwargs: kwargs["x"] + kwargs["y"]),
                (),
                kwargs={"x": torch.randn(2, 3), "y": torch.randn(2, 3)},
                dynamic_shapes={"kwargs": {"x": {0: D}, "y": {0: D}}},
                strict=False,
            ),
            "**kwargs with dynamic shapes",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_errors_of_torch_export(step: Callable[[], Any], expected: str) -> None:
    text = error_of(step)
    assert names(Evidence(text, "export"))[:1] == [expected], text[:2000]


def test_a_missing_kernel() -> None:
    import onnx
    import onnxruntime

    double = onnx.TensorProto.DOUBLE
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("LRN", ["x"], ["y"], size=3)],
        "g",
        [onnx.helper.make_tensor_value_info("x", double, [1, 4, 2, 2])],
        [onnx.helper.make_tensor_value_info("y", double, [1, 4, 2, 2])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    text = error_of(
        lambda: onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    )
    assert names(Evidence(text, "session")) == ["no kernel in ONNX Runtime"]


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (
            Evidence("logits: nan instead of 0", differs=True, masked_rows=True),
            ["fully masked attention rows"],
        ),
        (Evidence("y: inf instead of 6.5e+04", dtype="float16", differs=True), ["float16 overflow"]),
        (Evidence("y: inf instead of 6.5e+04", dtype="float32", differs=True), []),
        (Evidence("numbers differ", guilty="capture", differs=True), ["baked scalar or threshold"]),
        (
            Evidence("numbers differ", guilty="capture", differs=True, example_too=True),
            ["other code while exporting"],
        ),
        (
            Evidence("RuntimeError: Runtime assertion failed for expression u0 <= 5 on node 'le_2'", "run"),
            ["assertion about a value"],
        ),
        (Evidence("numbers differ", guilty="patches", differs=True), ["patch changes the model"]),
        (
            Evidence("invalid expand shape", operators=["aten.gru.input"]),
            ["recurrent layer after another export"],
        ),
        (Evidence("invalid expand shape", operators=["aten.add.Tensor"]), []),
        (Evidence("something nobody has seen"), []),
        (Evidence(""), []),
    ],
)
def test_what_was_found_counts(evidence: Evidence, expected: list[str]) -> None:
    assert names(evidence) == expected


@pytest.mark.parametrize(
    ("text", "stage", "dtype", "fresh", "expected"),
    [
        ("Could not guard on data-dependent expression", "export", "float32", True, "data-dependent branch"),
        ("No ONNX function found for <OpOverload(x)>", "convert", "float32", True, "missing ONNX operator"),
        ("y: inf instead of 6.5e+04", "compare", "float16", True, "float16 overflow"),
        # NaN may come from a row of padding: only the inputs tell.
        ("y: nan instead of 6.5e+04", "compare", "float16", True, None),
        ("y: nan instead of 0; they differ only where attention_mask is 0", "compare", "float32", True,
         "fully masked attention rows"),
        ("y: nan instead of 0", "compare", "float32", True, None),
        ("they differ only where attention_mask is 0", "compare", "float32", True, "padded positions"),
        ("the calls with zeros in mask differ (1 of 2), those with ones only agree (1 of 2), and call 2 "
         "agrees too with ones there", "compare", "float32", True, "mask not read"),
        ("all 2 calls have zeros in mask and differ; call 1 agrees with ones there", "compare", "float32",
         True, "mask not read"),
        ("the only call has zeros in mask and differs; it agrees with ones there", "compare", "float32", True,
         "mask not read"),
        ("dynamic axes of a GRU became constants", "export", "float32", False,
         "recurrent layer after another export"),
        # A fresh process fails too: no history is to blame.
        ("Guard failed in an LSTM", "run", "float32", True, None),
        ("outputs of the captured program differ", "compare", "float32", True, None),
    ],
)  # fmt: skip
def test_a_message_alone_claims_no_more_than_it_shows(
    text: str, stage: str, dtype: str, fresh: bool, expected: str | None
) -> None:
    found = [cause.name for cause in causes_of_text(text, stage, dtype, fresh)]
    assert (expected in found) if expected else (found == []), found


def test_rows_that_see_nothing_are_told_once() -> None:
    text = "they differ only where attention_mask is 0"
    assert names(Evidence(text, differs=True, masked_rows=True)) == ["fully masked attention rows"]
    assert names(Evidence(text, differs=True, masked_rows=False)) == ["padded positions"]
    assert names(Evidence(f"y: nan instead of 0; {text}", differs=True)) == ["fully masked attention rows"]


def test_a_padded_mask_alone_explains_no_difference() -> None:
    wrong = "guilty: conversion to ONNX; first wrong node %gelu = aten.gelu.default"
    assert names(Evidence(wrong, "compare", differs=True, masked_rows=True)) == []
    attention = "first wrong node %a = aten.scaled_dot_product_attention.default"
    assert names(Evidence(attention, "compare", differs=True, masked_rows=True)) == [
        "fully masked attention rows"
    ]


def test_every_row_is_whole() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
    for cause in CAUSES:
        assert cause.sentence
        assert cause.remedy
        assert not cause.link or cause.link.startswith("https://")
        assert cause.lines()[0].startswith("known cause (")
        assert set(cause.to_record()) == {"name", "sentence", "remedy", "link"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("output  2x8    complex64    0%   FAIL shape 2x8x2 instead of 2x8", ["complex output"]),
        ("output  scalar  complex128  0%   FAIL shape 2 instead of scalar", ["complex output"]),
        ("output  2x8    complex64    0%   FAIL shape 2x8x2 instead of 2x8x3", []),
        ("output  2x8    complex64    0%   FAIL shape 2x9 instead of 2x8", []),
        ("output  2x8    float32      0%   FAIL shape 2x8x2 instead of 2x8", []),
        ("input x: ONNX Runtime takes no torch.complex64", ["complex input"]),
    ],
)
def test_complex_values_have_a_remedy(row: str, expected: list[str]) -> None:
    causes = causes_of_text(row, "compare", "float32", fresh=False)
    assert [cause.name for cause in causes] == expected
    assert all("torch.view_as_real" in cause.remedy for cause in causes)


LOOP_NET = """
    class Net(nn.Module):
        def forward(self, x):
{body}


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, m, 4),), {{}}) for n, m in ((2, 6), (3, 8))]
"""

#: What a model does with a size -> the cause.
OVER_SIZES = {
    "for": ("h = x[:, 0]\nfor i in range(x.shape[1]):\n    h = h + x[:, i]\nreturn h", "loop over a size"),
    "comprehension": ("return torch.stack([x[:, i] for i in range(x.shape[1])])", "loop over a size"),
    "while": (
        "h, i = x[:, 0], 0\nwhile i < x.shape[1]:\n    h, i = h + x[:, i], i + 1\nreturn h",
        "loop over a size",
    ),
    "constant": ("return x * int(x.shape[1])", "fixed axis"),
    "a loop elsewhere": ("for _ in range(2):\n    x = x * int(x.shape[1])\nreturn x", "fixed axis"),
}


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
@pytest.mark.parametrize("name", OVER_SIZES)
def test_a_loop_over_a_size_is_told_from_other_constants(name: str, exporter: str, tmp_path: Any) -> None:
    body, expected = OVER_SIZES[name]
    lines = "\n".join(" " * 12 + line for line in body.splitlines())
    _, error, _ = verdict(make_run(tmp_path, LOOP_NET.format(body=lines)), exporter)
    assert error is not None
    found = [cause.name for cause in causes_of_text(str(error), error.stage, "float32", False)]
    assert found == [expected], error
    if expected == "loop over a size":
        (cause,) = [cause for cause in CAUSES if cause.name == expected]
        assert "patch_modes: [none, rewrite]" in cause.remedy


def test_a_loop_and_another_constant_are_both_told() -> None:
    text = (
        "axis 0 of x (batch) became a constant: x.shape[0] == 2 (net.py:4: return x * int(x.shape[0]))\n"
        "1 dynamic axis became constant\n"
        "axis 1 of x (seq) became a constant: x.shape[1] == 9 (net.py:8: for i in range(x.shape[1]):)"
    )
    assert names(Evidence(text)) == ["loop over a size", "fixed axis"]


def test_blocks_that_a_loop_runs_over() -> None:
    """Nothing is refused there: other sizes show it."""
    text = "decided at n=128, and otherwise here: n//64 == 2 (net.py:8: for i in range(x.shape[1] // 64):)"
    assert names(Evidence(text, "resize")) == ["loop over a size"]


class Transform(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x, dim=1).real


def test_an_inexact_transform_is_a_known_cause() -> None:
    calls = [((torch.randn(n, 1023),), {}) for n in (2, 3)]
    found = explain(Transform(), calls, exporter="onnx-dynamo")
    assert found.ladder is not None
    assert found.ladder.guilty == "kernel"
    assert [cause.name for cause in found.causes] == ["inexact DFT"]
    wrong = {torch.ops.aten.cos.default: lambda x: opset18.Sin(x)}
    found = explain(Then(), [((torch.randn(n, 16),), {}) for n in (2, 3)], custom_translation_table=wrong)
    assert [cause.name for cause in found.causes] == []


class Then(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.fft.fft(x, dim=1).real)


SIZES = """
    class Net(nn.Module):
        def forward(self, x):
            {body}


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, generator=g),), {{}}) for n, m in ((2, 9), (4, 7))]
"""


def sized(body: str, exporter: str, folder: Any) -> tuple[str, list[str]]:
    stage, error, _ = verdict(make_run(folder, SIZES.format(body=body)), exporter)
    if error is None:
        return stage, []
    text = "\n".join([error.message, *error.details])
    return stage, [cause.name for cause in causes_of_text(text, stage, "float32", True)]


@pytest.mark.parametrize(
    ("made", "exporters"),
    [
        ("int(torch.tensor(x.shape[1]))", ("torch-export", "onnx-dynamo", "onnx-torchscript")),
        ("int(torch.as_tensor(x.size(1)) * 1)", ("torch-export", "onnx-torchscript")),
        ("x.new_tensor(x.shape[1]).long().item()", ("torch-export", "onnx-torchscript")),
    ],
)
def test_a_size_that_went_through_a_tensor(made: str, exporters: tuple[str, ...], tmp_path: Any) -> None:
    for exporter in exporters:
        stage, found = sized(f"return x * {made}", exporter, tmp_path)
        assert stage != "pass"
        assert found == ["size through a tensor"], (exporter, found)
        # The remedy.
        assert sized("return x * x.shape[1]", exporter, tmp_path) == ("pass", [])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return x * 2 if torch.tensor(x.shape[1]) > 20 else x * 3", "data-dependent branch"),
        ("return x[:, : int(x.sum().abs()) + 1]", "data-dependent branch"),
        ("return x[:, : range(20)[x.shape[1]]]", "fixed axis"),
    ],
)
def test_other_values_of_tensors_are_no_sizes(body: str, expected: str, tmp_path: Any) -> None:
    stage, found = sized(body, "torch-export", tmp_path)
    assert (stage, found) == ("export", [expected])
