"""What ONNX exports share is made once, changes no byte, and is made again when something was registered."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from typing import Any

import onnxscript
import pytest
import torch
from onnxscript.function_libs.torch_lib import registration
from torch.onnx._internal.exporter import _registration

from pytest_exportcheck.exporters import tables
from pytest_exportcheck.exporters.tables import shared_tables

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

DYNAMIC = torch.export.Dim.DYNAMIC


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(self.embedding(ids))
        return torch.nn.functional.gelu(y).cumsum(1), y.argmax(-1), torch.fft.rfft(y).abs()


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    ids = torch.arange(10).reshape(2, 5) % 7
    with torch.no_grad():
        return torch.export.export(Net().eval(), (ids,), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},))


def to_bytes(program: torch.export.ExportedProgram, **options: Any) -> bytes:
    with torch.no_grad():
        exported = torch.onnx.export(
            program, dynamic_shapes=({0: "batch", 1: "seq"},), verbose=False, **options
        )
    assert exported is not None
    return bytes(exported.model_proto.SerializeToString(deterministic=True))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The opset of each table that torch makes from the start."""
    monkeypatch.setattr(tables, "_tables", {})
    made: list[int] = []
    make = _registration.ONNXRegistry._cleanup_registry_based_on_opset_version

    def counted(self: Any) -> None:
        made.append(self.opset_version)
        make(self)

    monkeypatch.setattr(_registration.ONNXRegistry, "_cleanup_registry_based_on_opset_version", counted)
    return made


@pytest.mark.parametrize("options", [{}, {"opset_version": 20}, {"optimize": False}], ids=str)
def test_the_bytes_are_those_of_an_export_that_shares_nothing(
    program: torch.export.ExportedProgram, made: list[int], options: dict[str, Any]
) -> None:
    alone = to_bytes(program, **options)
    del made[:]
    with shared_tables():
        shared = [to_bytes(program, **options) for _ in range(3)]
    assert shared == [alone] * 3
    assert len(made) == 1
    assert to_bytes(program, **options) == alone
    assert len(made) == 2


def test_a_function_of_one_export_is_not_in_the_next(
    program: torch.export.ExportedProgram, made: list[int]
) -> None:
    def other_gelu(x: Any) -> Any:
        return onnxscript.opset18.Relu(x)

    with shared_tables():
        plain = to_bytes(program)
        own = to_bytes(program, custom_translation_table={torch.ops.aten.gelu.default: other_gelu})
        assert own != plain
        assert to_bytes(program) == plain
    assert to_bytes(program, custom_translation_table={torch.ops.aten.gelu.default: other_gelu}) == own


def test_what_is_registered_later_counts(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_tables():
        before = _registration.ONNXRegistry.from_torchlib()
        assert _registration.ONNXRegistry.from_torchlib().functions == before.functions
        assert len(made) == 1
        known = registration.default_registry["aten::gelu"]
        extra = registration.OverloadedFunction("aten::frobnicate")
        extra.overloads.append(known.overloads[0])
        monkeypatch.setitem(registration.default_registry._registry, "aten::frobnicate", extra)
        _registration.ONNXRegistry.from_torchlib()
        assert len(made) == 2
        # An operator that torch did not have, and that a library brings.
        library = torch.library.Library("aten", "FRAGMENT")
        try:
            library.define("frobnicate(Tensor x) -> Tensor")
            target = torch.ops.aten.frobnicate.default
            assert _registration.ONNXRegistry.from_torchlib().is_registered(target)
            assert len(made) == 3
        finally:
            library._destroy()


_ASKED = """
import sys
import torch
from pytest_exportcheck.exporters.tables import _REGISTRIES, only_known_functions
assert only_known_functions()
assert not any(name in sys.modules for name in _REGISTRIES), "imported to be asked"
from onnxscript.function_libs.torch_lib import registration
def mine(x): return x
overloaded = registration.OverloadedFunction("aten::gelu")
overloaded.overloads.append(mine)
registration.default_registry._registry["aten::gelu"] = overloaded
assert not only_known_functions(), "a function of the user's"
"""


def test_the_registries_are_not_imported_to_be_asked() -> None:
    done = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(importlib.util.find_spec(name) for name in tables._REGISTRIES)


def test_it_is_taken_away_again(made: list[int]) -> None:
    original = vars(_registration.ONNXRegistry)["from_torchlib"]
    with contextlib.suppress(ZeroDivisionError), shared_tables(), shared_tables():
        assert vars(_registration.ONNXRegistry)["from_torchlib"] is not original
        raise ZeroDivisionError
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is original
    with shared_tables(share=False):
        assert vars(_registration.ONNXRegistry)["from_torchlib"] is original


def test_a_registry_of_another_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self) -> None:
            self.table: dict[str, Any] = {}

        @classmethod
        def from_torchlib(cls, opset: int = 18) -> Other:
            return cls()

    monkeypatch.setattr(_registration, "ONNXRegistry", Other)
    original = vars(Other)["from_torchlib"]
    with shared_tables():
        assert vars(Other)["from_torchlib"] is original


MODEL = """
    class Net(nn.Module):
        def forward(self, x):
            return nn.functional.gelu(x).sum(-1)


    def build_model():
        return Net()


    def calls():
        return [((torch.ones(n, 4),), {}) for n in (2, 5)]
"""


@pytest.mark.parametrize("share", [True, False])
def test_a_case_shares_unless_told(tmp_path: Any, made: list[int], share: bool) -> None:
    run = make_run(tmp_path, MODEL)
    run.share = share
    for _ in range(2):
        stage, error, _record = verdict(run, "onnx-dynamo")
        assert stage == "pass", error
    assert len(made) == (1 if share else 2)


@pytest.mark.parametrize("share", [True, False])
def test_nothing_is_said_of_torchvision(
    program: torch.export.ExportedProgram,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    share: bool,
) -> None:
    monkeypatch.setattr(tables, "_tables", {})
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torchvision" else find(name)
    )
    with shared_tables(share):
        to_bytes(program)
        _registration.logger.warning("something else")
    said = [record.getMessage() for record in caplog.records if record.name == _registration.logger.name]
    assert said == ["something else"]
    to_bytes(program)
    assert "torchvision is not installed" in caplog.text
