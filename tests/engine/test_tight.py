"""A tolerance of the spec below what rounding does to eager itself: the spec is named, and no exporter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks.compare import Tolerances
from pytest_exportcheck.checks.rounding import compare_rounded
from pytest_exportcheck.checks.tight import too_tight
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import make_run, verdict
from .test_rounding import draw, eager_of, judged, run_of, variance

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

TIGHT = Tolerances(atol=1e-9, rtol=0.0, places={"": "specs/a.yaml:3"})


def test_the_spec_is_named_and_no_exporter(tmp_path):
    run = run_of(tmp_path, "variance", "tolerance:\n  rtol: 0.0\n  atol: 1e-5")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "compare"
    assert error.message.startswith(
        "the tolerance of net.yaml:6 is below eager's own noise (eager moves by up to "
    )
    assert "no exporter is blamed for it: atol " in error.message
    assert error.message.endswith("(onnxruntime CPU against eager), call 1 of 2")
    assert error.facts == {"below_noise": ["net.yaml:6"]}
    assert not any("to blame" in line or "captured program" in line for line in error.details)
    assert not record["outputs"][0]["ok"]


def test_the_atol_that_would_pass_passes(tmp_path):
    run = run_of(tmp_path, "variance", "tolerance: {atol: 1e-9, rtol: 0.0}\nresize: off")
    rest = verdict(run, "onnx-dynamo")[1].message.split("atol ")[1]
    atol = rest.split()[0]
    (tmp_path / "second").mkdir()
    run = run_of(tmp_path / "second", "variance", f"tolerance: {{atol: {atol}, rtol: 0.0}}\nresize: off")
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "pass" or "(onnxruntime CPU against eager), call 2 of 2" in error.message


def test_the_same_at_other_sizes(tmp_path):
    run = make_run(
        tmp_path,
        """
        class Cancels(nn.Module):
            def forward(self, x):
                many = torch.arange(x.shape[0]).sum() > 1000
                return ((x**2).mean(-1) - x.mean(-1) ** 2) * many


        def build_model():
            return Cancels()


        def calls():
            torch.manual_seed(1)
            return [((torch.randn(n, 300) + 100,), {}) for n in (20, 33)]
        """,
        "tolerance: {atol: 1e-9, rtol: 0.0}\nresize: {x_dim_0: [70, 80]}",
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize"
    assert error.message.startswith("the tolerance of net.yaml:4 is below eager's own noise")
    assert error.message.endswith("at sizes x_dim_0=70, which no observed call had")
    assert record["resize"]["failed"] == "x_dim_0=70"
    assert not any("to blame" in line or "captured program" in line for line in error.details)


def test_the_fault_of_a_later_call_is_told_first(tmp_path):
    run = make_run(
        tmp_path,
        """
        class Cancels(nn.Module):
            def forward(self, x):
                return (x**2).mean(-1) - x.mean(-1) ** 2


        def build_model():
            return Cancels()


        def calls():
            torch.manual_seed(1)
            return [((torch.randn(n, 300) + 100,), {}) for n in (20, 33)]
        """,
        "tolerance: {atol: 1e-9, rtol: 0.0}\nresize: off",
    )
    import pytest_exportcheck.runtimes.onnx_runtime as runtime

    class Wrong(runtime.OnnxRuntimeSession):
        def run(self, tensors):
            found = super().run(tensors)
            return [(path, value + (value.shape[0] == 33)) for path, value in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "OnnxRuntimeSession", Wrong)
        stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "compare"
    assert "call 2 of 2" in error.message
    assert "noise" not in error.message
    assert error.facts == {}


def test_a_patch_that_rounds_otherwise_is_not_blamed(tmp_path):
    run = make_run(
        tmp_path,
        """
        def variance(x):
            return (x**2).mean(-1) - x.mean(-1) ** 2


        def other_order(x):
            n = x.shape[-1]
            return (x * x).flip(-1).cumsum(-1)[..., -1] / n - (x.sum(-1) / n) ** 2


        class Net(nn.Module):
            def step(self, x):
                return variance(x)

            def forward(self, x):
                return self.step(x)


        class Patched:
            _PATCHED_CLASS_ = Net
            _PATCHES_ = ["step"]

            def step(self, x):
                return other_order(x)


        def build_model():
            return Net()


        def calls():
            torch.manual_seed(1)
            return [((torch.randn(n, 300) + 100,), {}) for n in (20, 33)]
        """,
        "tolerance: {atol: 1e-9}",
    )
    stage, error, _ = verdict(run, "torch-export", "net.py:Patched")
    assert stage == "patch"
    assert error.message.startswith("the tolerance of net.yaml:4 is below eager's own noise")
    assert error.facts["below_noise"] == ["net.yaml:4"]


@pytest.mark.parametrize(
    ("tolerance", "line"),
    [
        ("tolerance:\n  rtol: 0.0\n  outputs:\n    output: {atol: 1e-9}", 7),
        ("tolerance:\n  rtol: 0.0\n  devices:\n    cpu: {atol: 1e-9}", 7),
        ("tolerance:\n  rtol: 0.0\n  atol: 1.0\n  dtypes:\n    float32:\n      atol: 1e-9", 9),
        ("tolerance:\n  atol: 1e-9\n  outputs:\n    output: {rtol: 0.0}", 5),
    ],
)
def test_the_line_is_that_of_the_atol(tmp_path, tolerance, line):
    stage, error, _ = verdict(run_of(tmp_path, "variance", tolerance), "onnx-dynamo")
    assert stage == "compare"
    assert error.facts == {"below_noise": [f"net.yaml:{line}"]}


def right(x):
    return variance(x.double()).float()


def noted(function: Any, x: Any, got: Any, where: Any = None) -> str:
    result = judged(function, x, got, TIGHT, where)
    assert not result.ok, "a tolerance of a spec is a requirement"
    return too_tight([result]).text


def test_another_order_of_summation_is_noise():
    x = draw(40, 60)
    assert noted(variance, x, right(x)).startswith(
        "the tolerance of specs/a.yaml:3 is below eager's own noise"
    )


FAULTS = {
    "a shift": lambda x: variance(x) + 0.03,
    "a wrong mean": lambda x: (x**2).mean(-1) - (x.mean(-1) + 1e-3) ** 2,
    "one element": lambda x: variance(x) + torch.eye(1, x.shape[0]).squeeze(0) * 0.1,
    "not a number": lambda x: variance(x).where(x[:, 0] < x[:, 0].max(), math.nan),
    "infinite": lambda x: variance(x).where(x[:, 0] < x[:, 0].max(), math.inf),
    "another order": lambda x: variance(x).flip(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_no_noise(fault):
    x = draw(40, 60)
    assert not noted(variance, x, FAULTS[fault](x.double()).float())


def test_another_dtype_or_shape_is_no_noise():
    x = draw(40, 60)
    assert not noted(variance, x, variance(x.double()))
    assert not noted(variance, x, right(x).half())
    assert not noted(variance, x, right(x)[1:])


def test_nan_of_eager_at_other_places_is_no_noise():
    def of_some(x):
        return variance(x).where(x[:, 0] < x[:, 0].median(), math.nan)

    x = draw(40, 60)
    there = right(x).where(x[:, 0] < x[:, 0].median(), math.nan)
    assert noted(of_some, x, there), "the same places"
    assert not noted(of_some, x, there.nan_to_num(0.0))
    assert not noted(of_some, x, there.flip(0))


def test_parts_of_complex_numbers_are_judged_apart():
    def both(x):
        return torch.complex(variance(x), x[:, 0])

    x = draw(40, 60)
    good = torch.complex(right(x), x[:, 0])
    assert noted(both, x, good)
    moves = (good.real - both(x).real).abs().max()
    assert not noted(both, x, torch.complex(right(x), x[:, 0] + moves)), "the exact part is off as far"
    assert not noted(both, x, torch.complex(x[:, 0], right(x)))
    assert not noted(both, x, good.conj().resolve_conj())
    assert not noted(both, x, torch.complex(right(x), x[:, 0].where(x[:, 0] < x[:, 0].max(), math.nan)))


def test_one_noisy_element_vouches_for_no_other():
    def both(x):
        return torch.cat([variance(x), x[:, 0]])

    x = draw(40, 60)
    good = torch.cat([right(x), x[:, 0]])
    assert noted(both, x, good)
    wrong = good.clone()
    wrong[-1] += 1e-4
    assert not noted(both, x, wrong), "what is exact in eager has no noise"


def test_one_noisy_output_vouches_for_no_other():
    def two(x):
        return variance(x), x[:, 0] + 1

    x = draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(two, x)
        (first, _), (second, value) = expected
        got = [(first, right(x)), (second, value + 1e-3)]
        results = compare_rounded(expected, got, TIGHT, None, eager)
    assert [result.ok for result in results] == [False, False]
    assert results[0].below_noise
    assert not too_tight(results).text


def test_a_tolerance_above_the_noise_is_not_blamed():
    """The error is one that rounding may explain, and eager itself keeps the tolerance."""
    x = draw(40, 60)
    with register_flattening_functions(None):
        eager, ((path, expected),) = eager_of(variance, x)
        assert eager.replay(12), eager.problem
        spread = eager.spread(path, expected)
        atol = float(spread.largest.max()) * 1.01
        got = expected.clone()
        worst = int(spread.largest.argmax())
        got[worst] += 3 * spread.largest[worst]
        tolerances = Tolerances(atol=atol, rtol=0.0, places={"": "a.yaml:1"})
        (result,) = compare_rounded([(path, expected)], [(path, got)], tolerances, None, eager)
    assert not result.ok
    assert "eager itself moves" in result.note
    assert not result.below_noise


def test_default_tolerances_are_nobodys_word():
    x = draw(40, 60)
    assert not too_tight([judged(variance, x, variance(x) + 1)]).text
