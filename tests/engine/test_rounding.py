"""Outputs that are what is left of larger numbers: eager is uncertain of them, and no export is blamed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.checks.compare import LeafComparison, Tolerances, table
from pytest_exportcheck.checks.rounding import MovedEager, compare_rounded
from pytest_exportcheck.diagnose.diagnosis import subject_of_case
from pytest_exportcheck.observe import InputObserver
from pytest_exportcheck.observe.targets import Target
from pytest_exportcheck.pytrees import clone_tree, register_flattening_functions

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models


def variance(x):
    return (x**2).mean(-1) - x.mean(-1) ** 2


class Plain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def eager_of(function: Any, x: Any) -> tuple[MovedEager, list[tuple[str, Any]]]:
    """(replays of a call, what it returned)."""
    module = function if isinstance(function, nn.Module) else Plain(function)
    observer = InputObserver()
    with torch.no_grad(), observer(module):
        module(clone_tree(x))
    signature = observer.info.signature
    assert signature is not None
    (call,) = observer.info.calls
    return MovedEager.of(Target("t", module, "forward", signature), call), call.output_leaves()


def judged(
    function: Any, x: Any, got: Any, tolerances: Tolerances | None = None, where: Any = None
) -> LeafComparison:
    with register_flattening_functions(None):
        eager, expected = eager_of(function, x)
        (path, _), *_ = expected
        results = compare_rounded(
            expected[:1],
            [(path, got)],
            tolerances or Tolerances(),
            None if where is None else {path: where},
            eager,
        )
    return results[0]


def draw(*shape: int, mean: float = 100.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) + mean


MODELS = {
    "variance": ("(x**2).mean(-1) - x.mean(-1) ** 2", "torch.randn(n, 300) + 100"),
    "distance": ("(x * x).sum(-1)[:, None] + (x * x).sum(-1) - 2 * x @ x.T", "torch.randn(n, 200) / 10 + 10"),
    "normalization": ("nn.functional.layer_norm(x, (64,))", "torch.randn(n, 64) / 100 + 1000"),
    "running sum": ("x.cumsum(-1)[:, -1] - x.sum(-1)", "torch.randn(n, 500) + 10"),
    "transform": ("(x - 100).exp().sum(-1).log() + 100 - x.logsumexp(-1)", "torch.randn(n, 300) + 100"),
    "in place": ("(x * x).sub_(x.mean(-1, keepdim=True) ** 2).sum(-1)", "torch.randn(n, 300) + 100"),
    "branch": (
        "torch.cond(x.sum() > 0, lambda x: (x**2).mean(-1) - x.mean(-1) ** 2, lambda x: x.mean(-1), (x,))",
        "torch.randn(n, 300) + 100",
    ),
}


def run_of(folder, model: str, extra: str = ""):
    forward, x = MODELS[model]
    return make_run(
        folder,
        f"""
        class Cancels(nn.Module):
            def forward(self, x):
                return {forward}


        def build_model():
            return Cancels()


        def calls():
            torch.manual_seed(1)
            return [(({x},), {{}}) for n in (20, 33)]
        """,
        extra,
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_right_export_passes_where_eager_is_as_uncertain(tmp_path, model):
    stage, error, record = verdict(run_of(tmp_path, model), "onnx-dynamo")
    assert stage == "pass", error
    (row,) = record["outputs"]
    assert row["ok"]
    assert row["max_abs"] > row["atol"], "the runtimes round otherwise, or nothing is shown"
    assert row["eager_moves"] > 0
    assert "the difference is rounding: eager itself moves by up to" in row["note"]
    assert row["would_need"] > row["atol"], "what would pass by the tolerance alone stays honest"
    assert record["rounding"][0].startswith("call 1 of 2: output is off by")
    assert any(line.startswith("sizes ") for line in record["rounding"])


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
@pytest.mark.parametrize(("factor", "stage"), [("1", "pass"), ("1.1", "patch")])
def test_a_patch_that_rounds_otherwise_is_right(tmp_path, exporter, factor, stage):
    run = make_run(
        tmp_path,
        f"""
        def variance(x):
            return (x**2).mean(-1) - x.mean(-1) ** 2


        def other_order(x):
            n = x.shape[-1]
            return ((x * x).flip(-1).cumsum(-1)[..., -1] / n - (x.sum(-1) / n) ** 2) * {factor}


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
            return [((torch.randn(n, 300) + 100,), {{}}) for n in (20, 33)]
        """,
    )
    found, error, record = verdict(run, exporter, "net.py:Patched")
    assert found == stage, error
    if stage == "pass":
        assert record["rounding"][0].startswith("patches, call 1 of 2: output is off by")
        assert any(line.startswith("call 2 of 2: output is off by") for line in record["rounding"])
    else:
        assert "changes what the model computes" in error.message


def test_a_verdict_by_rounding_is_the_same_every_time(tmp_path):
    run = run_of(tmp_path, "variance")
    first, second = (verdict(run, "onnx-dynamo")[2]["rounding"] for _ in range(2))
    assert first == second


def test_a_diagnosis_judges_as_the_check_does(tmp_path):
    run = run_of(tmp_path, "variance")
    case = CaseId(run.spec.relative, "onnx-dynamo", "none", "cpu", "float32")
    subject = subject_of_case(run, case)
    with subject.active():
        samples = list(subject.samples())
        assert len(samples) > 2
        for sample in samples:
            right = variance(sample.arguments["x"].double()).float()
            assert not torch.allclose(right, sample.expected[0][1], rtol=1e-4, atol=1e-5)
            assert sample.compare([("output", right)], subject.tolerances)[0].ok
            assert not sample.compare([("output", right + 0.2)], subject.tolerances)[0].ok


def test_the_tolerance_of_a_spec_is_its_word(tmp_path):
    run = run_of(tmp_path, "variance", "tolerance: {atol: 1e-5}")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "compare"
    assert any(
        "eager itself moves by up to" in line and line.endswith("the tolerance is the one of the spec")
        for line in error.details
    )
    assert not record["outputs"][0]["ok"]
    assert "rounding" not in record


FAULTS = {
    "a wrong mean": lambda x: (x**2).mean(-1) - (x.mean(-1) + 1e-3) ** 2,
    "swapped operands": lambda x: x.mean(-1) ** 2 - (x**2).mean(-1),
    "a dropped element": lambda x: variance(x[:, 1:]),
    "unbiased": lambda x: variance(x) * x.shape[-1] / (x.shape[-1] - 1),
    "another order of rows": lambda x: variance(x).roll(1, 0),
    "a shift": lambda x: variance(x) + 0.03,
    "one element": lambda x: variance(x) + torch.eye(1, x.shape[0]).squeeze(0) * 0.1,
    "not a number": lambda x: variance(x).where(x[:, 0] < x[:, 0].max(), torch.nan),
    "infinite": lambda x: variance(x).where(x[:, 0] < x[:, 0].max(), torch.inf),
    "another shape": lambda x: variance(x)[1:],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_model_that_cancels_is_found(fault):
    x = draw(40, 60)
    right = variance(x.double()).float()
    assert judged(variance, x, right).ok
    wrong = FAULTS[fault](x.double())
    result = judged(variance, x, wrong.float())
    assert not result.ok, result


def test_what_differs_everywhere_a_little_is_no_rounding():
    """Each element alone could be."""
    x = draw(400, 60)
    right = variance(x.double()).float()
    moves = judged(variance, x, right).eager_moves
    assert moves is not None
    few = right.clone()
    few[3] += moves
    assert judged(variance, x, few).ok
    assert not judged(variance, x, right + moves).ok


def test_one_uncertain_element_vouches_for_no_other():
    """Of each element the fault is within what its moves allow, and three times what they are as a whole."""
    x = draw(400, 60)
    x[0] += 30000
    right = variance(x.double()).float()
    assert judged(variance, x, right).ok
    with register_flattening_functions(None):
        eager, ((path, expected),) = eager_of(variance, x)
        assert eager.replay(12), eager.problem
        spread = eager.spread(path, expected)
    assert spread is not None
    wrong = expected + 3 * spread.mean
    wrong[0] = right[0]
    assert bool(((wrong - expected).abs() <= spread.allowed).all())
    assert not judged(variance, x, wrong).ok


def test_where_eager_hardly_moves_the_tolerance_is_what_it_was():
    """The larger of both is allowed, not the sum."""
    x = draw(40, 60, mean=0.0)

    def product(x):
        return x @ x.T

    right = product(x)
    tolerance = Tolerances()
    allowed = tolerance.of("output", right)
    atol = tolerance.by_element("output", right, allowed) + allowed.rtol * right.abs()
    assert judged(product, x, (right + atol * 0.99).float()).ok
    result = judged(product, x, (right + atol * 1.01).float())
    assert not result.ok
    assert 0 < result.eager_moves < 1e-4
    assert result.note == ""


def test_a_failure_says_how_far_eager_moves_where_that_is_more_than_the_tolerance():
    x = draw(40, 60)
    result = judged(variance, x, variance(x) + 1)
    assert not result.ok
    assert result.note.endswith("when its operators round otherwise, which does not explain the difference")
    assert any("which does not explain the difference" in line for line in table([result]))


CHAOTIC = {
    "a branch that rounding decides": lambda x: torch.where(variance(x) > variance(x).median(), 1.0, 0.0),
    "a branch into large numbers": lambda x: torch.where(
        variance(x) > variance(x).median(), x[:, 0] ** 4, 1.0
    ),
    "the inverse of what has none": lambda x: torch.linalg.inv(
        torch.ones(20, 20) + torch.eye(20) * 1e-7 * x[0, 0]
    ),
    "the sine of a large number": lambda x: (x[:, :20].cumsum(-1) * 1e4).sin(),
}


@pytest.mark.parametrize("model", CHAOTIC)
def test_an_ill_conditioned_model_hides_no_fault(model):
    x = draw(40, 60)
    expected = CHAOTIC[model](x)
    with register_flattening_functions(None):
        eager, leaves = eager_of(CHAOTIC[model], x)
        assert eager.replay(12), eager.problem
        spread = eager.spread(*leaves[0])
    assert spread is not None
    assert float(spread.largest.max()) > 0.5, "eager is no measure"
    assert float(spread.allowed.max()) <= 0.05 * float(expected.abs().max())
    result = judged(CHAOTIC[model], x, expected * 1.2)
    assert not result.ok
    assert result.note.endswith("which does not explain the difference")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes_cancel_too(dtype):
    x = draw(40, 60, mean=10.0).to(dtype)
    right = variance(x.to(torch.complex128 if dtype.is_complex else torch.float64)).to(dtype)
    tolerances = Tolerances()
    assert judged(variance, x, right, tolerances).ok
    assert not judged(variance, x, right + 20, tolerances).ok
    assert not judged(variance, x, right.neg() * 40, tolerances).ok


def test_fill_values_do_not_widen_what_is_allowed():
    """A mask of -3e38 takes part, and a routing that rounding decides stays a difference."""

    def masked(x):
        scores = x @ x.T
        scores = scores + torch.full_like(scores, torch.finfo(x.dtype).min).triu(1)
        return torch.where(scores.softmax(-1)[:, :1] + variance(x)[:, None] > variance(x).median(), 1.0, 0.0)

    x = draw(40, 60)
    expected = masked(x)
    assert not judged(masked, x, 1 - expected).ok


@pytest.mark.parametrize("large", [1e4, 3e4])
def test_a_row_of_larger_numbers_is_no_fill_value(large):
    """It stands off from the others as a fill value does, and is as uncertain as it is large."""
    x = draw(40, 60)
    x[0] += large
    result = judged(variance, x, variance(x.double()).float())
    assert result.ok, result


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores: scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -1e9) * 0.5,
        lambda scores: scores + torch.ones_like(scores).triu(1) * -1e9,
        lambda scores: torch.where(torch.ones_like(scores).triu(1) > 0, -1e9, scores),
        lambda scores: scores + torch.zeros_like(scores).masked_fill(scores > 0, -1e9) + scores * 0.1,
    ],
)
def test_fill_values_are_no_large_numbers(mask):
    eager, ((path, expected),) = eager_of(lambda x: mask(x @ x.T).softmax(-1), draw(9, 60, mean=0.0))
    with register_flattening_functions(None):
        assert eager.replay(3), eager.problem
        spread = eager.spread(path, expected)
    assert spread is not None
    assert float(spread.limit.max()) < 0.05


def test_infinities_stay_where_they_are():
    def masked(x):
        return variance(x).where(torch.arange(x.shape[0]) % 3 > 0, -torch.inf)

    x = draw(40, 60)
    right = masked(x.double()).float()
    assert judged(masked, x, right).ok
    assert not judged(masked, x, right.nan_to_num(neginf=-3e38)).ok


def test_positions_that_do_not_count_do_not_count_here():
    x = draw(40, 60)
    right = variance(x.double()).float()
    where = torch.arange(40) < 30
    wrong = right.clone()
    wrong[35] += 5
    assert judged(variance, x, wrong, where=where).ok
    assert not judged(variance, x, wrong).ok


def test_whole_numbers_are_not_rounded():
    """Counts, masks and positions are exact in every runtime."""

    eager, ((path, expected),) = eager_of(lambda x: (x @ x.T - x.sum(-1) * 3).floor(), draw(9, 60).round())
    with register_flattening_functions(None):
        assert eager.replay(3), eager.problem
        spread = eager.spread(path, expected)
    assert spread is not None
    assert float(spread.largest.max()) == 0


class Counting(nn.Module):
    """Keeps what it sees, and draws from every global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[torch.Tensor] = []
        self.weight = nn.Parameter(torch.ones(60))

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        torch.rand(2), random.random()
        return variance(x * self.weight)


def test_replays_leave_the_model_and_the_generators_as_they_were():
    module, x = Counting(), draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(module, x)
        before = (module.calls.clone(), len(module.seen), torch.get_rng_state(), random.getstate())
        assert eager.replay(3), eager.problem
    assert torch.equal(module.calls, before[0])
    assert len(module.seen) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert random.getstate() == before[3]
    assert eager.spread(*expected[0]) is not None


def test_a_call_that_writes_to_weights_is_not_replayed():
    class Writes(Counting):
        def forward(self, x):
            self.weight.data.mul_(1.0)
            return variance(x * self.weight)

    module, x = Writes(), draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(module, x)
        right = variance(x.double()).float()
        (result,) = compare_rounded(expected, [("output", right)], Tolerances(), None, eager)
    assert not result.ok
    assert result.eager_moves is None
    assert result.note == (
        "how far rounding moves eager is not known: RuntimeError: a call writes to parameters"
    )
    assert torch.equal(module.weight, torch.ones(60))


def test_an_eager_that_answers_otherwise_than_it_did_explains_nothing():
    class Growing(Counting):
        def forward(self, x):
            self.calls += 1
            return variance(x) * self.calls

    module, x = Growing(), draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(module, x)
        right = variance(x.double()).float()
        (result,) = compare_rounded(expected, [("output", right)], Tolerances(), None, eager)
    assert not result.ok
    assert result.eager_moves is None


def test_nothing_is_replayed_where_nothing_differs_or_no_rounding_could_explain_it(monkeypatch):
    def replay(self, count):
        raise AssertionError("replayed")

    monkeypatch.setattr(MovedEager, "replay", replay)
    x = draw(40, 60)
    right = variance(x)
    assert judged(variance, x, right).ok
    assert not judged(variance, x, right[1:]).ok
    assert not judged(variance, x, right.double()).ok
    assert not judged(lambda x: x.argmax(-1), x, x.argmin(-1)).ok


def test_half_precision_that_ends_in_single_precision_is_half_precision():
    def head(x):
        return variance(x).float()

    x = draw(40, 60, mean=10.0).half()
    right = variance(x.double()).float()
    assert judged(head, x, right, Tolerances(computed_in=torch.float16)).ok
    assert not judged(head, x, right.neg() * 4, Tolerances(computed_in=torch.float16)).ok


@pytest.mark.parametrize(
    ("numbers", "replays"), [(10_000_000, 12), (500_000, 6), (300_000, 0)], ids=["all", "half", "none"]
)
def test_how_often_eager_is_replayed_depends_on_what_a_call_computes(monkeypatch, numbers, replays):
    monkeypatch.setattr("pytest_exportcheck.checks.rounding._NUMBERS", numbers)
    x = draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(variance, x)
        right = variance(x.double()).float()
        (result,) = compare_rounded(expected, [("output", right)], Tolerances(), None, eager)
    assert 300_000 < 12 * eager.work < 500_000 < 24 * eager.work, "what the numbers above are made for"
    assert eager.replays == replays
    assert result.ok is (replays > 0), result
    said = f"24 replays would move {24 * eager.work:.1e} numbers, at most {numbers:.0e} are"
    if replays == 12:
        assert "replays would" not in result.note
    elif replays:
        assert result.note.endswith(f"12 replays: {said}")
    else:
        assert result.note == f"how far rounding moves eager is not known: OverflowError: {said}"


def test_fewer_replays_find_a_fault_too(monkeypatch):
    monkeypatch.setattr("pytest_exportcheck.checks.rounding._NUMBERS", 500_000)
    x = draw(40, 60)
    result = judged(variance, x, variance(x.double()).float() + 0.03)
    assert not result.ok
    assert "12 replays: 24 replays would move" in result.note


def test_a_real_fault_costs_few_replays():
    x = draw(40, 60)
    with register_flattening_functions(None):
        eager, expected = eager_of(variance, x)
        compare_rounded(expected, [("output", variance(x) * 2)], Tolerances(), None, eager)
    assert eager.replays == 3


def test_what_is_written_into_an_input_is_judged_alike():
    class Write(nn.Module):
        def forward(self, x):
            x.mul_(x).sub_(x.mean(-1, keepdim=True))
            return x.mean(-1)

    x = draw(40, 60)
    with register_flattening_functions(None):
        eager, _ = eager_of(Write(), x)
        assert eager.replay(3), eager.problem
    assert set(eager.plain) == {"output", "x (in place)"}
    written = (x * x).sub(x.mul(x).mean(-1, keepdim=True))
    spread = eager.spread("x (in place)", written)
    assert spread is not None
    assert float(spread.largest.max()) > 1e-4
    assert torch.equal(x, draw(40, 60))


def test_an_element_that_jumps_is_not_excused_by_others_that_move() -> None:
    def both(x):
        jumps = (x.mean(-1) * 3 / 3 >= x.mean(-1)).float()
        return torch.stack([variance(x), jumps])

    x = draw(64, 300, mean=30000.0)
    right = both(x)
    assert bool(right[1].any())
    wrong = right.clone()
    wrong[1] = 0.0
    assert not judged(both, x, wrong).ok
    # The other row is excused as ever.
    moved = right.clone()
    moved[0] = variance(x.double()).float()
    assert judged(both, x, moved).ok


def test_of_many_elements_that_cancel_none_seems_to_jump() -> None:
    """One of thousands moves by as much in few strong replays as in many others."""

    def distances(x):
        square = (x * x).sum(-1)
        return square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * x @ x.transpose(-1, -2)

    x = torch.randn(3, 60, 24, generator=torch.Generator().manual_seed(3)) * 3 + 60
    with register_flattening_functions(None):
        eager, ((path, expected),) = eager_of(distances, x)
        assert eager.replay(12), eager.problem
        spread = eager.spread(path, expected)
    assert spread is not None
    assert not bool(((spread.largest > 0) & (spread.limit == 0)).any())


def test_the_parts_of_a_complex_number_are_judged_apart() -> None:
    def uncertain(x):
        return torch.complex(variance(x), torch.ones(x.shape[0]))

    x = draw(40, 300, mean=1000.0)
    right = uncertain(x)
    assert judged(uncertain, x, torch.complex(variance(x.double()).float(), right.imag)).ok
    assert not judged(uncertain, x, torch.complex(right.real, right.imag * 1.01)).ok


OPERATORS = {
    "exp": lambda x: x.exp(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "sum": lambda x: x.cumsum(-1),
    "root": lambda x: x.abs().sqrt(),
    "layer normalization": lambda x: torch.nn.functional.layer_norm(x, (64,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_few_elements_near_a_branch_do_not_stop_the_others(name: str) -> None:
    """Stronger moves take some across the steps of a function, by far more than all others move."""

    def rest(y):
        return y - (y * 256).round() / 256

    def model(x):
        return rest(OPERATORS[name](x))

    x = draw(33, 64, mean=0.0)
    right = OPERATORS[name](x.double()).float()
    other = right * (1 + (torch.rand(right.shape, generator=torch.Generator().manual_seed(1)) > 0.7) * 1.2e-7)
    near_a_step = ((right * 256) % 1 - 0.5).abs() < 0.01
    got = rest(other).where(~near_a_step, model(x))
    result = judged(model, x, got)
    assert result.max_abs > result.atol
    assert result.ok, result
    assert not judged(model, x, got + 2e-5).ok
    # What is near a step is not excused by it.
    wrong = model(x).where(~near_a_step, model(x) + 0.5 / 256)
    assert not judged(model, x, wrong).ok
