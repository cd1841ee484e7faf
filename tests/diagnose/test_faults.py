"""Planted faults: the diagnosis must name the one that was planted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import pytest
import torch

from pytest_exportcheck.checks.compare import Tolerances
from pytest_exportcheck.diagnose.diagnosis import Diagnosis, diagnose
from pytest_exportcheck.diagnose.subject import Clock, subject_of
from pytest_exportcheck.patches.none import NoPatches

from .helpers import Deep, Gelu, Raises, Wrap, corrupted_runtime, wrong_gelu

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [((torch.randn(n, 4, generator=torch.Generator().manual_seed(n)),), {}) for n in (2, 5)]
WIDE = [((torch.randn(n, 6, generator=torch.Generator().manual_seed(n)),), {}) for n in (2, 5)]


def explain(model: torch.nn.Module, inputs: list[Any], **options: Any) -> Diagnosis:
    # Time enough: this is no verdict about the speed of the machine.
    found = diagnose(subject_of(model.eval(), inputs, **options), None, Clock(1e6))
    json.dumps(found.to_record())
    assert not found.notes, found.notes
    assert all(isinstance(line, str) for line in found.lines())
    return found


def replace_gelu(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "Gelu":
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))
            node.op_type, node.domain = "Relu", ""
            del node.attribute[:]


def test_a_module_that_cannot_be_captured_three_levels_deep() -> None:
    found = explain(Deep(), WIDE)
    assert found.ladder is not None
    assert found.ladder.guilty == "capture"
    assert found.pieces is not None
    (culprit,) = found.pieces.culprits
    assert (culprit.site, culprit.path, culprit.kind) == ("block.inner.inner", "block.inner.inner", "Raises")
    assert culprit.line.endswith("if x.sum() > 0:")
    assert culprit.parent == "block.inner"
    assert culprit.parent_exports is True
    assert "T1s2x6" in culprit.inputs[0]
    assert "{0: DYN}" in culprit.dynamic_shapes
    assert [cause.name for cause in found.causes] == ["data-dependent branch"]


def test_two_culprits_do_not_hide_each_other() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Wrap(Raises())
            self.right = Wrap(torch.nn.Sequential(torch.nn.ReLU(), Items()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    class Items(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.abs().sum()) % 2 + 1].sum(0) + x

    found = explain(Two(), WIDE, exporter="torch-export")
    assert found.pieces is not None
    assert [culprit.site for culprit in found.pieces.culprits] == ["left.inner", "right.inner[1]"]
    assert all(culprit.parent_exports for culprit in found.pieces.culprits)


def test_a_fault_in_a_parents_own_code_beside_a_failing_child() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Raises()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.child(x)
            return y if x.max() > 100 else -y

    found = explain(Both(), WIDE)
    assert found.pieces is not None
    assert [culprit.site for culprit in found.pieces.culprits] == ["child", "Both"]
    assert found.pieces.culprits[0].parent_exports is False
    assert found.pieces.culprits[1].line.endswith("return y if x.max() > 100 else -y")


def test_a_wrong_conversion() -> None:
    found = explain(Gelu(), ROWS, custom_translation_table={torch.ops.aten.gelu.default: wrong_gelu})
    assert found.ladder is not None
    assert found.ladder.guilty == "conversion"
    assert [rung.status for rung in found.ladder.rungs[:2]] == ["ok", "ok"]
    assert found.nodes is not None
    assert found.nodes.kind == "jump"
    assert found.nodes.first is not None
    assert found.nodes.first.operator == "aten.gelu.default"
    assert found.nodes.first.onnx_nodes == "Sigmoid -> Mul"
    assert "softmax" in found.nodes.first.source
    assert found.nodes.kernel is False


def test_a_wrong_onnx_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.onnx.ONNXProgram.optimize

    def optimize(self: Any) -> None:
        real(self)
        for node in self.model.graph:
            if node.op_type == "Gelu":
                node.op_type = "Relu"
                node.attributes.clear()

    monkeypatch.setattr(torch.onnx.ONNXProgram, "optimize", optimize)
    found = explain(Gelu(), ROWS)
    assert found.ladder is not None
    assert found.ladder.guilty == "onnx optimizer"
    assert "{onnx-dynamo: {optimize: false}}" in found.verdict
    assert found.nodes is not None
    assert found.nodes.first is not None
    assert (found.nodes.first.operator, found.nodes.first.onnx_nodes) == ("aten.gelu.default", "Relu")


def test_a_wrong_optimization_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted_runtime(monkeypatch, replace_gelu, "ORT_ENABLE_EXTENDED", unless="FastGeluFusion")
    found = explain(Gelu(), ROWS)
    assert found.ladder is not None
    assert found.ladder.guilty == "onnxruntime ENABLE_EXTENDED"
    statuses = {rung.name: rung.status for rung in found.ladder.rungs}
    assert statuses["onnxruntime ENABLE_BASIC"] == "ok"
    assert found.verdict.startswith("guilty: onnxruntime graph optimization (level EXTENDED), FastGeluFusion")
    assert 'disabled_optimizers=["FastGeluFusion"]' in found.verdict
    assert "ORT_ENABLE_BASIC" in found.verdict
    assert found.nodes is not None
    assert found.nodes.first is not None
    assert found.nodes.first.operator == "aten.gelu.default"


def test_a_kernel_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted_runtime(monkeypatch, replace_gelu)
    found = explain(Gelu(), ROWS)
    assert found.ladder is not None
    assert found.ladder.guilty == "kernel"
    assert found.nodes is not None
    assert found.nodes.kernel is True
    assert found.nodes.first is not None
    assert found.nodes.first.onnx_nodes == "Gelu"
    assert "a kernel of onnxruntime" in found.verdict


def test_a_kernel_that_the_reference_evaluator_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupted_runtime(monkeypatch, replace_gelu)
    monkeypatch.setattr("pytest_exportcheck.diagnose.ladder._EVALUATOR", 1e9)
    found = explain(Gelu(), ROWS)
    assert found.ladder is not None
    assert [r.status for r in found.ladder.rungs if r.name.startswith("reference")] == ["not run"]
    # The one node is small enough to be asked alone.
    assert found.ladder.guilty == "kernel"


class Half(torch.nn.Module):
    """Many layers in float16: every one rounds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_a_drift_in_float16() -> None:
    inputs = [((torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).half(),), {}) for n in (2, 5)]
    found = explain(Half().half(), inputs, tolerances=Tolerances(atol=1e-4, rtol=1e-4))
    assert found.ladder is not None
    assert found.ladder.guilty == "drift"
    assert found.nodes is not None
    assert found.nodes.kind == "drift"
    errors = [entry.error for entry in found.nodes.profile if entry.operator == "aten.add.Tensor"]
    assert max(errors) < 20 * min(error for error in errors if error > 0)
    assert "tolerance" in found.verdict


class Rolling(NoPatches):
    """A patch mode with a fault: what a cache is given is shifted by one position."""

    name = "rolling"

    @contextmanager
    def apply(self, model: torch.nn.Module, target: str) -> Iterator[None]:
        from transformers.cache_utils import DynamicLayer

        real = DynamicLayer.update
        if target == "eager":
            yield
            return

        def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return real(layer, keys.roll(1, -2), values, *args, **kwargs)

        DynamicLayer.update = update
        try:
            yield
        finally:
            DynamicLayer.update = real


def tiny_llama(layers: int = 2) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def decode(model: torch.nn.Module | None, batch: int, past: int, new: int, layers: int = 2) -> dict[str, Any]:
    from transformers.cache_utils import DynamicCache

    generator = torch.Generator().manual_seed(past)
    cache = DynamicCache()
    for layer in range(layers):
        pair = [torch.randn(batch, 1, past, 8, generator=generator) for _ in range(2)]
        cache.update(*pair, layer)
    return {"input_ids": torch.randint(0, 64, (batch, new), generator=generator), "cache": cache}


def test_a_cache_shifted_by_a_patch() -> None:
    model = tiny_llama(layers=1)
    calls = [decode(model, 2, 3, 4, layers=1), decode(model, 3, 6, 5, layers=1)]
    found = explain(model, calls, mode=Rolling())
    assert found.ladder is not None
    assert found.ladder.guilty == "patches"
    assert "rolling" in found.verdict
    assert [cause.name for cause in found.causes] == ["patch changes the model"]


def test_a_cache_shifted_by_the_conversion() -> None:
    from onnxscript import opset18 as op

    def cat(tensors: Any, dim: int = 0) -> Any:
        if dim != -2:
            return op.Concat(*tensors, axis=dim)
        past, new = tensors
        last = op.Slice(
            new, op.Constant(value_ints=[-1]), op.Constant(value_ints=[1 << 60]), op.Constant(value_ints=[2])
        )
        rest = op.Slice(
            new, op.Constant(value_ints=[0]), op.Constant(value_ints=[-1]), op.Constant(value_ints=[2])
        )
        return op.Concat(past, last, rest, axis=dim)

    model = tiny_llama()
    table = {torch.ops.aten.cat.default: cat}
    found = explain(model, [decode(model, 2, 3, 4), decode(model, 3, 6, 5)], custom_translation_table=table)
    assert found.ladder is not None
    assert found.ladder.guilty == "conversion"
    assert found.nodes is not None
    assert found.nodes.first is not None
    assert found.nodes.first.operator == "aten.cat.default"
    assert "self_attn" in found.nodes.first.module
    assert "modeling_llama.py" in found.nodes.first.source
    assert "cache.update" in found.nodes.first.source
    assert found.nodes.kernel is False


def test_an_operator_without_a_translation() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Special()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    class Special(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.spherical_bessel_j0(x)

    found = explain(Net(), ROWS)
    assert found.ladder is not None
    assert found.ladder.guilty == "conversion"
    assert [cause.name for cause in found.causes] == ["missing ONNX operator"]
    assert "spherical_bessel_j0" in found.node
    assert "inner (Special)" in found.node
    assert "test_faults.py" in found.node


def test_a_wrong_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.aten.special_xlog1py.default

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.xlog1py(x, x.abs()) + 1

    from torch.onnx._internal.exporter import _decomp

    real = _decomp.create_onnx_friendly_decomposition_table

    def table(registered: Any) -> Any:
        return {**real(registered), operator: lambda a, b: a * torch.log(b)}

    monkeypatch.setattr(_decomp, "create_onnx_friendly_decomposition_table", table)
    found = explain(Net(), ROWS)
    assert found.ladder is not None
    assert found.ladder.guilty == "decomposition"
    assert "aten.special_xlog1py.default" in found.verdict


def test_a_threshold_that_the_capture_bakes_in() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Threshold()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    class Threshold(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 4 else x

    found = explain(Net(), [((torch.randn(n, 4),), {}) for n in (2, 3, 9)])
    assert found.ladder is not None
    assert found.ladder.guilty == "capture"
    assert found.pieces is not None
    assert [culprit.site for culprit in found.pieces.culprits] == ["inner"]
    assert "baked scalar or threshold" in [cause.name for cause in found.causes]


def test_a_right_export_is_not_blamed() -> None:
    found = explain(Gelu(), ROWS)
    assert found.verdict == "not reproduced: every step agrees with eager"
    assert found.causes == []


def test_a_branch_of_transformers_in_float16() -> None:
    """Its mask is a required argument, ``None`` in eager and a tensor while it is traced."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    inputs = [
        {
            "input_ids": torch.randint(3, 64, (batch, length)),
            "decoder_input_ids": torch.randint(3, 64, (batch, length + 1)),
            "use_cache": False,
        }
        for batch, length in ((2, 5), (3, 7))
    ]
    found = explain(transformers.BartModel(config).half(), inputs)
    assert found.pieces is not None
    (culprit,) = found.pieces.culprits
    assert (culprit.site, culprit.kind) == ("encoder.layers[0]", "BartEncoderLayer")
    assert "modeling_bart.py:" in culprit.line
    assert "isfinite" in culprit.line
    assert culprit.parent_exports is True
    assert culprit.alike == ("encoder.layers[1]",)
