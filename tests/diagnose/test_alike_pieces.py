"""Pieces that look alike and are not: options, hooks, sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pytest_exportcheck.diagnose.onnx_models import run_nodes

from .helpers import Gelu, Raises, wrong_gelu
from .test_faults import explain
from .test_more_faults import guilty, sites
from .test_other_faults import culprit

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [(torch.ones(n, 4),) for n in (2, 5)]


class Layer(torch.nn.Module):
    """Branches on data, if it is told to, which its text does not say."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branches and x.sum() > 0:
            return x
        return self.lin(x)


class Stack(torch.nn.Module):
    def __init__(self, last: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(k == 2) for k in range(4)])
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.last is None else self.last(x)


def test_a_refusal_in_one_of_several_layers_of_the_same_text() -> None:
    found = explain(Stack(), ROWS)
    assert guilty(found) == "capture"
    assert sites(found) == ["layers[2]"]
    assert culprit(found).parent_exports is True


def test_beside_another_culprit() -> None:
    found = explain(Stack(Raises()), ROWS)
    assert sites(found) == ["last", "layers[2]"]
    assert [c.parent_exports for c in found.pieces.culprits] == [True, True]  # type: ignore[union-attr]


class Hooked(torch.nn.Module):
    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.register_forward_hook(hook)
        self.end = Raises()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.b(self.a(x)))


def test_a_hook_makes_no_culprit_of_its_module() -> None:
    model = Hooked(lambda module, args, output: output + 1)
    found = explain(model, ROWS)
    assert sites(found) == ["end"]
    assert culprit(found).parent_exports is True
    assert len(model.b._forward_hooks) == 1


class Short(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :6].sum(1) if x.shape[1] > 6 else x.sum(1) * 2


class Sized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = torch.nn.Sequential(torch.nn.Linear(4, 4), Short(), torch.nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seq(x)


def test_a_branch_on_sizes_that_onnx_does_not_check() -> None:
    found = explain(Sized(), [(torch.ones(2, n, 4),) for n in (3, 5, 9)])
    assert guilty(found) == "capture"
    assert sites(found) == ["seq[1]"]
    assert culprit(found).step == "DISC"
    assert "it demands x_dim_1 > 6 (here x_dim_1=3), asked at " in culprit(found).reason
    assert culprit(found).line.endswith("return x[:, :6].sum(1) if x.shape[1] > 6 else x.sum(1) * 2")
    assert culprit(found).parent_exports is True


class Limited(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        if torch.compiler.is_exporting():
            torch._check(k <= 5)
        return x[:, :3] * k


class Checked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict({"a-b": Limited()})

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.parts["a-b"](x, n)


LIMITED = [(torch.ones(rows, 4), torch.tensor(n)) for rows, n in ((2, 3), (5, 4), (6, 9))]


@pytest.mark.parametrize("exporter", ["torch-export", "torch-export-strict"])
def test_an_assertion_about_a_value_names_where_it_is_made(exporter: str) -> None:
    found = explain(Checked(), LIMITED, exporter=exporter)
    assert guilty(found) == "capture"
    assert sites(found) == ["parts.a-b"]
    assert culprit(found).step == "ASSERT"
    assert culprit(found).line.endswith("k = n.item()")
    assert "demands u0 <= 5" in culprit(found).reason
    assert [cause.name for cause in found.causes] == ["assertion about a value"]
    assert found.pieces is not None
    assert found.pieces.tried == 0


def test_onnx_has_no_assertions() -> None:
    found = explain(Checked(), LIMITED)
    assert found.verdict == "not reproduced: every step agrees with eager"


class Differs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_exporting() else x


def test_other_code_while_exporting_is_no_baked_number() -> None:
    found = explain(Differs(), ROWS)
    assert [cause.name for cause in found.causes] == ["other code while exporting"]


@dataclasses.dataclass
class Unknown:
    y: torch.Tensor


class Gives(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Unknown:
        return Unknown(self.lin(x))


class Uses(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gives = Gives()
        self.end = Raises()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.gives(x).y)


def test_a_class_between_two_modules_is_no_culprit_of_another_refusal() -> None:
    found = explain(Uses(), ROWS)
    assert "smallest failing module: end (Raises)" in found.verdict
    assert sites(found) == ["end", "gives"]
    assert found.pieces is not None
    assert [c.only_alone for c in found.pieces.culprits] == [False, True]
    assert "unregistered class" not in [cause.name for cause in found.causes]


def test_an_evaluator_that_agrees_with_nobody_blames_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(proto: Any, nodes: Any, values: Any, names: list[str], runtime: str) -> dict[str, torch.Tensor]:
        found = run_nodes(proto, nodes, values, names, runtime)
        return {name: value + 7 for name, value in found.items()} if runtime == "reference" else found

    monkeypatch.setattr("pytest_exportcheck.diagnose.nodes.run_nodes", off)
    table = {torch.ops.aten.gelu.default: wrong_gelu}
    found = explain(Gelu(), ROWS, custom_translation_table=table)
    assert found.nodes is not None
    assert found.nodes.kernel is None
    assert "otherwise than torch" in found.nodes.kernel_note
    assert "a kernel" not in found.verdict
