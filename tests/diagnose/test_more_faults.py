"""More planted faults: every step again, in another place, in real models, and several at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx
import pytest
import torch
from onnxscript import opset18 as op

from pytest_exportcheck.checks.compare import Tolerances
from pytest_exportcheck.diagnose.diagnosis import Diagnosis
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.onnx_dynamo import OnnxDynamo

from .helpers import Gelu, Raises, Wrap, corrupted_runtime
from .test_faults import ROWS, WIDE, Half, decode, explain, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")


def guilty(found: Diagnosis) -> str:
    assert found.ladder is not None
    return found.ladder.guilty


def first(found: Diagnosis) -> Any:
    assert found.nodes is not None
    assert found.nodes.first is not None
    return found.nodes.first


def sites(found: Diagnosis) -> list[str]:
    assert found.pieces is not None
    return [culprit.site for culprit in found.pieces.culprits]


def llama_calls(model: torch.nn.Module) -> list[Any]:
    return [decode(model, 2, 3, 4), decode(model, 3, 6, 5)]


def test_an_activation_that_cannot_be_captured_deep_in_llama() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.act_fn = Raises()  # type: ignore[union-attr, index]
    found = explain(model, llama_calls(model))
    assert guilty(found) == "capture"
    assert sites(found) == ["model.layers[1].mlp.act_fn"]
    assert "smallest failing module: model.layers[1].mlp.act_fn (Raises)" in found.verdict


def test_an_activation_that_is_converted_wrong_deep_in_llama() -> None:
    model = tiny_llama()
    table = {torch.ops.aten.silu.default: lambda x: op.Mul(x, op.HardSigmoid(x))}
    found = explain(model, llama_calls(model), custom_translation_table=table)
    assert guilty(found) == "conversion"
    assert first(found).operator == "aten.silu.default"
    assert first(found).module.startswith("model.layers.0.mlp.act_fn")


class Exporting(torch.nn.Module):
    """Computes something else while it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.01 if torch.compiler.is_exporting() else x


class Two(torch.nn.Module):
    def __init__(self, left: torch.nn.Module, right: torch.nn.Module) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_wrong_numbers_of_a_capture(exporter: str) -> None:
    found = explain(Two(Wrap(Exporting()), torch.nn.Linear(6, 6)), WIDE, exporter=exporter)
    assert guilty(found) == "capture"
    assert sites(found) == ["left.inner"]


def test_wrong_numbers_and_a_refusal_at_once() -> None:
    found = explain(Two(Wrap(Exporting()), Wrap(Raises())), WIDE)
    assert guilty(found) == "capture"
    assert sites(found)[-1] == "right.inner"
    # The refusal hides the numbers of the whole, and not of the pieces.
    assert "left.inner" in sites(found)


def test_a_branch_on_one_size() -> None:
    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(torch.Size(map(int, x.shape))) if x.shape[0] == 5 else x

    found = explain(Two(Wrap(torch.nn.Identity(), 4), Wrap(Rows(), 4)), ROWS, exporter="torch-export")
    assert guilty(found) == "capture"
    assert sites(found) == ["right.inner"]


class Counted(torch.nn.Module):
    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return x / rows


class CountsRows(torch.nn.Module):
    """Gives a submodule a size as a number: that one is no graph of its own, and nothing is wrong with it."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.counted = Counted()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.counted(x, x.shape[0]))


def test_what_cannot_be_exported_alone_is_not_blamed_first() -> None:
    found = explain(CountsRows(Wrap(Exporting(), 4)), ROWS, exporter="torch-export")
    assert guilty(found) == "capture"
    assert sites(found) == ["other.inner", "counted"]
    assert found.pieces is not None
    assert [culprit.only_alone for culprit in found.pieces.culprits] == [False, True]
    assert "smallest failing module: other.inner (Exporting)" in found.verdict
    assert any(
        line.startswith("perhaps: counted (Counted) cannot be one graph alone") for line in found.lines()
    )


def test_what_cannot_be_exported_alone_is_not_tried_where_a_guard_is_known() -> None:
    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] > 4 else x - 1

    found = explain(CountsRows(Wrap(Rows(), 4)), ROWS, exporter="torch-export")
    assert sites(found) == ["other.inner"]
    assert "smallest failing module: other.inner (Rows)" in found.verdict
    assert found.pieces is not None
    assert found.pieces.culprits[0].line.endswith("return x + 1 if x.shape[0] > 4 else x - 1")


@dataclasses.dataclass
class Box:
    value: torch.Tensor


def test_an_unregistered_class_two_levels_deep() -> None:
    class Boxes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Box:
            return Box(x + 1)

    class Opens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.boxes = Boxes()

        def forward(self, x: torch.Tensor) -> Any:
            return self.boxes(x)

    found = explain(Opens(), ROWS, exporter="torch-export")
    assert guilty(found) == "capture"
    assert sites(found) == ["boxes"]
    assert "unregistered class" in [cause.name for cause in found.causes]


def test_a_conversion_that_raises() -> None:
    def broken(x: Any, approximate: str = "none") -> Any:
        raise ValueError("no such thing here")

    found = explain(Gelu(), ROWS, custom_translation_table={torch.ops.aten.gelu.default: broken})
    assert guilty(found) == "conversion"
    assert "no such thing here" in found.verdict
    assert "aten.gelu.default" in found.node


def test_a_conversion_that_onnxruntime_refuses() -> None:
    # Not of bool: the graph is invalid.
    table = {torch.ops.aten.gelu.default: lambda x, approximate="none": op.Where(x, x, x)}
    found = explain(Gelu(), ROWS, custom_translation_table=table)
    assert guilty(found) == "conversion"
    assert "onnxruntime fails on the converted graph" in found.verdict


def test_a_custom_pass_that_rewrites_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.onnx.ONNXProgram.optimize

    def optimize(self: Any) -> None:
        real(self)
        for node in self.model.graph:
            if node.op_type == "Softmax":
                node.attributes["axis"] = type(node.attributes["axis"])(
                    "axis", node.attributes["axis"].type, 0
                )

    monkeypatch.setattr(torch.onnx.ONNXProgram, "optimize", optimize)
    found = explain(Gelu(), ROWS)
    assert guilty(found) == "onnx optimizer"
    assert "softmax" in first(found).operator


def test_an_optimizer_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimize(self: Any) -> None:
        raise RuntimeError("the pass lost its way")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "optimize", optimize)
    found = explain(Gelu(), ROWS)
    assert guilty(found) == "onnx optimizer"
    assert "the pass lost its way" in found.verdict
    assert "{onnx-dynamo: {optimize: false}}" in found.verdict


def shifted_softmax(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("axis", 0))


@pytest.mark.parametrize(
    ("level", "optimizer"), [("BASIC", "ConstantFolding"), ("LAYOUT", "NchwcTransformer"), ("ALL", "")]
)
def test_each_level_of_the_runtime(monkeypatch: pytest.MonkeyPatch, level: str, optimizer: str) -> None:
    corrupted_runtime(monkeypatch, shifted_softmax, f"ORT_ENABLE_{level}", unless=optimizer or "nothing")
    found = explain(Gelu(), ROWS)
    assert guilty(found) == f"onnxruntime ENABLE_{level}"
    assert found.verdict.startswith(f"guilty: onnxruntime graph optimization (level {level})")
    assert (f'disabled_optimizers=["{optimizer}"]' in found.verdict) == bool(optimizer)


def test_a_kernel_with_another_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            for attribute in node.attribute if node.op_type == "LayerNormalization" else ():
                if attribute.name == "epsilon":
                    attribute.f = 0.1

    corrupted_runtime(monkeypatch, corrupt)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    found = explain(model, ROWS)
    assert guilty(found) == "kernel"
    assert first(found).onnx_nodes == "LayerNormalization"
    assert first(found).module.startswith("1 (LayerNorm)")


def test_a_jump_among_the_rounding_of_float16() -> None:
    inputs = [((torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).half(),), {}) for n in (2, 5)]
    wrong = {torch.ops.aten.tanh.default: lambda x: op.Softsign(x)}
    found = explain(Half().half(), inputs, custom_translation_table=wrong)
    assert guilty(found) == "conversion"
    assert found.nodes is not None
    assert found.nodes.kind == "jump"
    assert (first(found).name, first(found).operator) == ("tanh", "aten.tanh.default")


def test_a_drift_in_float32() -> None:
    inputs = [((torch.randn(n, 16, generator=torch.Generator().manual_seed(n)),), {}) for n in (2, 5)]
    found = explain(Half(), inputs, tolerances=Tolerances(atol=1e-9, rtol=0.0))
    assert guilty(found) == "drift"
    assert found.nodes is not None
    assert found.nodes.kind == "drift"


class ShiftedPast(torch.nn.Module):
    """Appends to a past; while it is traced the past is one position off."""

    def forward(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            past = past.roll(1, 1)
        return torch.cat([past, new], 1)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ShiftedPast()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return self.inner(past, self.lin(new))


def test_a_past_shifted_by_the_capture() -> None:
    inputs = [((torch.randn(2, past, 4), torch.randn(2, 2, 4)), {}) for past in (3, 5)]
    found = explain(Decoder(), inputs)
    assert guilty(found) == "capture"
    assert sites(found) == ["inner"]


def test_a_branch_that_torchscript_bakes_in() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    inputs = [((torch.full((n, 4), value),), {}) for n, value in ((2, 1.0), (5, -1.0))]
    found = explain(Net(), inputs, exporter="onnx-torchscript")
    assert guilty(found) == "conversion"
    assert found.verdict.startswith("guilty: onnx-torchscript to ONNX")
    assert found.ladder is not None
    assert found.ladder.sample == "call 1 of 2"  # it is traced with the other one


class FixesAnAxis:
    """An exporter of which only the result is known: it exports for one batch size."""

    name = "fixes-an-axis"
    target = "onnx"

    def export(self, request: ExportRequest) -> Exported:
        fixed = dataclasses.replace(
            request,
            dynamic_shapes={"x": {1: torch.export.Dim.DYNAMIC}},
            dynamic_names={"x": {1: "rows"}},
            options={},
        )
        return OnnxDynamo().export(fixed)


def test_an_exporter_that_fixes_an_axis() -> None:
    calls = [{"x": torch.randn(b, n, 4)} for b, n in ((2, 6), (3, 5))]
    found = explain(Gelu(), calls, exporter=FixesAnAxis())
    assert guilty(found) == "export"
    assert "fixes-an-axis: 1 dynamic axis became constant: axis 0 of x (x_dim_0) is dynamic" in found.verdict
    assert "fixes it to 2" in found.verdict
    assert [cause.name for cause in found.causes] == ["fixed axis"]


class Biased(torch.nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)


def test_a_masked_row_of_an_input_that_is_not_called_mask() -> None:
    def call(batch: int, length: int) -> dict[str, torch.Tensor]:
        bias = torch.zeros(batch, 2, length, length)
        bias[:, :, 1] = -torch.inf
        return {"x": torch.randn(batch, 2, length, 8), "bias": bias}

    found = explain(Biased(), [call(2, 4), call(3, 5)])
    assert guilty(found) == "conversion"
    assert [cause.name for cause in found.causes] == ["fully masked attention rows"]
