"""Planted faults in the forms that models take: caches, towers, loops, shared modules, keywords, classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op
from torch.utils import _pytree

from pytest_exportcheck.checks.compare import Tolerances, compare_leaf
from pytest_exportcheck.diagnose.rungs import Ladder, rung_of

from .helpers import Raises, Wrap, corrupted_runtime
from .test_faults import ROWS, WIDE, decode, explain, tiny_llama
from .test_more_faults import Exporting, Two, first, guilty, sites

pytestmark = pytest.mark.filterwarnings("ignore")


def culprit(found: Any) -> Any:
    assert found.pieces is not None
    return found.pieces.culprits[0]


# guards on sizes


class LongOnly(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * 2 > 13:
            return x * 2
        return x


@pytest.mark.parametrize("exporter", ["torch-export", "torch-export-strict"])
def test_a_guard_three_levels_deep(exporter: str) -> None:
    calls = [((torch.randn(n, 6),), {}) for n in (9, 5)]
    found = explain(Wrap(Wrap(torch.nn.Sequential(torch.nn.ReLU(), LongOnly()))), calls, exporter=exporter)
    assert guilty(found) == "capture"
    assert sites(found) == ["inner.inner[1]"]
    assert culprit(found).step == "GUARD"
    assert culprit(found).line.endswith("if x.shape[0] * 2 > 13:")
    assert "demands x_dim_0 >= 7 (here x_dim_0=5)" in found.verdict or "2*x_dim_0 > 13" in found.verdict
    assert found.pieces is not None
    assert found.pieces.tried == 0
    assert [cause.name for cause in found.causes] == ["guard on sizes"]


def test_two_guards_of_two_modules() -> None:
    class Even(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] % 2 == 1 else x

    calls = [((torch.randn(n, 6),), {}) for n in (9, 4)]
    found = explain(Two(Wrap(LongOnly()), Wrap(Even())), calls, exporter="torch-export")
    assert sites(found) == ["left.inner", "right.inner"]
    assert [c.line.rpartition(": ")[2] for c in found.pieces.culprits][1].startswith("return x + 1 if")  # type: ignore[union-attr]


def test_a_guard_in_a_module_that_is_called_twice() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = LongOnly()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.shared(x).sum() + self.shared(y)

    calls = [((torch.randn(n, 6), torch.randn(m, 6)), {}) for n, m in ((9, 11), (8, 5))]
    found = explain(Twice(), calls, exporter="torch-export")
    assert guilty(found) == "capture"
    assert culprit(found).path == "shared"
    assert "y_dim_0" in culprit(found).reason


def test_a_guard_in_a_nested_input() -> None:
    class Nested(torch.nn.Module):
        def forward(self, states: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            a, b = states["pair"]
            return a.sum(0) if b.shape[1] > 6 else a.sum(0) * 2

    calls = [{"states": {"pair": [torch.randn(n, 4), torch.randn(2, m)]}} for n, m in ((3, 8), (5, 4))]
    found = explain(Nested(), calls, exporter="torch-export")
    assert culprit(found).step == "GUARD"
    assert "(here " in culprit(found).reason
    assert "=4)" in culprit(found).reason


def test_a_guard_that_keywords_bring() -> None:
    class Keywords(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self.inner(x, **kwargs)

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
            return x + bias.sum() if bias.shape[0] < 6 else x

    calls = [{"x": torch.randn(n, 4), "bias": torch.randn(m)} for n, m in ((3, 5), (2, 8))]
    found = explain(Keywords(), calls, exporter="torch-export")
    assert sites(found) == ["inner"]
    assert culprit(found).step == "GUARD"


def test_a_guard_in_the_cache_of_a_decoder() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)

    def call(batch: int, past: int, new: int) -> dict[str, Any]:
        cache = transformers.DynamicCache(config=config)
        for layer in range(2):
            cache.update(torch.randn(batch, 1, past, 8), torch.randn(batch, 1, past, 8), layer)
        return {"input_ids": torch.randint(0, 64, (batch, new)), "cache": cache}

    found = explain(model, [call(2, 3, 9), call(3, 5, 1)], exporter="torch-export")
    assert guilty(found) == "capture"
    assert culprit(found).path == "model.layers.0.self_attn"
    assert "transformers/cache_utils.py:" in culprit(found).line
    assert "(here " in culprit(found).reason


# refusals


def test_a_refusal_in_a_loop_over_a_module_list() -> None:
    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), Wrap(Raises()), torch.nn.ReLU()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    found = explain(Loop(), WIDE)
    assert guilty(found) == "capture"
    assert sites(found) == ["layers[1].inner"]


def test_a_refusal_in_a_module_that_is_called_several_times() -> None:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Wrap(Raises())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.block(x)
            return self.block(x[:1])

    found = explain(Again(), WIDE)
    assert {c.path for c in found.pieces.culprits} == {"block.inner"}  # type: ignore[union-attr]


def test_a_refusal_in_a_module_that_two_parents_share() -> None:
    shared = Raises()
    found = explain(Two(Wrap(shared), Wrap(shared)), WIDE)
    assert {c.kind for c in found.pieces.culprits} == {"Raises"}  # type: ignore[union-attr]
    assert culprit(found).line.endswith("if x.sum() > 0:")


def test_a_refusal_behind_nested_inputs_and_none() -> None:
    class Inner(torch.nn.Module):
        def forward(self, pair: tuple[Any, ...], *, scale: float = 1.0) -> dict[str, Any]:
            x, rest, nothing = pair
            return {"y": x * scale if rest["r"].max() > 0 else x, "none": nothing}

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner((self.lin(x), {"r": x}, None), scale=2.0)["y"]

    found = explain(Outer(), ROWS)
    assert sites(found) == ["inner"]
    assert culprit(found).parent_exports is True


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    extra: torch.Tensor | None = None


def test_a_refusal_behind_a_registered_dataclass() -> None:
    if Answer not in _pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Answer, serialized_type_name="exportcheck.Answer")

    class Makes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Answer:
            return Answer(x + 1)

    class Takes(torch.nn.Module):
        def forward(self, answer: Answer) -> torch.Tensor:
            return answer.value * 2 if answer.value.max() > 0 else answer.value

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes, self.takes = Makes(), Takes()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.takes(self.makes(x))

    found = explain(Net(), ROWS)
    assert sites(found) == ["takes"]


def test_a_refusal_in_an_encoder_decoder() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5Model(config)
    model.decoder.block[1].layer[2].DenseReluDense.act = Raises()  # type: ignore[union-attr, index]
    calls = [
        {
            "input_ids": torch.randint(1, 64, (b, n)),
            "decoder_input_ids": torch.randint(1, 64, (b, n + 2)),
            "use_cache": False,
        }
        for b, n in ((2, 5), (3, 7))
    ]
    found = explain(model, calls)
    assert guilty(found) == "capture"
    assert sites(found) == ["decoder.block[1].layer[2].DenseReluDense.act"]


def tiny_vit() -> tuple[torch.nn.Module, list[Any]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    return transformers.ViTModel(config), [{"pixel_values": torch.randn(b, 3, 16, 16)} for b in (2, 3)]


def test_a_conversion_that_is_wrong_in_a_vision_tower() -> None:
    model, calls = tiny_vit()
    table = {torch.ops.aten.gelu.default: lambda x, approximate="none": op.Mul(x, op.HardSigmoid(x))}
    found = explain(model, calls, custom_translation_table=table)
    assert guilty(found) == "conversion"
    assert first(found).operator == "aten.gelu.default"
    assert ".0." in first(found).module


def test_a_refusal_in_a_vision_tower() -> None:
    model, calls = tiny_vit()
    model.pooler.activation = Raises()  # type: ignore[union-attr]
    found = explain(model, calls)
    assert sites(found) == ["pooler.activation"]


# caches


def test_a_cache_that_the_capture_shifts_deep_in_llama() -> None:
    class Shifts(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y.roll(1, 1) if torch.compiler.is_exporting() else y

    model = tiny_llama()
    layer = model.model.layers[1].self_attn  # type: ignore[union-attr, index]
    layer.v_proj = Shifts(layer.v_proj)  # type: ignore[union-attr, arg-type]
    found = explain(model, [decode(model, 2, 3, 4), decode(model, 3, 6, 5)])
    assert guilty(found) == "capture"
    assert sites(found) == ["model.layers[1].self_attn.v_proj"]


def test_wrong_numbers_of_a_module_that_is_called_several_times() -> None:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Wrap(Exporting())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block(x))

    found = explain(Again(), WIDE, exporter="torch-export")
    assert guilty(found) == "capture"
    assert {c.path for c in found.pieces.culprits} == {"block.inner"}  # type: ignore[union-attr]


# conversions


def test_a_conversion_that_is_wrong_for_one_of_several_calls() -> None:
    """Only where the axis is 0: the first call of the operator is right."""

    def softmax(x: Any, dim: int, half_to_float: bool = False) -> Any:
        return op.Softmax(x, axis=dim if dim != 0 else 1)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.columns = torch.nn.Softmax(-1), torch.nn.Softmax(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.columns(self.rows(x) * 3) + 1

    table = {torch.ops.aten._softmax.default: softmax, torch.ops.aten.softmax.int: softmax}
    found = explain(Net(), ROWS, custom_translation_table=table)
    assert guilty(found) == "conversion"
    assert first(found).module.startswith("columns")


def test_a_conversion_that_is_wrong_in_an_output_only() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
            y = self.lin(x)
            return y, None, torch.erf(y)

    found = explain(Net(), ROWS, custom_translation_table={torch.ops.aten.erf.default: lambda x: op.Tanh(x)})
    assert guilty(found) == "conversion"
    assert first(found).operator == "aten.erf.default"


def test_two_conversions_that_are_wrong() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Tanh(), torch.nn.Sigmoid()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x) + 1, self.b(x * 2)

    table = {
        torch.ops.aten.tanh.default: lambda x: op.Softsign(x),
        torch.ops.aten.sigmoid.default: lambda x: op.HardSigmoid(x),
    }
    found = explain(Net(), ROWS, custom_translation_table=table)
    assert guilty(found) == "conversion"
    assert first(found).module.startswith("a (Tanh)")
    text = "\n".join(found.lines())
    assert "sigmoid" in text


def test_a_custom_op_without_a_translation() -> None:
    if not hasattr(torch.ops.exportcheck_tests, "doubled"):

        @torch.library.custom_op("exportcheck_tests::doubled", mutates_args=())
        def doubled(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        doubled.register_fake(torch.empty_like)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Doubles()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.exportcheck_tests.doubled(x)

    found = explain(Net(), ROWS)
    assert guilty(found) == "conversion"
    assert "doubled" in found.node
    assert "inner (Doubles)" in found.node
    assert [cause.name for cause in found.causes] == ["missing ONNX operator"]


def test_a_custom_op_whose_fake_kernel_is_wrong() -> None:
    if not hasattr(torch.ops.exportcheck_tests, "halved"):

        @torch.library.custom_op("exportcheck_tests::halved", mutates_args=())
        def halved(x: torch.Tensor) -> torch.Tensor:
            return x[:, ::2].clone()

        halved.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[1]))

    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.ops.exportcheck_tests.halved(x)
            return y.expand(y.shape[0], y.shape[1]).reshape(y.shape[0], 1, -1) * y.shape[1]

    found = explain(Wrap(Halves(), 6), WIDE, exporter="torch-export")
    assert guilty(found) == "capture"
    assert sites(found) == ["inner"]


# the runtime


def test_an_optimization_that_drops_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(proto: Any) -> None:
        for node in proto.graph.node:
            if node.op_type == "Where":
                node.input[2] = node.input[1]

    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x, x.exp()) + 1

    corrupted_runtime(monkeypatch, corrupt, "ORT_ENABLE_BASIC")
    found = explain(Wrap(Masked()), WIDE)
    assert guilty(found) == "onnxruntime ENABLE_BASIC"
    assert first(found).operator == "aten.where.self"
    assert first(found).module.startswith("inner")


def test_a_kernel_that_is_wrong_in_a_control_flow_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(proto: Any) -> None:
        for node in proto.graph.node:
            for attribute in node.attribute if node.op_type == "If" else ():
                for inner in attribute.g.node:
                    if inner.op_type == "Sin":
                        inner.op_type = "Cos"
            if node.op_type == "Sin":
                node.op_type = "Cos"
        for function in proto.functions:
            for node in function.node:
                if node.op_type == "Sin":
                    node.op_type = "Cos"

    class Cond(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.abs().sum() > 0, lambda y: y.sin(), lambda y: y * 2, (x,)) + 1

    corrupted_runtime(monkeypatch, corrupt)
    found = explain(Wrap(Cond()), WIDE)
    assert guilty(found) == "kernel"
    assert first(found).operator == "cond[0]"


# half precision


def test_an_overflow_in_float16() -> None:
    """exp(2x) is infinite where tanh(x) is 1."""

    def tanh(x: Any) -> Any:
        e = op.Exp(op.Add(x, x))
        return op.Div(op.Sub(e, op.CastLike(1.0, x)), op.Add(e, op.CastLike(1.0, x)))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh = torch.nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tanh(x * 40) + 1

    calls = [((torch.full((n, 4), 1.5).half(),), {}) for n in (2, 5)]
    found = explain(Net().half(), calls, custom_translation_table={torch.ops.aten.tanh.default: tanh})
    assert guilty(found) == "conversion"
    assert first(found).operator == "aten.tanh.default"
    assert first(found).module.startswith("tanh")


def test_an_overflow_of_eager_alone_is_no_fault_of_a_kernel() -> None:
    """onnxruntime has no float16 product on the CPU: it computes in float32 up to the division."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x) * 1000.0
            # Infinite by intent, and no overflow.
            blocked = torch.where(x[..., :1] > 1e4, -torch.inf, 0.0).to(h.dtype)
            return (h @ h.mT) / 1e4 + blocked

    calls = [((torch.randn(2, n, 64).half(),), {}) for n in (5, 4)]
    found = explain(Net().half(), calls)
    assert guilty(found) == "overflow"
    assert first(found).operator == "aten.matmul.default"
    assert "leaves the range of float16 in torch, in " in first(found).reason
    assert "kernel" not in found.verdict
    assert "leaves the range of float16 in eager, and not in the step conversion" in found.verdict
    assert not any("kernel is wrong" in line for line in found.lines())


@pytest.mark.parametrize(
    ("got", "note"),
    [
        (torch.full((2, 3), torch.nan), "y: nan instead of 1 in 6 of 6"),
        (torch.ones(2, 3, dtype=torch.float64), "y: dtype float64 instead of float32"),
        (torch.ones(3, 2), "y: shape 3x2 instead of 2x3"),
    ],
)
def test_a_step_that_differs_by_no_number_shows_none(got: torch.Tensor, note: str) -> None:
    same, other = (
        compare_leaf("x", WIDE_ONES, WIDE_ONES, Tolerances()),
        compare_leaf("y", torch.ones(2, 3), got, Tolerances()),
    )
    rung = rung_of("conversion", [same, other], 0.1)
    assert (rung.status, rung.max_abs, rung.max_rel, rung.note) == ("differs", None, None, note)
    (row,) = (line for line in Ladder(rungs=[rung]).lines() if "conversion" in line)
    assert row.split() == ["conversion", "differs", *note.split()]
    off = compare_leaf("y", torch.ones(2, 3), torch.ones(2, 3) * 1.5, Tolerances())
    assert rung_of("conversion", [same, off], 0.1).max_abs == 0.5


WIDE_ONES = torch.ones(4)


def test_an_operator_of_several_outputs_is_named_and_not_what_takes_one() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, _ = self.lin(x).max(-1)
            return values + 1

    def max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
        return op.ReduceMin(x, op.Constant(value_ints=[dim]), keepdims=0), op.ArgMax(x, axis=dim, keepdims=0)

    found = explain(Net(), WIDE, custom_translation_table={torch.ops.aten.max.dim: max_dim})
    assert guilty(found) == "conversion"
    assert first(found).operator == "aten.max.dim[0]"


def test_a_drift_in_a_deep_vision_tower() -> None:
    model, calls = tiny_vit()
    found = explain(model, calls, tolerances=Tolerances(atol=1e-12, rtol=0.0))
    assert guilty(found) == "drift"
