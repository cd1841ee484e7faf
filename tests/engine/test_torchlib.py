"""The table of ONNX translations: read once, the same, and never one export's for the next."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib import registration
from torch.onnx._internal.exporter._registration import ONNXRegistry

from pytest_exportcheck.exporters import torchlib
from pytest_exportcheck.exporters.torchlib import internals_missing, translations_once

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlib, "_TABLE", {})


def contents(table: Any) -> dict[Any, list[tuple[Any, bool, bool]]]:
    return {
        name: [(entry.onnx_function, entry.is_complex, entry.is_custom) for entry in entries]
        for name, entries in table.functions.items()
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often the table was read, one entry each."""
    count: list[int] = []
    read = vars(ONNXRegistry)["from_torchlib"].__func__

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        count.append(1)
        return read(cls, *args, **kwargs)

    monkeypatch.setattr(ONNXRegistry, "from_torchlib", classmethod(from_torchlib))
    return count


def test_torch_has_what_is_needed_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals_missing() is None
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", None)
    assert internals_missing() == "ONNXRegistry.from_torchlib"
    with translations_once():  # nothing is done
        assert ONNXRegistry.from_torchlib is None


def test_it_is_read_once_and_is_the_same(reads: list[int]) -> None:
    plain = ONNXRegistry.from_torchlib()
    before = vars(ONNXRegistry)["from_torchlib"]
    with translations_once():
        first = ONNXRegistry.from_torchlib()
        first.register_op(torch.ops.aten.relu.default, lambda x: op.Neg(x))
        assert contents(first) != contents(plain)
    assert vars(ONNXRegistry)["from_torchlib"] is before
    with translations_once():
        again = ONNXRegistry.from_torchlib()
        assert len(reads) == 2
        other = ONNXRegistry.from_torchlib(opset_version=20)
    assert len(reads) == 3
    assert contents(again) == contents(plain)
    assert (again.opset_version, other.opset_version) == (18, 20)


def test_what_somebody_registers_later_is_seen(reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registration.default_registry
    functions = registry["aten::relu"]
    with translations_once():
        ONNXRegistry.from_torchlib()
        more = SimpleNamespace(overloads=[*functions.overloads, *functions.overloads], complex=[])
        monkeypatch.setitem(registry._registry, "aten::relu", more)
        seen = ONNXRegistry.from_torchlib()
    assert len(reads) == 2
    assert len(seen.functions["aten::relu"]) == 2 * len(functions.overloads)


def test_a_translation_of_one_export_is_not_of_the_next() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    def operators(**options: Any) -> list[str]:
        with translations_once():
            program = torch.onnx.export(Net(), (torch.ones(2),), dynamo=True, verbose=False, **options)
        assert program is not None
        return [node.op_type for node in program.model.graph]

    table = {torch.ops.aten.relu.default: lambda x: op.Neg(x)}
    assert operators() == ["Relu"]
    assert operators(custom_translation_table=table) == ["Neg"]
    assert operators() == ["Relu"]
