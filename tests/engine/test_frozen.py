"""Axes that became constants, inputs that vanished, and programs that were wrong before their conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.checks.frozen import lead_with_axes
from pytest_exportcheck.errors import ExportCheckError, ExportError
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.onnx_dynamo import OnnxDynamo, capture
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.registry import EXPORTERS, register_exporter
from pytest_exportcheck.runtimes.onnx_runtime import onnx_input_dims

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

NET = """
    class Net(nn.Module):
        def forward(self, x, mask=None):
            {body}


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        sizes = ((2, 7), (4, 9))
        return [((torch.randn(n, m, generator=g),), {{"mask": torch.ones(n, m)}}) for n, m in sizes]
"""


def net(folder: Path, body: str, extra: str = "") -> SpecRun:
    return make_run(folder, NET.format(body=body), extra)


@pytest.fixture
def foreign() -> Iterator[Any]:
    class Foreign:
        name = "foreign"
        behave: Any = None

        def export(self, request: ExportRequest) -> Any:
            return self.behave(request)

    exporter = Foreign()

    def add(behave: Any) -> None:
        exporter.behave = behave

    register_exporter("foreign", exporter)
    yield add
    EXPORTERS.unregister("foreign")


# axes

LOOP = "return sum(x[:, i] * i for i in range(x.shape[1]))"

#: What a model does -> its sizes in two calls.
FROZEN = {
    "return x + torch.ones(9)": "(2, 1), (4, 9)",
    LOOP: "(2, 7), (4, 9)",
    "return x * int(x.shape[1])": "(2, 7), (4, 9)",
    "return x + 1 if x.shape[1] == 9 else x": "(2, 7), (4, 9)",
}


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo", "torch-export-strict"])
@pytest.mark.parametrize("body", FROZEN)
def test_a_refused_constant_names_axis_value_and_line(body: str, exporter: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, NET.format(body=body).replace("(2, 7), (4, 9)", FROZEN[body]))
    stage, error, _ = verdict(run, exporter)
    if exporter == "torch-export-strict" and "int(" in body:
        assert stage == "pass", "dynamo keeps int(n) symbolic"
        return
    assert stage == "export", error
    assert error is not None
    headline = f"{exporter} refuses the model: axis 1 of x (x_dim_1) became a constant: "
    assert error.message.startswith(headline), error
    assert "x.shape[1] == 9" in error.message
    assert "net.py:8: " + body in error.message
    assert "Constraints violated" in error.details[0], "torch's own sentence stands below"
    assert not any("became a constant: " in line for line in error.details)


def violated(*more: str) -> ExportError:
    message = "it refuses the model: UserError: Constraints violated (L['x'].size()[1])! For more, run"
    return ExportError(message, details=["  - " + line for line in more])


def test_several_axes_and_axes_that_only_torch_names() -> None:
    both = ["axis 1 of x (a) became a constant: x.shape[1] == 9", "axis 0 of y (b) became a constant: ..."]
    failure = violated("You marked L['x'].size()[1]")
    lead_with_axes(failure, both)
    assert failure.message == f"it refuses the model: {both[0]} (and 1 more axis)"
    assert failure.details == [
        both[1],
        "UserError: Constraints violated (L['x'].size()[1])! For more, run",
        "  - You marked L['x'].size()[1]",
    ]
    failure = violated(
        "The values of a = L['x'].size()[1] and b = L['y'].size()[0] must always be equal.", "Another"
    )
    lead_with_axes(failure, [])
    equal = "The values of a = x.shape[1] and b = y.shape[0] must always be equal"
    assert failure.message == f"it refuses the model: {equal}"
    assert failure.details[0].startswith("UserError: Constraints violated")


def test_what_is_no_violation_keeps_its_sentence() -> None:
    for message in ("it refuses the model: ValueError: no", "Constraints violated", "x: Constraints kept"):
        failure = ExportError(message, details=["  - L['x'].size()[1]"])
        lead_with_axes(failure, ["axis 1 of x became a constant"])
        assert failure.message == message
        assert failure.details == ["axis 1 of x became a constant", "  - L['x'].size()[1]"]
    failure = violated()
    lead_with_axes(failure, [])
    assert failure.message.startswith("it refuses the model: UserError: Constraints violated")
    assert failure.details == []


def test_what_a_condition_leaves_of_a_size_is_told(tmp_path: Path) -> None:
    body = "return x if x.shape[1] > 8 and x.shape[1] < 10 else x * 2"
    stage, error, _ = verdict(net(tmp_path, body), "onnx-dynamo")
    assert stage == "export", error
    assert "became a constant: x.shape[1] < 10, which leaves x.shape[1] == 9 (" in str(error)


class Auto:
    """As a user may write it: `Dim.AUTO` lets torch freeze what it likes, and nobody complains."""

    name = "foreign"

    @staticmethod
    def program(request: ExportRequest) -> torch.export.ExportedProgram:
        auto = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in request.kwargs}
        return torch.export.export(request.model, (), kwargs=request.kwargs, dynamic_shapes=auto)


def test_a_constant_that_nobody_complained_of_fails_at_export(foreign: Any, tmp_path: Path) -> None:
    foreign(lambda request: Exported(Auto.program(request)))
    run = net(tmp_path, LOOP)
    stage, error, record = verdict(run, "foreign")
    assert stage == "export"
    assert error is not None
    assert error.message == "1 dynamic axis became constant"
    (line,) = error.details
    assert line.startswith(
        "axis 1 of x (x_dim_1) is dynamic in the calls, the program fixes it to 9: x.shape[1] == 9 ("
    )
    assert "net.py:8: return sum(" in line
    assert record["specialised"] == [line]


def test_a_constant_in_the_onnx_model_fails_at_convert_before_a_session_is_made(
    foreign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behave(request: ExportRequest) -> Exported:
        program = torch.onnx.export(Auto.program(request), verbose=False)
        names = {path: path for path in request.input_paths}
        return Exported(program, names, request.output_paths)

    foreign(behave)
    monkeypatch.setattr("pytest_exportcheck.pipeline.open_session", lambda *args: pytest.fail("a session"))
    entered: list[str] = []
    run = net(tmp_path, LOOP)
    with pytest.raises(ExportCheckError) as caught:
        run_case(run, CaseId(run.spec.relative, "foreign", "none", "cpu", "float32"), entered.append, {})
    assert caught.value.stage == "convert"
    assert "the program fixes it to 9: x.shape[1] == 9 (" in caught.value.details[0]
    assert "session" not in entered


def test_an_output_that_froze_is_caught_at_other_sizes(foreign: Any, tmp_path: Path) -> None:
    """Only the declared shape of the output, or its size in the graph: the inputs stay symbolic."""

    def behave(request: ExportRequest) -> Exported:
        shape = helper.make_tensor("s", TensorProto.INT64, [1], [36])
        model = helper.make_model(
            helper.make_graph(
                [
                    helper.make_node("Constant", [], ["s"], value=shape),
                    helper.make_node("Reshape", ["x", "s"], ["y"]),
                ],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
                [helper.make_tensor_value_info("y", TensorProto.FLOAT, [36])],
            ),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
        return Exported(model, {"x": "x"}, ["output"])

    foreign(behave)
    text = NET.format(body="return x.flatten()").replace("(2, 7), (4, 9)", "(4, 9), (9, 4)")
    stage, error, _ = verdict(make_run(tmp_path, text), "foreign")
    assert stage == "resize", error


def forms(dims: list[Any]) -> dict[str, Any]:
    import onnx_ir

    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    return {"proto": model, "bytes": model.SerializeToString(), "ir": onnx_ir.from_proto(model)}


@pytest.mark.parametrize("form", ["proto", "bytes", "ir"])
def test_declared_dims_of_every_form(form: str, tmp_path: Path) -> None:
    found = onnx_input_dims(forms([2, "n", 0])[form])
    assert found == {"x": [2, "n", 0]}
    path = tmp_path / "m.onnx"
    onnx.save(forms([2, "n", 0])["proto"], path)
    assert onnx_input_dims(path) == onnx_input_dims(str(path)) == found
    (unknown,) = onnx_input_dims(forms([None, 3])[form]).values()  # type: ignore[union-attr]
    assert unknown[1] == 3
    assert not isinstance(unknown[0], int)


def test_what_has_no_dims() -> None:
    for junk in (b"junk", "no/such/file.onnx", 42, torch.nn.Linear(1, 1)):
        assert onnx_input_dims(junk) is None


@pytest.mark.parametrize("names", [("n", "m", "k", "l"), ("n", "n", "n", "n")])
def test_one_name_for_axes_of_different_sizes_fails_at_run(
    names: tuple[str, ...], foreign: Any, tmp_path: Path
) -> None:
    """ONNX Runtime gives tensors of one symbolic shape one buffer; the second does not fit there."""

    def behave(request: ExportRequest) -> Exported:
        nodes = [
            helper.make_node("Exp", ["x"], ["a"]),
            helper.make_node("ReduceSum", ["a"], ["b"], keepdims=0),
            helper.make_node("Mul", ["mask", "b"], ["c"]),
            helper.make_node("Cos", ["c"], ["d"]),
            helper.make_node("ReduceSum", ["d"], ["y"], keepdims=0),
        ]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims))
            for name, dims in (("x", names[:2]), ("mask", names[2:]))
        ]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
        model = helper.make_model(
            helper.make_graph(nodes, "g", inputs, [output]),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
        return Exported(model, {"x": "x", "mask": "mask"}, ["output"])

    foreign(behave)
    text = NET.format(body="return torch.cos(mask * x.exp().sum()).sum()")
    text = text.replace("torch.ones(n, m)", "torch.ones(m + 30, n + 50)")
    extra = "tolerance: {atol: 1.0, rtol: 1.0e-2}\n"
    stage, error, _ = verdict(make_run(tmp_path, text, extra), "foreign")
    if len(set(names)) == 4:
        assert stage == "pass", error
    else:
        assert stage == "run"
        assert "Shape mismatch attempting to re-use buffer" in str(error)


# inputs


def test_an_input_that_nobody_reads_may_vanish(foreign: Any, tmp_path: Path) -> None:
    def behave(request: ExportRequest) -> Exported:
        exported = OnnxDynamo().export(request)
        exported.input_names.pop("mask")
        graph = exported.program.model.graph
        graph.inputs[:] = [value for value in graph.inputs if value.name != "mask"]
        return exported

    foreign(behave)
    stage, error, record = verdict(net(tmp_path, "return x * 2"), "foreign")
    assert stage == "pass", error
    assert record["unused_inputs"] == ["mask"]
    assert verdict(net(tmp_path, "return x * 2"), "onnx-dynamo")[2]["unused_inputs"] == ["mask"]


def test_an_input_that_was_baked_is_no_unused_one(foreign: Any, tmp_path: Path) -> None:
    """Every call passes a mask of ones: a program without a mask has the right numbers in all of them."""

    class Baked(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 1.0

    def behave(request: ExportRequest) -> Exported:
        rows = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        program = torch.onnx.export(
            Baked(), (), kwargs={"x": request.kwargs["x"]}, dynamic_shapes={"x": rows}, verbose=False
        )
        return Exported(program, {"x": "x"}, request.output_paths)

    foreign(behave)
    stage, error, record = verdict(net(tmp_path, "return x * mask"), "foreign")
    assert stage == "convert", error
    assert "no input for mask, and eager's outputs depend on it" in str(error)
    assert record["unused_inputs"] == ["mask"]
    assert verdict(net(tmp_path, "return x * 1.0"), "foreign")[0] == "pass"


# the captured program


def changed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with `mul` made `add`: a capture that is wrong."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.mul.Tensor:
            node.target = torch.ops.aten.add.Tensor
    program.graph_module.recompile()
    return program


def test_wrong_numbers_of_the_capture_fail_at_export(foreign: Any, tmp_path: Path) -> None:
    def behave(request: ExportRequest) -> Exported:
        program = changed(capture(request))
        request.captured(program)
        pytest.fail("not converted")

    foreign(behave)
    stage, error, record = verdict(net(tmp_path, "return x * mask"), "foreign")
    assert stage == "export"
    assert error is not None
    assert error.message.startswith("the captured program already differs from eager, call 1 of 2: 1 of 1")
    assert any("output" in line for line in error.details)
    assert record["captured"]["agrees"] == 0
    assert len(record["captured"]["differs"]) == 2


def test_a_wrong_conversion_is_told_from_a_wrong_capture(foreign: Any, tmp_path: Path) -> None:
    def behave(request: ExportRequest) -> Exported:
        program = capture(request)
        request.captured(program)
        wrong = changed(program)
        onnx_program = torch.onnx.export(wrong, dynamic_shapes=request.dynamic_names, verbose=False)
        return Exported(onnx_program, {path: path for path in request.input_paths}, request.output_paths)

    foreign(behave)
    stage, error, record = verdict(net(tmp_path, "return x * mask"), "foreign")
    assert stage == "compare"
    assert "the captured program agrees with eager: the conversion or the runtime is to blame" in str(error)
    assert record["captured"] == {"agrees": 2, "refuses": [], "differs": []}


def test_a_guard_of_the_capture_is_no_verdict_on_the_onnx_model(tmp_path: Path) -> None:
    """`n > 3` is kept as it was for the example; both sides compute the same."""
    body = "return x * 2 if x.shape[0] > 3 else x + x"
    stage, error, record = verdict(net(tmp_path, body), "onnx-dynamo")
    assert stage == "pass", error
    assert record["captured"]["agrees"] == 1
    assert record["captured"]["differs"] == []
    (refusal,) = record["captured"]["refuses"]
    assert refusal.startswith("call 1 of 2: AssertionError: Guard failed: x.size()[0] >= 4")


def test_a_capture_that_cannot_be_run_is_noted(foreign: Any, tmp_path: Path) -> None:
    def behave(request: ExportRequest) -> Exported:
        class Unrunnable:
            def module(self) -> Any:
                raise RuntimeError("no module of it")

        request.captured(Unrunnable())  # type: ignore[arg-type]
        return OnnxDynamo().export(replace(request, captured=lambda program: None))

    foreign(behave)
    stage, error, record = verdict(net(tmp_path, "return x * mask"), "foreign")
    assert stage == "pass", error
    assert record["captured"] == {"not_run": "RuntimeError: no module of it"}


def test_a_stand_in_is_blamed_before_the_capture(tmp_path: Path) -> None:
    text = NET.format(body="return x if mask is None else x * mask").replace(
        '{"mask": torch.ones(n, m)}) for', '{"mask": torch.zeros(n, m)} if n == 4 else {}) for'
    )
    wrong = 'observe: {calls: "net.py:calls", value_if_missing: {mask: "float32[x_dim_0, x_dim_1] = 0"}}\n'
    stage, error, _ = verdict(make_run(tmp_path, text, wrong), "onnx-dynamo")
    assert stage == "observe", error
    assert "eager itself answers differently" in str(error)
