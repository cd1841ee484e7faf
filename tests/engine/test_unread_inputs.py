"""Inputs that no output of a program depends on: a failure where eager's do, a note where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pytest_exportcheck.checks import inputs
from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.exporters.dependence import paths_by_output
from pytest_exportcheck.runtimes.dependence import inputs_by_output

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

PROGRAMS = ("torch-export", "onnx-dynamo")

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x, mask):
            {body}


    def build_model():
        torch.manual_seed(0)
        return Net().eval()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, 4, generator=g), {mask}), {{}}) for n, m in ((2, 7), (4, 9))]
"""

ONES = "torch.ones(n, m)"


def net(body: str, mask: str = ONES) -> str:
    lines = ("\n" + " " * 12).join(body.splitlines())
    return NET.format(body=lines, mask=mask)


READS = "return self.lin(x * mask.unsqueeze(-1))"

#: What a model asks -> whether it is told while torch exports.
ASKED = {
    "torch.compiler.is_compiling()": True,
    "torch.compiler.is_exporting()": True,
    "torch.onnx.is_in_onnx_export()": False,
}


@pytest.mark.parametrize("exporter", [*PROGRAMS, "torch-export-strict"])
@pytest.mark.parametrize("asked", ASKED)
def test_an_input_that_is_left_out_while_exporting_fails_at_compare(
    asked: str, exporter: str, tmp_path: Path
) -> None:
    """Every mask is all ones, in the observed calls and in those of other sizes: all numbers agree."""
    stage, error, record = verdict(
        make_run(tmp_path, net(f"if {asked}:\n    return self.lin(x)\n{READS}")), exporter
    )
    if not ASKED[asked]:
        assert stage == "pass", error
        assert record["unused_inputs"] == []
        return
    assert stage == "compare", error
    assert error is not None
    assert error.message.startswith(
        "no output of the program depends on mask, and eager's outputs depend on it"
    )
    assert error.details[0].startswith(
        "with every second value 0 (or 1, where all were 0) in mask: 1 of 1 output"
    )
    assert any(line.startswith("output ") and "FAIL" in line for line in error.details)
    assert any("torch.compiler.is_compiling" in line for line in error.details)
    assert record["unused_inputs"] == ["mask"]
    if exporter == "onnx-dynamo":
        assert any(line.startswith("the captured program is wrong too") for line in error.details)


def test_torchscript_has_no_such_input(tmp_path: Path) -> None:
    stage, error, record = verdict(
        make_run(tmp_path, net(f"if torch.jit.is_tracing():\n    return self.lin(x)\n{READS}")),
        "onnx-torchscript",
    )
    assert stage == "convert", error
    assert "no input for mask, and eager's outputs depend on it" in str(error)
    assert record["unused_inputs"] == ["mask"]


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize(
    "instead",
    [
        "x + torch.zeros_like(mask).unsqueeze(-1)",
        "x + torch.zeros(mask.shape[0], 1, 1)",
        "torch.cond(x.sum() > 0, lambda x, mask: x + 0, lambda x, mask: x * 1, (x, mask))",
    ],
)
def test_sizes_and_operands_that_no_branch_reads_are_no_dependence(
    instead: str, exporter: str, tmp_path: Path
) -> None:
    body = f"if torch.compiler.is_compiling():\n    return self.lin({instead})\n{READS}"
    stage, error, _ = verdict(make_run(tmp_path, net(body)), exporter)
    assert stage == "compare", error
    assert "depends on mask" in str(error)


@pytest.mark.parametrize(
    "mask", ["torch.ones(n, m, dtype=torch.bool)", "torch.ones(n, m, dtype=torch.int64)"]
)
@pytest.mark.parametrize("exporter", PROGRAMS)
def test_a_mask_of_booleans_or_integers(exporter: str, mask: str, tmp_path: Path) -> None:
    body = f"if torch.compiler.is_compiling():\n    return self.lin(x)\n{READS}"
    stage, error, _ = verdict(make_run(tmp_path, net(body, mask)), exporter)
    assert stage == "compare", error


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_a_wrong_number_in_an_observed_call_is_told_as_before(exporter: str, tmp_path: Path) -> None:
    """A mask with zeros shows it without other values: the table of that call says more."""
    body = f"if torch.compiler.is_compiling():\n    return self.lin(x)\n{READS}"
    stage, error, _ = verdict(
        make_run(tmp_path, net(body, "torch.arange(n * m).reshape(n, m) % 2")), exporter
    )
    assert stage == ("export" if exporter == "onnx-dynamo" else "compare"), error
    assert "no output of the program" not in str(error)


#: Bodies under which neither the program nor eager depends on the mask, in what they return.
UNUSED = {
    "nothing": "return self.lin(x)",
    "its size": "return self.lin(x) + torch.zeros(mask.shape[1], 1)",
    "an assertion": "torch._assert_async((mask >= 0).all())\nreturn self.lin(x)",
    "itself in place": "mask.mul_(2)\nreturn self.lin(x)",
    "what nobody returns": "y = x * mask.unsqueeze(-1)\nreturn self.lin(x)",
    "only at other values": "return self.lin(x) + (mask == 77).sum()",
    "only while exporting": "return self.lin(x) + (0 * mask.sum() if torch.compiler.is_exporting() else 0)",
}


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("how", UNUSED)
def test_an_input_that_nobody_depends_on_is_told_and_no_failure(
    how: str, exporter: str, tmp_path: Path
) -> None:
    stage, error, record = verdict(make_run(tmp_path, net(UNUSED[how])), exporter)
    assert stage == "pass", error
    if how.startswith("only"):
        # Connected in the program, whatever comes of it.
        assert record["unused_inputs"] == []
        return
    assert record["unused_inputs"] == ["mask"]
    assert "unused_inputs_not_judged" not in record
    (note,) = [line for line in record["warnings"] if "depends on the values of mask" in line]
    assert note.startswith("no output depends on the values of mask, neither of the program nor of eager")


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_what_eager_does_only_at_values_that_are_not_tried_is_not_held_against_it(
    exporter: str, tmp_path: Path
) -> None:
    body = (
        "if torch.compiler.is_compiling():\n    return self.lin(x)\nreturn self.lin(x) + (mask == 77).sum()"
    )
    stage, error, record = verdict(make_run(tmp_path, net(body)), exporter)
    assert stage == "pass", error
    assert record["unused_inputs"] == ["mask"]


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_values_that_eager_refuses_leave_it_open(exporter: str, tmp_path: Path) -> None:
    body = (
        "if torch.compiler.is_compiling():\n    return self.lin(x)\n"
        "if not bool((mask == 1).all()):\n    raise ValueError('ones, please')\n"
        "return self.lin(x)"
    )
    stage, error, record = verdict(make_run(tmp_path, net(body)), exporter)
    assert stage == "pass", error
    assert record["unused_inputs"] == ["mask"]
    assert record["unused_inputs_not_judged"] == ["mask"]
    (note,) = [line for line in record["warnings"] if "depends on the values of mask" in line]
    assert "is not known: eager refuses other values there" in note
    assert "ones, please" in note


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_a_difference_that_the_spec_does_not_compare_is_none(exporter: str, tmp_path: Path) -> None:
    """`compare: where` leaves positions out; elsewhere eager is the same with any mask."""
    body = (
        "if torch.compiler.is_compiling():\n    return self.lin(x)\n"
        "return self.lin(x) * mask.unsqueeze(-1).ne(0)"
    )
    run = make_run(tmp_path, net(body), "compare: {output: {where: mask}}\n")
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert record["unused_inputs"] == ["mask"]
    (tmp_path / "whole").mkdir()
    assert verdict(make_run(tmp_path / "whole", net(body)), exporter)[0] == "compare"


def test_what_the_spec_cannot_judge_leaves_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = inputs.rules_of_call

    def rules(spec: Any, given: Any, *rest: Any) -> Any:
        if not bool((given["mask"] == 1).all()):
            raise ObserveError("compare.output: mask does not fit")
        return judged(spec, given, *rest)

    monkeypatch.setattr(inputs, "rules_of_call", rules)
    stage, error, record = verdict(make_run(tmp_path, net("return self.lin(x)")), "torch-export")
    assert stage == "pass", error
    assert record["unused_inputs"] == record["unused_inputs_not_judged"] == ["mask"]
    (note,) = [line for line in record["warnings"] if "depends on the values of mask" in line]
    assert "is not known: what the spec compares by judges nothing at other values there" in note


@pytest.mark.parametrize("exporter", PROGRAMS)
def test_what_other_values_leave_in_the_model_stays_in_a_copy(exporter: str, tmp_path: Path) -> None:
    body = (
        "if not torch.compiler.is_compiling():\n"
        "    self.largest = max(getattr(self, 'largest', 0), float(mask.max()))\n"
        "return self.lin(x)"
    )
    run = make_run(tmp_path, net(body))
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert record["unused_inputs"] == ["mask"]
    assert run.model("cpu", "float32").largest == 1.0


def test_two_inputs_are_named_together_and_a_third_is_not(tmp_path: Path) -> None:
    text = """
    class Net(nn.Module):
        def forward(self, x, mask, scale, nobody):
            if torch.compiler.is_compiling():
                return x * 2
            return x * 2 * mask * scale


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, 3), torch.ones(n, 3), torch.ones(n, 1), torch.ones(n)), {}) for n in (2, 4)]
    """
    stage, error, _ = verdict(make_run(tmp_path, text), "torch-export")
    assert stage == "compare", error
    assert "depends on mask, scale, and eager's outputs depend on them: their values" in str(error)
    assert "nobody" not in str(error).partition("\n")[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.int32),
        torch.arange(6).reshape(2, 3),
    ],
)
def test_no_value_out_of_range_where_that_ends_the_process(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU checks an index by an assertion, after which no kernel runs any more."""
    monkeypatch.setattr(inputs, "_is_index", lambda tensor: True)
    for make in inputs._OTHERS.values():
        made = inputs._other(tensor, make)
        if made is not None:
            assert made.min() >= 0
            assert made.max() <= tensor.max()


# reachability


class Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.function(self, x, mask)


def view_written(module: Any, x: Any, mask: Any) -> Any:
    y = x.clone()
    y[:, 0:1].mul_(mask[:, :1])
    return y


def other_written(module: Any, x: Any, mask: Any) -> Any:
    y, z = x * 2, mask.clone()
    z.add_(1)
    return y


def buffer_written(module: Any, x: Any, mask: Any) -> Any:
    module.buffer.add_(mask.sum())
    return x + 1


def buffer_read(module: Any, x: Any, mask: Any) -> Any:
    module.buffer.add_(mask.sum())
    return x + module.buffer[0]


def without_grad(module: Any, x: Any, mask: Any) -> Any:
    with torch.enable_grad():
        y = x * mask
    return y + 1


def without_grad_unread(module: Any, x: Any, mask: Any) -> Any:
    with torch.enable_grad():
        y = x * 2 + mask.shape[0]
    return y + 1


def branches(module: Any, x: Any, mask: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x, mask: x + 1, lambda x, mask: x - mask, (x, mask))


def branches_unread(module: Any, x: Any, mask: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x, mask: x + 1, lambda x, mask: x - 1, (x, mask))


def decided_by_it(module: Any, x: Any, mask: Any) -> Any:
    return torch.cond(mask.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def a_number(module: Any, x: Any, mask: Any) -> Any:
    count = mask.sum().to(torch.int64).item()
    torch._check(count >= 0)
    return x + count


def asserted(module: Any, x: Any, mask: Any) -> Any:
    torch._assert_async(mask.sum() > 0)
    return x + 1


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("function", "read"),
    [
        (view_written, True),
        (other_written, False),
        (buffer_written, False),
        (buffer_read, True),
        (without_grad, True),
        (without_grad_unread, False),
        (branches, True),
        (branches_unread, False),
        (decided_by_it, True),
        (a_number, True),
        (asserted, False),
    ],
)
def test_inputs_of_a_captured_program(function: Any, read: bool, strict: bool, decomposed: bool) -> None:
    with torch.no_grad():
        program = torch.export.export(Function(function), (torch.ones(3, 4), torch.ones(3, 4)), strict=strict)
        if decomposed:
            program = program.run_decompositions({})
    assert paths_by_output(program, ["x", "mask"]) == [{"x", "mask"} if read else {"x"}]


def model_of(
    nodes: list[Any], inputs: str, outputs: str, functions: list[Any] | None = None
) -> onnx.ModelProto:
    def values(names: str) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]

    return helper.make_model(
        helper.make_graph(nodes, "g", values(inputs), values(outputs)), functions=functions or []
    )


def body(nodes: list[Any], inputs: str, outputs: str) -> Any:
    return model_of(nodes, inputs, outputs).graph


NODE = helper.make_node


@pytest.mark.parametrize(
    ("nodes", "read"),
    [
        ([NODE("Add", ["x", "y"], ["o"])], "xy"),
        ([NODE("Add", ["x", "y"], ["unread"]), NODE("Exp", ["x"], ["o"])], "x"),
        ([NODE("Shape", ["y"], ["s"]), NODE("Expand", ["x", "s"], ["o"])], "x"),
        ([NODE("CastLike", ["x", "y"], ["o"])], "x"),
        ([NODE("RandomNormalLike", ["y"], ["r"]), NODE("Add", ["x", "r"], ["o"])], "x"),
        (
            [
                NODE(
                    "If",
                    ["c"],
                    ["o"],
                    then_branch=body([NODE("Exp", ["x"], ["a"])], "", "a"),
                    else_branch=body([NODE("Add", ["x", "y"], ["b"])], "", "b"),
                )
            ],
            "cxy",
        ),
        (
            [
                NODE(
                    "If",
                    ["c"],
                    ["o"],
                    then_branch=body([NODE("Exp", ["x"], ["a"]), NODE("Exp", ["y"], ["d"])], "", "a"),
                    else_branch=body([NODE("Abs", ["x"], ["b"])], "", "b"),
                )
            ],
            "cx",
        ),
        (
            [
                NODE(
                    "Loop",
                    ["", "c", "x"],
                    ["o"],
                    body=body([NODE("Add", ["v", "y"], ["w"])], "icv", "cw"),
                )
            ],
            "cxy",
        ),
    ],
)
def test_inputs_of_an_onnx_graph(nodes: list[Any], read: str) -> None:
    assert inputs_by_output(model_of(nodes, "cxy", "o")) == [set(read)]


def test_inputs_through_a_function_of_the_model() -> None:
    function = helper.make_function(
        "own", "F", ["a", "b"], ["r"], [NODE("Exp", ["a"], ["r"])], [helper.make_opsetid("", 20)]
    )
    model = model_of([NODE("F", ["x", "y"], ["o"], domain="own")], "xy", "o", [function])
    assert inputs_by_output(model) == [{"x"}]


def test_each_output_has_its_own_inputs() -> None:
    model = model_of([NODE("Exp", ["x"], ["o"]), NODE("Add", ["x", "y"], ["p"])], "xy", "op")
    assert inputs_by_output(model) == [{"x"}, {"x", "y"}]
    program = torch.export.export(
        Function(lambda module, x, mask: (x + 1, 3, x * mask, None)), (torch.ones(3, 4), torch.ones(3, 4))
    )
    assert paths_by_output(program, ["x", "mask"]) == [{"x"}, set(), {"x", "mask"}, set()]


TWO_OUTPUTS = """
    class Net(nn.Module):
        def forward(self, x, mask):
            kept = x * {kept}
            return {{"kept": kept, "other": x.softmax(-1), "more": [x + mask, x * 2 - mask]}}


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, m, generator=g), torch.ones(n, m)), {{}}) for n, m in ((2, 7), (4, 9))]
"""


@pytest.mark.parametrize("exporter", PROGRAMS)
@pytest.mark.parametrize("right", [True, False])
def test_an_input_that_one_output_does_not_depend_on(right: bool, exporter: str, tmp_path: Path) -> None:
    """Others depend on it: what matters is each output."""
    kept = "mask" if right else "(1 if torch.compiler.is_compiling() else mask)"
    stage, error, record = verdict(make_run(tmp_path, TWO_OUTPUTS.format(kept=kept)), exporter)
    assert record["unused_inputs"] == []
    if right:
        assert stage == "pass", error
        return
    assert stage == "compare", error
    assert error is not None
    assert error.message.startswith("output kept of the program does not depend on mask, and eager's does: ")
    assert error.details[0].startswith("with every second value 0 (or 1, where all were 0) in mask: 1 of ")
    assert inputs.is_unread(error.message)
    assert not inputs.is_unread(error.details[0])
