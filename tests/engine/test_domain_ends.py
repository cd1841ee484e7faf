"""Values that rounding takes across the end of the domain of a function: NaN in one program only."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from pytest_exportcheck.checks.compare import Tolerances
from pytest_exportcheck.checks.rounding import compare_rounded

from .helpers import make_run, verdict
from .test_rounding import draw, eager_of, judged, register_flattening_functions, variance

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

_UNIT = "nn.functional.normalize(x)"
_SQUARES = "(x * x).sum(-1)[:, None] + (x * x).sum(-1) - 2 * x @ x.T"
_VARIANCE = "(x**2).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2"

#: Name -> (what the model returns, its input). A right ONNX model differs in all of them.
MODELS = {
    "angle to itself": ("((x * x).sum(-1) / (x.norm(dim=-1) * x.norm(dim=-1))).acos()", "torch.randn(n, 64)"),
    "angles": (f"({_UNIT} @ {_UNIT}.T).acos()", "torch.randn(n, 64)"),
    "cosine similarity": ("nn.functional.cosine_similarity(x, x * 2).acos()", "torch.randn(n, 64)"),
    "clamped angles": (f"({_UNIT} @ {_UNIT}.T).clamp(-1, 1).acos()", "torch.randn(n, 64)"),
    "sine of an angle": (f"(1 - ({_UNIT} @ {_UNIT}.T) ** 2).sqrt()", "torch.randn(n, 64)"),
    "rapidity": (f"({_UNIT} @ {_UNIT}.T).atanh()", "torch.randn(n, 64)"),
    "normalization": (f"(x - x.mean(-1, keepdim=True)) / ({_VARIANCE}).sqrt()", "torch.randn(n, 64) + 1000"),
    "normalization of noise": (
        f"(x - x.mean(-1, keepdim=True)) / ({_VARIANCE}).sqrt()",
        "torch.randn(n, 64) / 10 + 1000",
    ),
    "deviation": (f"({_VARIANCE}).sqrt()", "torch.randn(n, 64) / 3 + 1000"),
    "logarithm of a variance": (f"({_VARIANCE}).log()", "torch.randn(n, 64) / 3 + 1000"),
    "inverse deviation": (f"({_VARIANCE}).rsqrt()", "torch.randn(n, 64) / 3 + 1000"),
    "distances": (f"({_SQUARES}).sqrt()", "torch.randn(n, 64)"),
    "clamped distances": (f"({_SQUARES}).clamp_min(0).sqrt()", "torch.randn(n, 64)"),
    "logarithm of one less": ("(1 - (x @ x.T / 4).sigmoid()).log()", "torch.randn(n, 64)"),
    "logarithm of other classes": ("(1 - x.softmax(-1)).log()", "torch.randn(n, 8) * 10"),
    "hyperbolic distances": (
        f"(1 + 2 * ({_SQUARES}) / ((1 - (x * x).sum(-1)[:, None]) * (1 - (x * x).sum(-1)))).acosh()",
        "torch.randn(n, 16) / 10",
    ),
}

#: What the older exporter refuses.
_REFUSED = {"rapidity", "hyperbolic distances"}


@pytest.mark.parametrize("exporter", ["onnx-dynamo", "onnx-torchscript"])
def test_an_element_that_every_weak_replay_pushes_against_the_end(tmp_path, exporter):
    # Eager has 0 at [3, 3] in all twelve, and the runtime the root of a rounding.
    run = make_run(
        tmp_path,
        f"""
        class Distances(nn.Module):
            def forward(self, x):
                return ({_SQUARES}).clamp_min(0).sqrt()


        def build_model():
            return Distances()


        def calls():
            draw = {{n: torch.Generator().manual_seed(n + 8) for n in (5, 9)}}
            return [((torch.randn(n, 8, generator=g) * 3,), {{}}) for n, g in draw.items()]
        """,
    )
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert record["rounding"]


@pytest.mark.parametrize(
    ("exporter", "model"),
    [
        *(("onnx-dynamo", model) for model in MODELS),
        *(("onnx-torchscript", model) for model in MODELS if model not in _REFUSED),
        ("torch-export", "angles"),
    ],
)
def test_a_right_export_passes_at_the_end_of_a_domain(tmp_path, exporter, model):
    forward, x = MODELS[model]
    run = make_run(
        tmp_path,
        f"""
        class AtTheEnd(nn.Module):
            def forward(self, x):
                return {forward}


        def build_model():
            return AtTheEnd()


        def calls():
            torch.manual_seed(1)
            return [(({x},), {{}}) for n in (20, 33)]
        """,
    )
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    if exporter != "torch-export":
        (row,) = record["outputs"]
        assert "the difference is rounding" in row["note"]
        assert record["rounding"]


def angles(x):
    return (normalize(x) @ normalize(x).T).acos()


def right_angles(x):
    """As another right program has them: of numbers of twice the digits, rounded at the end."""
    x = normalize(x.double())
    return (x @ x.T).float().acos()


def test_a_pass_says_which_values_are_not_finite_in_one_program_alone():
    x = draw(40, 64, mean=0.0)
    expected, right = angles(x), right_angles(x)
    assert not torch.equal(expected.isnan(), right.isnan()), "nothing is shown"
    result = judged(angles, x, right)
    assert result.ok, result
    assert result.reason == ""
    assert "where eager itself has both when its operators round otherwise" in result.note


ANGLES_FAULTS = {
    "NaN at an angle that is none of a row to itself": lambda got: got.where(got < got[3, 4], math.nan),
    "NaN in one place": lambda got: got.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(math.nan)),
    "NaN all along the diagonal": lambda got: got.where(torch.eye(len(got)) == 0, math.nan),
    "an infinity in the place of a small angle": lambda got: got.where(torch.eye(len(got)) == 0, math.inf),
    "a large angle of a row to itself": lambda got: got.where(torch.eye(len(got)) == 0, 0.1),
    "one large angle of a row to itself": lambda got: got.index_put(
        (torch.tensor(5), torch.tensor(5)), torch.tensor(0.1)
    ),
    "other angles": lambda got: got * 1.01,
    "of the other sign": lambda got: -got,
}


@pytest.mark.parametrize("fault", ANGLES_FAULTS)
def test_a_fault_beside_values_at_the_end_of_a_domain_is_found(fault):
    x = draw(40, 64, mean=0.0)
    assert judged(angles, x, right_angles(x)).ok
    result = judged(angles, x, ANGLES_FAULTS[fault](right_angles(x)))
    assert not result.ok, result
    assert result.crosses == ""


def test_a_finite_value_in_the_place_of_nan_is_near_those_of_eager():
    x = draw(40, 64, mean=0.0)
    expected = angles(x)
    (at, *_) = expected.isnan().nonzero().tolist()
    for value, ok in ((0.0, True), (5e-4, True), (0.02, False), (-0.02, False), (3.0, False)):
        got = expected.clone()
        got[tuple(at)] = value
        assert judged(angles, x, got).ok is ok, value


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (lambda x: (1 - x.sigmoid()).log(), lambda y: y.where(y > -10, math.nan)),
        (lambda x: (1 - x.softmax(-1)).log(), lambda y: y.where(y > -10, math.nan)),
        (lambda x: (1 - (-x.abs()).exp()).sqrt(), lambda y: y.where(y > 1e-3, math.nan)),
        (lambda x: (1 - x.cos() ** 2).sqrt(), lambda y: y.where(y > 0.1, math.nan)),
        (lambda x: (x / x.abs()).acos(), lambda y: y * math.nan),
        (lambda x: (x.exp() / (x.exp() + x.abs())).acos(), lambda y: y.where(y > 1e-3, math.nan)),
        (lambda x: x.cosh().acosh(), lambda y: y.where(y > 0.1, math.nan)),
    ],
)
def test_no_function_leaves_its_range_by_rounding(model, got):
    """A probability is at most 1: what is NaN for a larger one is no rounding."""
    x = draw(40, 60, mean=0.0) * 20
    x[:, 0] = 0.0
    x[:, 1] *= 1e-4
    x[:, 2] += 40
    expected = model(x)
    wrong = got(expected)
    assert bool((wrong.isnan() & ~expected.isnan()).any())
    assert not judged(model, x, wrong).ok


def test_nan_of_eager_that_no_rounding_ends_stays_nan():
    def of_negative(x):
        return (x - 200).sqrt() + variance(x)

    x = draw(40, 60)[:, :40]
    expected = of_negative(x)
    assert bool(expected.isnan().all())
    assert not judged(of_negative, x, expected.nan_to_num(0.0)).ok


def test_a_model_without_such_a_function_keeps_every_nan_strict():
    x = draw(40, 60)
    result = judged(variance, x, variance(x).where(x[:, 0] < x[:, 0].max(), math.nan))
    assert not result.ok
    assert result.reason.startswith("nan instead of")


def test_the_tolerance_of_a_spec_forbids_a_value_across_the_end():
    x = draw(40, 64, mean=0.0)
    result = judged(angles, x, right_angles(x), Tolerances(atol=1e-2))
    assert not result.ok
    assert result.note.endswith("the tolerance is the one of the spec")


def test_a_branch_beside_a_function_at_its_end_is_not_excused():
    """The rule for roots is for elements that lie further apart under stronger moves: a branch does not."""

    def both(x):
        jumps = torch.where(x.mean(-1) * 3 / 3 >= x.mean(-1), x[:, 0] ** 4, 1.0)
        return torch.cat([angles(x).flatten(), jumps])

    x = draw(64, 300, mean=3.0)
    right = both(x)
    wrong = right.clone()
    wrong[-64:] = torch.where(wrong[-64:] == 1, x[:, 0] ** 4, 1.0)
    assert not judged(both, x, wrong).ok


def test_values_that_do_not_count_may_be_anything():
    x = draw(40, 64, mean=0.0)
    got = right_angles(x)
    got[3, 4] = math.nan
    where = torch.ones(40, 40, dtype=torch.bool)
    assert not judged(angles, x, got, where=where).ok
    where[3, 4] = False
    assert judged(angles, x, got, where=where).ok


def test_an_output_of_another_kind_that_fails_beside_it_ends_the_judgement():
    def two(x):
        return angles(x), x.argmax(-1)

    x = draw(40, 64, mean=0.0)
    with register_flattening_functions(None):
        eager, expected = eager_of(two, x)
        got = [(expected[0][0], right_angles(x)), (expected[1][0], expected[1][1] + 1)]
        results = compare_rounded(expected, got, Tolerances(), None, eager)
    assert [result.ok for result in results] == [False, False]
    assert eager.replays == 0
