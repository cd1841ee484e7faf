"""Programs that rely on exact results: a sum or a product of two numbers has one right answer."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir
import pytest
import torch

from pytest_exportcheck.checks.compare import Tolerances
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.onnx_dynamo import OnnxDynamo
from pytest_exportcheck.exporters.registry import EXPORTERS

from .helpers import make_run, verdict
from .test_rounding import draw, eager_of, judged, register_flattening_functions, variance

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

LARGE = 12582912.0  # 1.5 * 2**23


def split(x):
    """The leading half of the digits, and the rest (Veltkamp)."""
    t = x * 4097.0
    high = t - (t - x)
    return high, x - high


def lost_in_sum(a, b):
    """What a + b is short of (Knuth)."""
    s = a + b
    other = s - a
    return (a - (s - other)) + (b - other)


def lost_in_product(a, b):
    """What a * b is short of (Dekker)."""
    (a0, a1), (b0, b1), p = split(a), split(b), a * b
    return ((a0 * b0 - p) + a0 * b1 + a1 * b0) + a1 * b1


def compensated(x):
    """A running sum, less what one without a second variable is short of (Kahan)."""
    total, short, plain = x[:, 0], torch.zeros(x.shape[0]), x[:, 0]
    for k in range(1, x.shape[1]):
        term = x[:, k] - short
        new = total + term
        short = (new - total) - term
        total, plain = new, plain + x[:, k]
    return total - plain


#: Name -> (the model, what is left where an exporter or an optimizer simplifies it).
IDIOMS = {
    "rounding by a large number": (lambda x: (x + LARGE) - LARGE, lambda x: x),
    "rounding of a product of matrices": (
        lambda x: ((x - 100) @ (x - 100).T / 3 + LARGE) - LARGE,
        lambda x: (x - 100) @ (x - 100).T / 3,
    ),
    "rounding to 8 digits": (lambda x: (x * 65537.0) - (x * 65537.0 - x), lambda x: x),
    "the rest of a splitting": (lambda x: split(x)[1], torch.zeros_like),
    "what a sum is short of": (
        lambda x: lost_in_sum(x[:, :30], x[:, 30:] * 0.37) * 2**20,
        lambda x: x[:, :30] * 0,
    ),
    "what a product is short of": (
        lambda x: lost_in_product(x[:, :30], x[:, 30:]) * 2**20,
        lambda x: x[:, :30] * 0,
    ),
    "a compensated sum": (lambda x: compensated(x) * 2**10, lambda x: x[:, 0] * 0),
    "the distance between floats": (lambda x: (x * 1e-7 + 1) - 1, lambda x: x * 1e-7),
    "rounding half up": (lambda x: (x + 0.5).floor(), lambda x: x),
    "rounding with a straight gradient": (lambda x: x + (x.round() - x).detach(), lambda x: x),
    "in place": (lambda x: x.clone().add_(LARGE).sub_(LARGE), lambda x: x),
    "reversed": (lambda x: LARGE - (LARGE - x), lambda x: x),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_export_that_drops_what_relies_on_exact_results_fails(idiom):
    model, dropped = IDIOMS[idiom]
    x = draw(40, 60)
    assert judged(model, x, model(x)).ok
    result = judged(model, x, dropped(x))
    assert not result.ok, result


@pytest.mark.parametrize(
    "model",
    {
        "a product that may be fused": lambda x: torch.addcmul(-x[:, :30] * x[:, 30:], x[:, :30], x[:, 30:]),
        "a scaled sum": lambda x: torch.add(-x[:, :30], x[:, 30:], alpha=1.0001) * 1e4,
        "a scaled sum in place": lambda x: x[:, :30].neg().add_(x[:, 30:], alpha=1.0001) * 1e4,
        "a quotient": lambda x: (x / 3 - x * (1 / 3)) * 1e4,
        "a remainder": lambda x: (x * 1.01).remainder(7.3) - (x * 1.01 - (x * 1.01 / 7.3).floor() * 7.3),
        "a range": lambda x: torch.arange(0, 6, 0.1)[:60] * x,
        "points between": lambda x: torch.linspace(0, 1, 60) * x,
        "half precision": lambda x: (x.half() * 3 + 300) - 300,
        "a complex product": lambda x: torch.complex(x, x) * torch.complex(x, -x.flip(0)),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_what_has_an_inner_result_or_may_be_another_operator_is_moved(model):
    with register_flattening_functions(None):
        eager, ((path, expected),) = eager_of(model[1], draw(40, 60))
        assert eager.replay(12), eager.problem
        spread = eager.spread(path, expected)
    assert spread is not None
    assert float(spread.largest.max()) > 0


@pytest.mark.parametrize("by", [2.0, -0.25, torch.tensor(1024.0)])
def test_a_division_by_a_power_of_two_is_exact(by):
    assert not judged(lambda x: (x / by + LARGE) - LARGE, draw(40, 60), draw(40, 60) / by).ok
    assert judged(lambda x: (x / by + LARGE) - LARGE, draw(40, 60), (draw(40, 60) / by).round()).ok


def test_an_operator_in_place_is_judged_like_any_other():
    def exact(x):
        return x.clone().mul_(x).sub_(x * x)

    x = draw(40, 60)
    result = judged(exact, x, exact(x) + 1e-3)
    assert not result.ok
    assert result.eager_moves == 0
    assert judged(variance, x, variance(x.double()).float()).ok


class Drops:
    """`onnx-dynamo`, whose optimizer takes ``(x + c) - c`` for ``x``."""

    name = "drops"
    target = "onnx"

    def export(self, request: ExportRequest) -> Exported:
        made = OnnxDynamo().export(request)
        program = onnx_ir.to_proto(made.program.model)
        dropped = 0
        for node in program.graph.node:
            if node.op_type in ("Add", "Sub"):
                kept = node.input[0]
                node.op_type, dropped = "Identity", dropped + 1
                del node.input[:]
                node.input.append(kept)
        assert dropped == 2
        return replace(made, program=program)


ROUNDS = """
        class Rounds(nn.Module):
            def step(self, x):
                return (x + 12582912.0) - 12582912.0

            def forward(self, x):
                return self.step(x) / 7


        class Patched:
            _PATCHED_CLASS_ = Rounds
            _PATCHES_ = ["step"]

            def step(self, x):
                return x


        def build_model():
            return Rounds()


        def calls():
            torch.manual_seed(1)
            return [((torch.randn(n, 30) * 9,), {}) for n in (20, 33)]
        """


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo", "onnx-torchscript"])
def test_a_right_export_of_such_a_model_agrees_to_the_last_digit(tmp_path, exporter):
    stage, error, record = verdict(make_run(tmp_path, ROUNDS), exporter)
    assert stage == "pass", error
    assert record["outputs"][0]["max_abs"] < 1e-6
    assert "rounding" not in record


def test_an_optimizer_that_drops_a_rounding_is_caught(tmp_path):
    EXPORTERS.register("drops", Drops())
    try:
        stage, error, _ = verdict(make_run(tmp_path, ROUNDS), "drops")
    finally:
        EXPORTERS.unregister("drops")
    assert stage == "compare", error


def test_a_patch_that_drops_a_rounding_is_caught(tmp_path):
    stage, error, _ = verdict(make_run(tmp_path, ROUNDS), "torch-export", "net.py:Patched")
    assert stage == "patch", error
    assert "changes what the model computes" in error.message


def test_one_output_that_relies_on_exact_results_beside_one_that_cancels():
    def both(x):
        return torch.stack([variance(x), (x[:, 0] + LARGE) - LARGE])

    x = draw(40, 60)
    right = torch.stack([variance(x.double()).float(), x[:, 0].round()])
    assert judged(both, x, right, Tolerances()).ok
    assert not judged(both, x, torch.stack([right[0], x[:, 0]]), Tolerances()).ok
