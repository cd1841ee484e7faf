"""An argument of a class that torch does not know, with tensors inside: no program can be given them."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.pytrees.hidden import hidden_tensors, how_to_show

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

SOURCE = """
    import dataclasses


    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        k: int = 2


    class Settings:
        def __init__(self, **held):
            vars(self).update(held)


    {register}
    linear = nn.Linear(3, 3)


    class Net(nn.Module):
        def forward(self, x, more):
            return {answer}


    def build_model():
        return Net()


    def calls():
        torch.manual_seed(0)
        same = torch.ones(1, 3)
        return [((x, {more}), {{}}) for x in (torch.randn(2, 3), torch.randn(4, 3))]
"""

HELD = {
    "the same in every call": ("x * more.x", "Batch(same.clone())", "a Batch", "more.x", "register_data"),
    "others in each call": ("x * more.x", "Batch(x * 2)", "a Batch", "more.x", "register_dataclass(Batch)"),
    "an object": ("x * more.a['b'][0]", "Settings(a={'b': [same]})", "a Settings", "more.a.b.0", "register_"),
    "a module": ("more(x)", "linear", "a Linear", "more.weight, more.bias", "make it a submodule"),
}  # fmt: skip


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
@pytest.mark.parametrize("name", HELD)
def test_they_are_named_with_what_to_do(tmp_path: Path, name: str, exporter: str) -> None:
    answer, more, kind, path, advice = HELD[name]
    run = make_run(tmp_path, SOURCE.format(answer=answer, more=more, register=""))
    stage, error, _ = verdict(run, exporter)
    assert stage == "observe", error
    assert f"argument more is {kind}, a constant and no container to torch.export" in error.message
    assert f"holds tensors ({path})" in error.message
    assert advice in "\n".join(error.details)
    assert "graphs" not in str(error), "groups of calls would not help"


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
@pytest.mark.parametrize(
    ("register", "answer", "more"),
    [
        ("", "x * more.k", "Settings(k=3)"),
        ("", "more(x)", "nn.ReLU()"),
        ("torch.export.register_dataclass(Batch)", "x * more.x * more.k", "Batch(x * 2)"),
    ],
)
def test_what_hides_nothing_passes(
    tmp_path: Path, register: str, answer: str, more: str, exporter: str
) -> None:
    run = make_run(tmp_path, SOURCE.format(answer=answer, more=more, register=register))
    stage, error, _ = verdict(run, exporter)
    assert stage == "pass", error


class _Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


@dataclass
class _Data:
    a: Any


def test_where_they_are() -> None:
    tensor, ring = torch.ones(2), _Data([])
    ring.a.append(ring)
    assert hidden_tensors(tensor, "x") == []
    assert hidden_tensors(3, "x") == hidden_tensors(ring, "x") == []
    assert hidden_tensors(_Slots([1, tensor]), "x") == ["x.a.1"]
    assert hidden_tensors(_Data({"b": _Slots(tensor)}), "x") == ["x.a.b.a"]
    assert hidden_tensors(collections.UserDict(q=tensor), "x") == ["x.q"]
    assert hidden_tensors(torch.nn.BatchNorm1d(2, affine=False), "x")[0] == "x.running_mean"


def test_what_to_do() -> None:
    assert "dict(...)" in how_to_show(collections.UserDict())
    assert "register_dataclass(_Data)" in how_to_show(_Data(1))
    assert "register_pytree_node(_Slots, ...)" in how_to_show(_Slots(1))
