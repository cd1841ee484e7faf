"""A comparison of the user's own: what it judges, what stays ours, and what its mistakes are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.checks.compare import LeafComparison, Tolerances, compare_leaves, table
from pytest_exportcheck.checks.own import Own
from pytest_exportcheck.diagnose.diagnosis import subject_of_case
from pytest_exportcheck.errors import ComparisonError
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.registry import EXPORTERS
from pytest_exportcheck.patches.none import NoPatches
from pytest_exportcheck.registry import COMPARISONS, PATCH_MODES

from .helpers import make_run, verdict

Leaves = list[tuple[str, Any]]

# the rule by itself


def own(function: Callable[..., Any], together: bool = False, judges: tuple[str, ...] = ()) -> Own:
    return Own("f.py:own", "net.yaml:4", function, Path(), "compare", together, frozenset(judges))


def results(rule: Own, expected: Leaves, got: Leaves, *others: str) -> list[LeafComparison]:
    where = {path: rule for path, _ in expected if path not in others}
    return compare_leaves(expected, got, Tolerances(), where)


def one(rule: Own, expected: Any, got: Any) -> LeafComparison:
    (result,) = results(rule, [("y", expected)], [("y", got)])
    return result


def same(expected: Any, got: Any, tolerance: Any) -> list[str]:
    return []


def differs(expected: Any, got: Any, tolerance: Any) -> list[str]:
    return ["the first\nreason", "the second"]


def never(expected: Any, got: Any, tolerance: Any) -> list[str]:
    raise AssertionError("asked")


def test_it_decides_on_values_and_nothing_else_does() -> None:
    good = one(own(same), torch.zeros(2, 3), torch.ones(2, 3))
    assert (good.ok, good.by, good.reason, good.shape) == (True, "f.py:own", "", (2, 3))
    bad = one(own(differs), torch.zeros(2, 3), torch.zeros(2, 3))
    assert (bad.ok, bad.by) == (False, "f.py:own")
    assert bad.reason == "the first reason; the second"
    lines = table([good, bad])
    assert lines[1].split() == ["y", "2x3", "float32", "ok", "(by", "f.py:own)"], "no numbers"
    assert lines[2].endswith("FAIL the first reason; the second (by f.py:own)")


def test_long_answers_are_cut() -> None:
    bad = one(own(lambda a, b, tolerance: [f"box {k}" for k in range(9)]), torch.zeros(1), torch.zeros(1))
    assert bad.reason == "box 0; box 1; box 2; box 3; box 4; and 4 more"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "got", "judges", "reason"),
    [
        (torch.zeros(2), torch.zeros(3), "shape", "shape 3 instead of 2"),
        (torch.zeros(2), torch.zeros(2).double(), "dtype", "dtype float64 instead of float32"),
        (torch.zeros(2), torch.tensor([0, NAN]), "nonfinite", "nan instead of 0 in 1 of 2"),
        (torch.tensor([0, NAN]), torch.zeros(2), "nonfinite", "0 instead of nan in 1 of 2"),
        (torch.tensor([0, INF]), torch.tensor([INF, 0]), "nonfinite", "inf instead of 0 in 2 of 2"),
        (torch.tensor([INF]), torch.tensor([-INF]), "nonfinite", "-inf instead of inf in 1 of 1"),
    ],
)  # fmt: skip
def test_shape_dtype_and_what_is_not_finite_stay_ours(
    expected: torch.Tensor, got: torch.Tensor, judges: str, reason: str
) -> None:
    result = one(own(never), expected, got)
    assert (result.ok, result.reason, result.by) == (False, reason, "")
    others = tuple({"shape", "dtype", "nonfinite"} - {judges})
    assert not one(own(never, judges=others), expected, got).ok
    assert one(own(same, judges=(judges,)), expected, got).ok
    assert one(own(differs, judges=(judges,)), expected, got).reason.startswith("the first")


def test_nan_among_more_rows_than_eager_has() -> None:
    rule = own(same, judges=("shape",))
    assert one(rule, torch.zeros(2), torch.zeros(3)).ok
    bad = one(rule, torch.zeros(2), torch.tensor([0, NAN, -INF]))
    assert (bad.ok, bad.reason) == (False, "holds -inf, nan, eager's finite values only")
    assert one(rule, torch.tensor([NAN, 1]), torch.tensor([1, 1, NAN])).ok
    assert not one(rule, torch.tensor([NAN, 1]), torch.tensor([1.0, 1, 1])).ok


def test_outputs_that_are_missing_new_or_unreadable_stay_ours() -> None:
    rule = own(never, judges=("shape", "dtype", "nonfinite"))
    (missing,) = results(rule, [("y", torch.zeros(1))], [])
    assert "missing" in missing.reason
    found = results(rule, [("n", None)], [("n", None), ("z", torch.zeros(1))])
    assert [(each.ok, each.path) for each in found] == [(True, "n"), (False, "z")]
    assert "sparse" in one(rule, torch.eye(2), torch.eye(2).to_sparse()).reason
    assert not one(rule, torch.zeros(1), None).ok
    assert not one(rule, None, torch.zeros(1)).ok
    assert not one(rule, "a", "b").ok, "text is no number"


def test_python_numbers_are_judged_and_their_types_stay_ours() -> None:
    asked: list[tuple[Any, Any]] = []

    def note(expected: Any, got: Any, tolerance: Any) -> list[str]:
        asked.append((expected, got))
        return []

    assert one(own(note), 3, torch.tensor(4)).by == "f.py:own"
    assert one(own(note), 2.5, 2.75).ok
    assert asked == [(3, 4), (2.5, 2.75)]
    assert not one(own(never), 1, 1.0).ok
    assert not one(own(never), True, 1).ok
    assert not one(own(never), 1.5, NAN).ok
    assert one(own(same, judges=("dtype",)), 1, 2.5).ok


def test_without_elements_it_is_not_asked_unless_it_judges_shapes() -> None:
    assert one(own(never), torch.zeros(0, 3), torch.zeros(0, 3)).ok
    rule = own(lambda a, b, tolerance: [] if len(a) == len(b) else ["other"], judges=("shape",))
    assert one(rule, torch.zeros(0, 3), torch.zeros(1, 3)).reason == "other"


def test_what_it_does_to_its_arguments_stays_with_it() -> None:
    expected, got = torch.zeros(2), torch.ones(2)

    def spoil(a: torch.Tensor, b: torch.Tensor, tolerance: Any) -> list[str]:
        assert not torch.is_grad_enabled()
        a.add_(1)
        b.zero_()
        return []

    assert one(own(spoil), expected, got).ok
    assert (expected.tolist(), got.tolist()) == ([0, 0], [1, 1])


def test_the_tolerance_is_that_of_the_output() -> None:
    seen: list[Any] = []
    rule = own(lambda a, b, tolerance: seen.append(tolerance) or [])
    tolerances = Tolerances(outputs={"y": {"atol": 0.5, "rtol": None}})
    expected = [("y", torch.ones(1)), ("z", torch.full((1,), 100.0))]
    compare_leaves(expected, expected, tolerances, {"y": rule, "z": rule})
    assert [round(each.atol, 6) for each in seen] == [0.5, 1e-3]
    assert [each.rtol for each in seen] == [1e-4, 1e-4]


# several outputs at once


def test_outputs_of_a_pattern_at_once() -> None:
    seen: list[Any] = []

    def rows(expected: Any, got: Any, tolerance: Any) -> list[str]:
        seen.append((list(expected), list(got), list(tolerance)))
        return ["rows differ"] if expected["b"][0] != got["b"][0] else []

    rule = own(rows, together=True)
    expected = [("a", torch.zeros(2)), ("other", torch.zeros(1)), ("b", torch.zeros(2))]
    found = results(rule, expected, expected, "other")
    assert [(each.path, each.ok, each.by) for each in found] == [
        ("a", True, "f.py:own"), ("other", True, ""), ("b", True, "f.py:own")]  # fmt: skip
    assert seen == [(["a", "b"],) * 3], "asked once"
    found = results(rule, expected, [*expected[:2], ("b", torch.ones(2))], "other")
    assert [each.ok for each in found] == [False, True, False]
    assert [each.reason for each in found] == ["rows differ", "", "judged with a"]


def test_one_that_fails_before_takes_the_others_along() -> None:
    rule = own(never, together=True)
    expected = [("a", torch.zeros(2)), ("b", torch.zeros(2))]
    for got, failed in (
        ([("b", torch.zeros(2))], "a"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3))], "b"),
    ):
        found = {each.path: each for each in results(rule, expected, got)}
        (other,) = {"a", "b"} - {failed}
        assert not found[failed].ok
        assert (found[other].ok, found[other].reason) == (False, f"not judged: {failed} fails")


def test_two_outputs_of_one_path_are_not_told_apart() -> None:
    leaves = [("1", torch.zeros(2)), ("1", torch.zeros(2))]
    found = results(own(never, together=True), leaves, leaves)
    assert [each.ok for each in found] == [False, False]
    assert all(each.ok for each in results(own(same), leaves, leaves))


# what is wrong with the comparison


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"), (True, "bool"), (False, "bool"), ("", "str"), ("all differ", "str"), (0, "int"),
        ([1], "list of int"), ([None], "list of NoneType"), ({}, "dict"), ((x for x in ()), "generator"),
        (torch.tensor(True), "Tensor"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_sentences_is_no_answer(returned: Any, kind: str) -> None:
    with pytest.raises(ComparisonError) as caught:
        one(own(lambda a, b, tolerance: returned), torch.zeros(1), torch.zeros(1))
    assert caught.value.stage == "compare"
    assert caught.value.message.startswith("net.yaml:4: comparison f.py:own on y: it returned ")
    assert caught.value.message.endswith(f"(a {kind})")
    assert "a list of sentences" in caught.value.details[0]


def _raises() -> None:
    raise ValueError("no boxes")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (_raises, "it raised ValueError: no boxes"),
        (lambda: sys.exit(0), "it raised SystemExit: 0"),
        (lambda: pytest.skip("not today"), "it raised Skipped: not today"),
        (lambda: pytest.xfail("known"), "it raised XFailed: known"),
    ],
    ids=["raises", "exits", "skips", "xfails"],
)
def test_what_it_raises_is_never_a_pass_nor_a_skip(act: Callable[[], None], said: str) -> None:
    with pytest.raises(ComparisonError) as caught:
        one(own(lambda a, b, tolerance: act() or []), torch.zeros(1), torch.zeros(1))
    assert caught.value.message == f"net.yaml:4: comparison f.py:own on y: {said}"
    assert any("test_own_comparison.py" in line for line in caught.value.details), "its place"


def test_an_interrupt_passes() -> None:
    def interrupted(*_: Any) -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one(own(interrupted), torch.zeros(1), torch.zeros(1))


# real cases

NET = """
class Rows(nn.Module):
    def forward(self, x):
        keep = x[:, :4]
        return {"boxes": keep, "scores": keep.sum(-1), "mean": x.mean()}


def build_model():
    return Rows()


def calls():
    g = torch.Generator().manual_seed(2)
    return [((torch.randn(n, 6, generator=g),), {}) for n in (3, 5)]


# comparisons


def any_order(expected, got, tolerance):
    "Rows in any order."
    a, b = (side[side[:, 0].argsort()] for side in (expected, got))
    worst = (a - b).abs().max().item()
    return [f"rows differ by {worst:.2g}"] if worst > tolerance.atol else []


class Detections:
    together = True

    def __call__(self, expected, got, tolerance):
        order = [side["boxes"][:, 0].argsort() for side in (expected, got)]
        return [
            f"{path} of the same detections differ"
            for path in expected
            if not torch.allclose(expected[path][order[0]], got[path][order[1]], atol=tolerance[path].atol)
        ]


def exact(expected, got, tolerance):
    return [] if torch.equal(expected, got) else ["not bit for bit the same"]


def broken(expected, got, tolerance):
    return expected.no_such_attribute


def only_first(expected, got, tolerance):
    if len(expected) not in (3, 5):
        raise RuntimeError("another number of rows")
    return []


def misjudging(expected, got, tolerance):
    return []


misjudging.judges = ("shapes",)
value = 3
"""


class Turned:
    """The model itself, its rows turned round; `change` is done to its outputs as well."""

    name = "turned"

    def __init__(self) -> None:
        self.change: Callable[[dict[str, torch.Tensor]], None] = lambda out: None

    def export(self, request: ExportRequest) -> Exported:
        forward = request.model.forward

        def program(**kwargs: Any) -> Any:
            out = forward(**kwargs)
            out = {**out, "boxes": out["boxes"].flip(0), "scores": out["scores"].flip(0)}
            self.change(out)
            return out

        return Exported(program)


@pytest.fixture
def turned() -> Iterator[Turned]:
    exporter = Turned()
    EXPORTERS.register("turned", exporter)
    yield exporter
    EXPORTERS.unregister("turned")


SEVERAL = "compare: {boxes: {by: 'net.py:Detections'}, scores: {by: 'net.py:Detections'}}\n"
ONE_RULE = "compare: {'[bs]*': {by: 'net.py:Detections'}}\n"
ALONE = "compare: {boxes: {by: 'net.py:any_order'}}\n"


def test_rows_in_any_order(tmp_path: Path, turned: Turned) -> None:
    stage, error, _ = verdict(make_run(tmp_path, NET), "turned")
    assert stage == "compare"
    run = make_run(tmp_path, NET, ONE_RULE)
    stage, error, record = verdict(run, "turned")
    assert stage == "pass", error
    assert {row["path"]: row["by"] for row in record["outputs"]} == {
        "boxes": "net.py:Detections", "scores": "net.py:Detections", "mean": ""}  # fmt: skip
    assert record["resize"]["passed"], "other sizes were judged by it too"

    turned.change = lambda out: out.update(scores=out["scores"] + 1)
    stage, error, record = verdict(run, "turned")
    assert stage == "compare"
    assert "FAIL scores of the same detections differ (by net.py:Detections)" in str(error)
    assert [row["path"] for row in record["outputs"] if not row["ok"]] == ["boxes", "scores"]

    turned.change = lambda out: out.update(mean=out["mean"] + 1)
    stage, error, record = verdict(run, "turned")
    assert stage == "compare", "what it is not named for is compared as ever"
    assert [row["path"] for row in record["outputs"] if not row["ok"]] == ["mean"]


def test_a_rule_for_one_output_leaves_the_others(tmp_path: Path, turned: Turned) -> None:
    run = make_run(tmp_path, NET, ALONE)
    stage, _, record = verdict(run, "turned")
    assert stage == "compare"
    assert [row["path"] for row in record["outputs"] if not row["ok"]] == ["scores"]
    # Two rules are two groups: Detections needs the boxes beside the scores.
    stage, error, _ = verdict(make_run(tmp_path, NET, SEVERAL, name="two"), "turned")
    assert isinstance(error, ComparisonError)


def test_wrong_at_another_size_only(tmp_path: Path, turned: Turned) -> None:
    def change(out: dict[str, torch.Tensor]) -> None:
        if len(out["boxes"]) not in (3, 5):
            out["boxes"] = out["boxes"] + 1

    turned.change = change
    stage, error, _ = verdict(make_run(tmp_path, NET, ONE_RULE), "turned")
    assert stage == "resize"
    assert "boxes of the same detections differ (by net.py:Detections)" in str(error)
    strict = "compare: {boxes: {by: 'net.py:only_first'}, scores: {by: 'net.py:only_first'}}\n"
    stage, error, _ = verdict(make_run(tmp_path, NET, strict), "turned")
    assert (stage, type(error)) == ("resize", ComparisonError)
    assert "RuntimeError: another number of rows" in str(error)


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_real_exporters(tmp_path: Path, exporter: str) -> None:
    stage, error, record = verdict(make_run(tmp_path, NET, ONE_RULE), exporter)
    assert stage == "pass", error
    assert {row["by"] for row in record["outputs"]} == {"net.py:Detections", ""}


def test_a_captured_program_is_judged_by_it(tmp_path: Path) -> None:
    """Wrong answers of it are those of the capture, and an exception is no refusal of the program."""
    source = NET + "\n\ndef never(a, b, tolerance):\n    return ['no']\n"
    run = make_run(tmp_path, source, "compare: {boxes: {by: 'net.py:never'}}\n")
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "export"
    assert "the captured program already differs from eager" in str(error)
    assert "FAIL no (by net.py:never)" in str(error)
    run = make_run(tmp_path, NET, "compare: {boxes: {by: 'net.py:broken'}}\n", name="net")
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert (stage, type(error)) == ("export", ComparisonError)
    assert "net.yaml:4: comparison net.py:broken on boxes: it raised AttributeError" in str(error)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("net.py:no_such", "cannot be loaded: net.py has no 'no_such'"),
        ("nott.py:any_order", "there is no file nott.py next to the spec (did you mean 'net.py'?)"),
        ("no_such_package.mod:f", "cannot import no_such_package.mod"),
        ("iou", "cannot be loaded: unknown comparison 'iou'; known: "),
        ("net.py:value", "is a int, no function of (expected, got, tolerance)"),
        ("net.py:Rows", "on boxes"),
        ("net.py:misjudging", "says judges = ('shapes',); known: shape, dtype, nonfinite"),
    ],
)
def test_a_comparison_that_cannot_be_had(tmp_path: Path, by: str, message: str) -> None:
    run = make_run(tmp_path, NET, f"compare: {{boxes: {{by: '{by}'}}}}\n")
    stage, error, _ = verdict(run, "torch-export")
    assert isinstance(error, ComparisonError)
    assert stage == ("compare" if by == "net.py:Rows" else "load")
    assert f"net.yaml:4: comparison {by} " in error.message
    assert message in error.message


def test_a_registered_one(tmp_path: Path, turned: Turned) -> None:
    COMPARISONS.register("nothing-matters", same)
    try:
        run = make_run(
            tmp_path, NET, "compare: {boxes: {by: nothing-matters}, scores: {by: nothing-matters}}\n"
        )
        stage, error, record = verdict(run, "turned")
    finally:
        COMPARISONS.unregister("nothing-matters")
    assert stage == "pass", error
    assert [row["by"] for row in record["outputs"]] == ["nothing-matters", "nothing-matters", ""]


class TurningMode(NoPatches):
    """Eager with its rows turned round, which is one of its right answers."""

    name = "turning"

    @contextlib.contextmanager
    def apply(self, model: torch.nn.Module, target: str) -> Iterator[None]:
        kind = type(model)
        plain = kind.forward

        def forward(self: Any, x: torch.Tensor) -> Any:
            out = plain(self, x)
            return {**out, "boxes": out["boxes"].flip(0), "scores": out["scores"].flip(0)}

        kind.forward = forward
        try:
            yield
        finally:
            kind.forward = plain


@pytest.fixture
def turning() -> Iterator[str]:
    PATCH_MODES.register("turning", TurningMode)
    yield "turning"
    PATCH_MODES.unregister("turning")


def test_patched_eager_is_judged_by_it(tmp_path: Path, turning: str) -> None:
    stage, error, _ = verdict(make_run(tmp_path, NET), "torch-export", turning)
    assert stage == "patch", "without a rule its rows are others"
    run = make_run(tmp_path, NET, ONE_RULE)
    stage, error, _ = verdict(run, "torch-export", turning)
    assert stage == "pass", error
    strict = "compare: {boxes: {by: 'net.py:exact'}, scores: {by: 'net.py:exact'}}\n"
    stage, error, _ = verdict(make_run(tmp_path, NET, strict), "torch-export", turning)
    assert stage == "patch", "the patch is to blame, and not the exporter"
    assert "not bit for bit the same (by net.py:exact)" in str(error)
    stage, error, _ = verdict(
        make_run(tmp_path, NET, "compare: {boxes: {by: 'net.py:broken'}}\n"), "torch-export", turning
    )
    assert (stage, type(error)) == ("patch", ComparisonError)


def test_a_diagnosis_judges_by_it(tmp_path: Path, turned: Turned) -> None:
    run = make_run(tmp_path, NET, ONE_RULE)
    subject = subject_of_case(run, CaseId(run.spec.relative, "turned", "none", "cpu", "float32", None))
    with subject.active():
        samples = list(subject.samples())
        assert len(samples) > 2, "other sizes too"
        for sample in samples:
            turned_round = [(path, leaf.flip(0) if leaf.dim() else leaf) for path, leaf in sample.expected]
            found = sample.compare(turned_round, subject.tolerances)
            assert all(result.ok for result in found)
            assert [result.by for result in found] == ["net.py:Detections", "net.py:Detections", ""]


def test_eager_against_itself_is_not_its_matter(tmp_path: Path) -> None:
    """A comparison says how a program may answer; eager that disagrees with itself is no program."""
    source = NET.replace("keep = x[:, :4]", "keep = x[:, :4] + torch.rand(1)")
    stage, error, _ = verdict(
        make_run(
            tmp_path,
            source + "\n\ndef fine(a, b, t):\n    return []\n",
            "compare: {'*': {by: 'net.py:fine'}}\n",
        ),
        "torch-export",
    )
    assert stage == "observe"
    assert "eager disagrees with itself" in str(error)
