"""Indices that may differ where scores are equal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from pytest_exportcheck.checks.choices import offer_ties
from pytest_exportcheck.checks.compare import LeafComparison, Tolerances, compare_leaf
from pytest_exportcheck.checks.padding import where_masks
from pytest_exportcheck.checks.ties import Ties
from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.registry import EXPORTERS
from pytest_exportcheck.runtimes.choices import Choice, chosen_outputs

from .helpers import make_run, verdict

SCORES = torch.tensor([[3.0, 1.0, 3.0, 2.0, -torch.inf], [0.5, 0.5, 0.5, 0.1, -torch.inf]])
TOP = torch.tensor([[0, 2, 3], [0, 1, 2]])


def compared(got: Any, expected: torch.Tensor = TOP, ties: Ties | None = None) -> LeafComparison:
    return compare_leaf("ids", expected, torch.as_tensor(got), Tolerances(), ties or Ties("scores", SCORES))


@pytest.mark.parametrize(
    "got", [[[0, 2, 3], [0, 1, 2]], [[2, 0, 3], [0, 1, 2]], [[0, 2, 3], [2, 0, 1]]], ids=str
)
def test_equal_scores_come_in_any_order(got: Any) -> None:
    result = compared(got)
    assert result.ok
    assert bool(result.note) is (got != TOP.tolist())
    assert not compare_leaf("ids", TOP, torch.tensor([[2, 0, 3], [0, 1, 2]]), Tolerances()).ok


@pytest.mark.parametrize(
    ("got", "reason", "at"),
    [
        ([[0, 1, 3], [0, 1, 2]], "index 1 instead of 2 selects 1 instead of 3 from scores", (0, 1)),
        ([[0, 2, 4], [0, 1, 2]], "index 4 instead of 3 selects -inf instead of 2 from scores", (0, 2)),
        ([[0, 2, 3], [0, 0, 2]], "index 0 is there twice", (1, 1)),
        ([[0, 2, 3], [0, 1, 5]], "index 5 is out of range, scores has 5", (1, 2)),
        ([[0, 2, 3], [0, 1, -1]], "index -1 is out of range, scores has 5", (1, 2)),
        ([[0, 2], [0, 1]], "shape 2x2 instead of 2x3", ()),
    ],
)
def test_what_stays_a_failure(got: Any, reason: str, at: tuple[int, ...]) -> None:
    result = compared(got)
    assert not result.ok
    assert (result.reason, result.at) == (reason, at)


def test_scores_within_the_tolerance_are_a_tie() -> None:
    """A rounding error may turn the order of two scores round; a real difference may not."""
    ties = Ties("scores", torch.tensor([1.0, 1.0 + 1e-6, 0.9]))
    assert compared([0, 1], torch.tensor([1, 0]), ties).ok
    assert not compared([2, 1], torch.tensor([1, 2]), Ties("scores", torch.tensor([0.9, 1.0, 1.001]))).ok


def test_the_tolerance_is_that_of_all_scores() -> None:
    """Selected ones may be small by accident: rounding is not."""
    scores = torch.cat([torch.full((8,), 1.0), torch.tensor([2e-3, 2.004e-3])])
    assert compared([8], torch.tensor([9]), Ties("scores", scores)).ok


@pytest.mark.parametrize(
    ("expected", "got", "axis"),
    [
        (torch.tensor([0, 0]), [2, 1], None),  # argmax(-1)
        (torch.tensor([[0], [0]]), [[2], [1]], None),  # keepdim
        (torch.tensor(0), 2, None),  # argmax() of everything
        (torch.tensor([[0, 0, 0, 0, 0]]), [[0, 0, 0, 0, 1]], 0),
        (torch.tensor([0, 0, 0, 0, 0]), [0, 0, 0, 0, 1], -2),
    ],
)
def test_forms_of_indices(expected: torch.Tensor, got: Any, axis: int | None) -> None:
    ties = Ties("scores", SCORES, axis)
    assert not ties.misfit(expected)
    assert compared(got, expected, ties).ok
    other = torch.as_tensor(got).clone()
    other.view(-1)[0] = 1
    assert not compared(other, expected, ties).ok


def test_indices_that_eager_repeats_may_be_repeated() -> None:
    expected = torch.tensor([[0, 0, 3], [0, 1, 2]])
    assert compared([[2, 2, 3], [0, 1, 2]], expected).ok
    assert not compared([[2, 2, 3], [0, 0, 2]], expected).ok


def rule(ties: str, axis: int | None = None) -> Any:
    return {"ids": SimpleNamespace(where=None, ties=ties, axis=axis)}


@pytest.mark.parametrize(
    ("rules", "ids", "message"),
    [
        (rule("score"), TOP, r"compare\.ids: ties: no output or input tensor is called 'score' "
         r"\(did you mean 'scores'\?\)"),
        (rule("n"), TOP, "no output or input tensor is called 'n'"),
        (rule("scores", 0), TOP, r"ids \[2, 3\] does not index scores \[2, 5\] along axis 0"),
        (rule("scores", 2), TOP, r"does not index scores \[2, 5\] along axis 2"),
        (rule("scores"), TOP[:1], r"ids \[1, 3\] does not index scores \[2, 5\] along its last axis"),
        (rule("scores"), TOP + 3, r"holds 3 to 6: no indices into its last axis of scores \[2, 5\]"),
        (rule("scores"), TOP.float(), "is float32, no tensor of indices"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit(rules: Any, ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ObserveError, match=message):
        where_masks(rules, {"x": torch.zeros(2)}, [("scores", SCORES), ("ids", ids), ("n", 3)])


def test_scores_may_be_an_input() -> None:
    found = where_masks(rule("x"), {"x": SCORES}, [("ids", TOP)])
    ties = found["ids"]
    assert isinstance(ties, Ties)
    assert ties.scores.equal(SCORES)


# a real model

TOPK = """
class Top(nn.Module):
    def forward(self, x, mask):
        scores = (x / 2).round().masked_fill(mask == 0, float("-inf"))
        values, indices = scores.topk(6)
        return {"scores": scores, "values": values, "indices": indices}


def build_model():
    return Top()


def calls():
    g = torch.Generator().manual_seed(2)
    made = []
    for batch, length in ((2, 9), (3, 12)):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[:, length - 4 :] = 0
        made.append(((torch.randn(batch, length, generator=g), mask), {}))
    return made
"""


class Turned:
    """The model itself, its ties turned round: what a runtime with another order of equal scores does."""

    name = "turned"

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def export(self, request: ExportRequest) -> Exported:
        model = request.model
        forward = model.forward  # the one of the request

        def program(**kwargs: Any) -> Any:
            out = forward(**kwargs)
            scores = out["scores"]
            last = scores.shape[1] - 1
            indices = last - scores.flip(1).topk(6).indices
            if self.wrong:
                indices[0, 0] = scores[0].argmin()
            return {**out, "indices": indices}

        return Exported(program)


@pytest.fixture
def turned() -> Any:
    exporter = Turned()
    EXPORTERS.register("turned", exporter)
    yield exporter
    EXPORTERS.unregister("turned")


def test_a_top_k_over_ties_with_a_masked_tail(tmp_path: Path, turned: Turned) -> None:
    stage, error, _ = verdict(make_run(tmp_path, TOPK, name="plain"), "turned")
    assert stage == "compare", "the order of equal scores is another one"
    assert "instead of" in str(error)
    run = make_run(tmp_path, TOPK, "compare: {indices: {ties: scores}}\n")
    stage, error, record = verdict(run, "turned")
    assert stage == "pass", error
    row = next(row for row in record["outputs"] if row["path"] == "indices")
    assert "other indices, compared by what they select from scores" in row["note"]
    turned.wrong = True
    stage, error, _ = verdict(run, "turned")
    assert stage == "compare"
    assert "-inf" in str(error)
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(run, exporter)
        assert stage == "pass", error


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("compare: {indicse: {ties: scores}}", "net.yaml:4: no output of any call is called 'indicse' "
         "(did you mean 'indices'?)"),
        ("compare: {indices: {ties: score}}", "no output or input tensor is called 'score'"),
        ("compare: {scores: {where: maks}}", "net.yaml:4: no call has an input 'maks' (did you mean 'mask'"),
        ("tolerance: {outputs: {score: {atol: 1.0}}}", "net.yaml:4: no output of any call is called 'score'"),
    ],
)  # fmt: skip
def test_a_rule_about_nothing_is_a_mistake_in_the_spec(tmp_path: Path, extra: str, message: str) -> None:
    stage, error, _ = verdict(make_run(tmp_path, TOPK, extra + "\n"), "torch-export")
    assert stage == "observe"
    assert message in str(error)


# the offer

_OFFER = "compare: {indices: {ties: scores}}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", ["onnx-dynamo", "onnx-torchscript"])
def test_indices_that_select_equal_values_are_offered_their_rule(tmp_path: Path, exporter: str) -> None:
    """ONNX Runtime orders equal scores otherwise than torch."""
    stage, error, _ = verdict(make_run(tmp_path, TOPK, "resize: off\n", name="top"), exporter)
    assert stage == "compare"
    (line,) = (line for line in error.details if "ties" in line)
    assert line.startswith("indices are the indices of a top-k or a sort of scores, and select equal values")
    assert line.endswith(_OFFER)
    # What is offered is right, and once it is there nothing is offered.
    stage, error, _ = verdict(make_run(tmp_path, TOPK, _OFFER + "\n", name="ruled"), exporter)
    assert stage == "pass", error
    # Of values that are no output nothing is known: a person has to return them.
    hidden = TOPK.replace('"scores": scores, ', "")
    stage, error, _ = verdict(make_run(tmp_path, hidden, "resize: off\n", name="hidden"), exporter)
    assert stage == "compare"
    assert any(
        "values that are no output" in line and "return the values too" in line for line in error.details
    )


@pytest.mark.filterwarnings("ignore")
def test_wrong_indices_and_other_integers_are_offered_nothing(tmp_path: Path) -> None:
    other = "(indices if torch.onnx.is_in_onnx_export() else indices.flip(1))"
    wrong = TOPK.replace('"indices": indices', f'"indices": {other}')
    counted = TOPK.replace(
        '"indices": indices', f'"indices": {other.replace("indices", "(scores > 0).long()")}'
    )
    for name, source in (("wrong", wrong), ("counted", counted)):
        stage, error, _ = verdict(make_run(tmp_path, source, "resize: off\n", name=name), "onnx-torchscript")
        assert stage == "compare", name
        assert not [line for line in error.details if "ties" in line], name


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("ArgMax", "x", "y")], Choice("ArgMax", "x")),
        ([("ArgMin", "x", "a"), ("Cast", "a", "b"), ("Squeeze", "b", "y")], Choice("ArgMin", "x")),
        ([("Exp", "x", "s"), ("TopK", "s k", "v a"), ("Slice", "a", "y")], Choice("TopK", "")),
        ([("Exp", "x", "s"), ("Identity", "s", "z"), ("TopK", "s k", "v y")], Choice("TopK", "z")),
        ([("TopK", "x k", "y i")], None),
        ([("ArgMax", "x", "a"), ("Add", "a a", "y")], None),
        ([("NonZero", "x", "y")], None),
        ([("Identity", "x", "y")], None),
    ],
)
def test_chosen_indices_are_known_by_the_graph(
    nodes: list[tuple[str, str, str]], expected: Choice | None
) -> None:
    made = [onnx.helper.make_node(kind, given.split(), out.split()) for kind, given, out in nodes]
    info = [onnx.helper.make_tensor_value_info(name, 1, None) for name in "xyz"]
    has_z = any(out == "z" for _, _, out in nodes)
    graph = onnx.helper.make_graph(made, "g", info[:1], info[1 : 2 + has_z])
    assert chosen_outputs(graph).get("y") == expected


@pytest.mark.parametrize(("axis", "rule"), [(1, "{ties: s}"), (0, "{ties: s, axis: 0}")])
def test_the_offer_has_the_axis_that_is_not_the_last(axis: int, rule: str) -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
    expected = scores.argmax(axis)
    got = (scores.shape[axis] - 1 - scores.flip(axis).argmax(axis)).clone()
    pairs = [[("s", scores), ("i", indices)] for indices in (expected, got)]
    session: Any = SimpleNamespace(choices={"i": Choice("ArgMax", "s")})
    results = [compare_leaf("i", expected, got, Tolerances())]
    (line,) = offer_ties(session, results, *pairs, {}, Tolerances())
    assert line.endswith(f"compare: {{i: {rule}}}")
    assert offer_ties(session, results, *pairs, {}, Tolerances(), {"i"}) == []
    lower = [pairs[0], [("s", scores), ("i", scores.argmin(axis))]]
    assert offer_ties(session, results, *lower, {}, Tolerances()) == []
