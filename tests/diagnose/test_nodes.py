"""Inside the ONNX graph: which value is the first that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnxscript import opset18 as op

from pytest_exportcheck.diagnose.ladder import climb
from pytest_exportcheck.diagnose.nodes import NodeSearch, first_bad_node
from pytest_exportcheck.diagnose.onnx_models import inner_values, to_numpy, to_torch
from pytest_exportcheck.diagnose.subject import Clock, subject_of

pytestmark = pytest.mark.filterwarnings("ignore")


def search(
    model: torch.nn.Module, inputs: list[Any], level: str = "DISABLE_ALL", **options: Any
) -> NodeSearch:
    subject = subject_of(model.eval(), inputs, **options)
    clock = Clock(1e6)  # no verdict about the speed of this machine
    ladder = climb(subject, clock, sample=next(iter(subject.samples())))
    assert ladder.decomposed is not None
    assert ladder.plain is not None
    assert ladder.inputs is not None
    with subject.active():
        return first_bad_node(
            ladder.decomposed, ladder.plain, ladder.inputs, subject.tolerances, clock, level=level
        )


class Long(torch.nn.Module):
    """Four nodes for each step, one step of which has a node more."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(self.steps):
            x = torch.sin(x) + 1.0 + x * 0.1
            if k == self.steps * 3 // 4:
                x = torch.cos(x)
        return x


WRONG_COS = {torch.ops.aten.cos.default: lambda x: op.Sin(x)}


# Hundreds: more than are looked at in two runs. With dynamic axes torch alone takes four times as long.
@pytest.mark.parametrize(("steps", "sizes"), [(121, (2, 2)), (20, (2, 4))], ids=["hundreds", "dynamic"])
def test_one_of_many_nodes(steps: int, sizes: tuple[int, int]) -> None:
    inputs = [((torch.randn(n, 3),), {}) for n in sizes]
    found = search(Long(steps), inputs, custom_translation_table=WRONG_COS)
    assert found.nodes == 4 * steps + 1
    assert found.compared == found.nodes
    assert found.first is not None
    assert (found.kind, found.first.operator) == ("jump", "aten.cos.default")
    assert found.kernel is False
    assert any("<- first" in line for line in found.lines())
    before = [entry for entry in found.profile if entry.outside]
    assert before[0] is found.first


def test_a_right_graph_has_no_such_node() -> None:
    found = search(Long(20), [((torch.randn(n, 3),), {}) for n in (2, 4)])
    assert (found.kind, found.first) == ("none", None)
    assert found.compared == found.nodes == 81
    assert found.lines()[0].startswith("first node: none is outside the tolerance")


class Mixed(torch.nn.Module):
    """Several outputs, an operator with two results, sizes as values, booleans, a loop in a cond."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        low, high = x.split(2, dim=-1)
        values, index = x.topk(2)
        scaled = low * x.shape[0]
        branch = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (high,))
        keep = x > 0 if mask is None else mask
        return {"a": scaled, "b": [values, index], "c": branch, "keep": keep}


def test_several_outputs_sizes_and_branches() -> None:
    inputs = [((torch.randn(n, 4),), {"mask": torch.rand(n, 4) > 0.5}) for n in (2, 3)]
    found = search(Mixed(), inputs)
    assert found.kind == "none"
    assert found.compared >= 5
    table = {torch.ops.aten.mul.Tensor: lambda a, b: op.Add(a, op.CastLike(b, a))}
    found = search(Mixed(), inputs, custom_translation_table=table)
    assert found.first is not None
    assert found.first.operator == "aten.mul.Tensor"
    assert found.first.source.endswith("scaled = low * x.shape[0]")


def test_an_optimized_graph_is_searched_as_it_is() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.lin(x)) + 1

    table = {torch.ops.aten.gelu.default: lambda x, approximate="none": op.Relu(x)}
    inputs = [((torch.randn(n, 4),), {}) for n in (2, 3)]
    found = search(Net(), inputs, level="ENABLE_EXTENDED", custom_translation_table=table)
    assert found.first is not None
    # Fused with the layer before it, which has no value of its own any more.
    assert found.first.name == "gelu"
    assert found.kernel is None or found.kernel is False


def test_a_wrong_shape_is_a_reason() -> None:
    table = {torch.ops.aten.cos.default: lambda x: op.Unsqueeze(op.Cos(x), op.Constant(value_ints=[0]))}

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cos(x)

    found = search(Net(), [((torch.randn(n, 3),), {}) for n in (2, 4)], custom_translation_table=table)
    assert found.first is not None
    assert found.first.reason == "shape 1x2x3 instead of 2x3"


def test_inner_values_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_exportcheck.diagnose.onnx_models._CHUNK", 2)
    subject = subject_of(Long(8), [((torch.randn(n, 3),), {}) for n in (2, 4)])
    with subject.active():
        exported, _ = subject.export()
        arguments = next(iter(subject.samples())).tensors
        names = [f"sin_{k}" for k in range(1, 6)]
        assert set(inner_values(exported, arguments, names)) > set(names)
        answers = iter([True, False])
        few = inner_values(exported, arguments, names, more=lambda: next(answers))
        assert set(few) & set(names) == {"sin_1", "sin_2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_go_to_numpy_and_back(dtype: torch.dtype) -> None:
    for tensor in (
        torch.tensor([[0, 1, 1]]).to(dtype),
        torch.tensor(1).to(dtype),
        torch.zeros(0, 2).to(dtype),
    ):
        again = to_torch(to_numpy(tensor))
        assert again.dtype == dtype
        assert torch.equal(again, tensor)


class Transform(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.fft.fft(x * 2, dim=1).real)


def test_a_complex_value_is_its_parts_in_onnx() -> None:
    """A size that is a power of two: ONNX Runtime is exact there."""
    inputs = [((torch.randn(n, 16),), {}) for n in (2, 3)]
    found = search(Transform(), inputs)
    assert (found.kind, found.first) == ("none", None)
    assert found.compared == found.nodes
    found = search(Transform(), inputs, custom_translation_table=WRONG_COS)
    assert found.first is not None
    assert (found.kind, found.first.operator, found.kernel) == ("jump", "aten.cos.default", False)


def test_the_transform_of_onnx_runtime_is_inexact_where_the_size_is_no_power_of_two() -> None:
    """A kernel, and no graph: the reference evaluator agrees with torch."""
    found = search(Transform(), [((torch.randn(n, 1023),), {}) for n in (2, 3)])
    assert found.first is not None
    assert found.first.operator.startswith("aten._fft_")
    assert (found.kind, found.kernel) == ("jump", True), found.lines()
    assert "DFT" in found.first.onnx_nodes
