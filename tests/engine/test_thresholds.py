"""What a shape decides: comparisons of a capture, sizes on both sides of them, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks import thresholds
from pytest_exportcheck.checks.offered import MOST_RUNS, passing_lists
from pytest_exportcheck.checks.thresholds import decided_otherwise, find_thresholds
from pytest_exportcheck.exporters import guards
from pytest_exportcheck.exporters.base import ExportRequest, dynamic_arguments
from pytest_exportcheck.exporters.guards import CaptureWatch, Comparison, internals_missing
from pytest_exportcheck.exporters.onnx_dynamo import capture
from pytest_exportcheck.exporters.torch_export import TorchExport
from pytest_exportcheck.observe import ExportExample, choose_example
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import Function, infer, make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

CAPTURES = ["oblivious", "plain", "strict", "deferred"]


def watched(
    function: Callable[..., Any], *calls: Sequence[Any], how: str = "oblivious"
) -> tuple[CaptureWatch, Any, ExportExample]:
    """Capture `function` as the exporters do, from the last of `calls`, under a watch."""
    shapes, recorded = infer(function, *[(call, {}) for call in calls])
    with register_flattening_functions():
        example = choose_example(recorded, shapes, lambda arguments: True, prefer=len(calls) - 1)
        dynamic = dynamic_arguments(example.arguments, shapes)
        request = ExportRequest(
            Function(function), example.arguments, dynamic, {}, [], [], [], shapes, {}, stage=nullcontext
        )
        watch = CaptureWatch()
        watch.inputs(example.arguments)
        with watch:
            if how == "oblivious":
                capture(request)
            else:
                exporter = TorchExport()
                exporter.strict = how == "strict"
                options = {"prefer_deferred_runtime_asserts_over_guards": True} if how == "deferred" else {}
                exporter.export(ExportRequest(**{**vars(request), "options": options}))
    return watch, shapes, example


def texts(comparisons: Sequence[Comparison]) -> dict[str, str]:
    return {comparison.text: comparison.place for comparison in comparisons}


def branches(x: Any, y: Any) -> Any:
    if x.shape[1] > 32:
        x = x * 2
    if x.shape[0] % 3 == 0:
        x = x + 1
    if x.shape[1] + y.shape[1] >= 60:
        y = y - 1
    if x.shape[1] // 4 == 6:
        y = y - 2
    return x.sum(1), y.sum(1)


BRANCHES = ((torch.ones(2, 5), torch.ones(7, 3)), (torch.ones(4, 9), torch.ones(5, 13)))


def test_this_torch_can_be_read() -> None:
    """Fails when torch moves the internals that `exporters.guards` reads."""
    assert internals_missing() is None
    watch, shapes, _ = watched(branches, *BRANCHES)
    assert watch.comparisons(shapes)


def test_a_torch_that_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(guards.ShapeEnv, "replacements_slocs", raising=False)
    monkeypatch.setattr(guards, "internals_missing", lambda: "ShapeEnv.nothing of torch 9")
    run = make_run(tmp_path, DOUBLED)
    _, _, record = verdict(run, "onnx-dynamo")
    assert (
        "comparisons of sizes cannot be read: there is no ShapeEnv.nothing of torch 9" in record["warnings"]
    )


@pytest.mark.parametrize("how", CAPTURES)
def test_every_comparison_in_our_symbols_with_the_line_that_asked(how: str) -> None:
    watch, shapes, _ = watched(branches, *BRANCHES, how=how)
    found = texts(watch.comparisons(shapes))
    wanted = {
        "x_dim_1 > 32": "if x.shape[1] > 32:",
        "(x_dim_1 // 4) == 6": "if x.shape[1] // 4 == 6:",
    }
    for text, line in wanted.items():
        assert found[text].endswith(line), found
        assert "tests/engine/test_thresholds.py:" in found[text]
    modulo = next(text for text in found if "%" in text)
    assert modulo in ("(batch % 3) == 0", "(x_dim_0 % 3) == 0")
    assert any(place.endswith("if x.shape[1] + y.shape[1] >= 60:") for place in found.values())


def test_torch_does_not_name_the_hook_as_the_cause_of_a_refusal() -> None:
    def branches(x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(Exception, match="data-dependent") as caught, CaptureWatch():
        torch.export.export(Function(branches), (torch.ones(3),))
    assert "guards.py" not in str(caught.value)
    assert "test_thresholds.py" in str(caught.value)


def test_the_hook_is_gone_afterwards_also_after_an_error() -> None:
    before = guards.ShapeEnv.evaluate_expr

    def fail() -> None:
        with CaptureWatch():
            assert guards.ShapeEnv.evaluate_expr is not before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert guards.ShapeEnv.evaluate_expr is before


def test_a_comparison_that_an_earlier_one_implies_is_seen() -> None:
    """There is no guard for it: `n > 32` was False, so `n > 40` is known."""

    def twice(x: Any) -> Any:
        if x.shape[0] > 32:
            pass
        return x * 2 if x.shape[0] > 40 else x

    watch, shapes, _ = watched(twice, (torch.ones(3),), (torch.ones(5),))
    assert {"x_dim_0 > 32", "x_dim_0 > 40"} <= texts(watch.comparisons(shapes)).keys()


def test_sizes_that_are_one_symbol_to_us_decide_nothing() -> None:
    """Two axes of one size in every call: to torch they are two symbols that it compares."""

    def same(x: Any, y: Any) -> Any:
        return x + y if x.shape[1] == y.shape[1] else x

    watch, shapes, _ = watched(
        same, (torch.ones(3, 4), torch.ones(3, 4)), (torch.ones(5, 7), torch.ones(5, 7))
    )
    assert not [text for text in texts(watch.comparisons(shapes)) if "==" in text and "1" not in text]


def test_nested_arguments_and_caches_have_their_symbols() -> None:
    from transformers import DynamicCache

    def step(items: Any, cache: Any) -> Any:
        length = cache.layers[0].keys.shape[2]
        if length > 20 or items["a"][1].shape[0] > 30:
            return items["a"][1] * 2
        return items["a"][1] + length

    def call(rows: int, past: int) -> Any:
        cache = DynamicCache()
        cache.update(torch.ones(2, 1, past, 4), torch.ones(2, 1, past, 4), 0)
        return ({"a": [None, torch.ones(rows)]}, cache)

    with register_flattening_functions():
        for how in ("oblivious", "strict"):
            watch, shapes, _ = watched(step, call(3, 5), call(4, 7), how=how)
            found = texts(watch.comparisons(shapes))
            assert "past > 20" in found, found
            assert any(text.endswith("> 30") for text in found)


# sizes on both sides


@dataclass(frozen=True)
class Judged(Comparison):
    judge: Callable[[Mapping[str, Any]], Any] = field(default=lambda sizes: None, compare=False)

    def holds(self, sizes: Mapping[str, Any]) -> Any:
        return self.judge(sizes)


def comparison(
    names: Sequence[str], holds: Callable[[Mapping[str, Any]], Any], place: str = "m.py:1: if"
) -> Comparison:
    return Judged("it", tuple(names), place, judge=holds)


def found_for(
    holds: Callable[[Mapping[str, Any]], Any], names: Sequence[str] = ("n",), **more: Any
) -> list[tuple[int, ...]]:
    calls = [(torch.ones(4, 5),), (torch.ones(6, 9),)]
    shapes, recorded = infer(lambda x: x, *[(call, {}) for call in calls])
    rows, columns = shapes.symbols
    renamed = {"n": rows, "m": columns}
    example = choose_example(recorded, shapes, lambda arguments: True, prefer=0)
    each = comparison(
        [renamed[name] for name in names], lambda s: holds({k: s[v] for k, v in renamed.items() if v in s})
    )
    result = find_thresholds([each], shapes, example, list(shapes.sizes.values()))
    if more.get("not_tried"):
        return result.not_tried  # type: ignore[return-value]
    return [(sizes[rows], sizes[columns]) for sizes in result.sizes]


def test_before_at_and_after_a_boundary() -> None:
    assert found_for(lambda s: s["n"] > 32) == [(33, 5), (32, 5), (34, 5)]
    assert found_for(lambda s: s["n"] >= 3) == [(2, 5), (3, 5), (1, 5)]
    assert found_for(lambda s: s["n"] == 32) == [(32, 5), (31, 5), (33, 5)]
    assert found_for(lambda s: s["n"] < 0) == []
    assert found_for(lambda s: s["n"] >= 1) == [(1, 5)], "0 rows are no size that a model is made for"


def test_a_multiple_and_none() -> None:
    for divisor in (2, 3, 4, 7, 50):
        sizes = found_for(lambda s, divisor=divisor: s["n"] % divisor == 0)
        assert {n % divisor == 0 for n, _ in [*sizes, (4, 5)]} == {True, False}
    assert (8, 5) in found_for(lambda s: s["n"] // 8 == 1)


def test_a_size_that_was_observed_or_is_tried_anyway_is_not_tried_again() -> None:
    assert (6, 9) not in found_for(lambda s: s["n"] == 6 and s["m"] == 9, ("n", "m"))
    assert (4, 5) not in found_for(lambda s: s["n"] > 4)


def test_a_relation_is_solved_for_each_symbol() -> None:
    sizes = found_for(lambda s: s["n"] + s["m"] >= 20, ("n", "m"))
    assert {(15, 5), (14, 5), (4, 16), (4, 15)} <= set(sizes)
    assert {(5, 5), (4, 4)} <= set(found_for(lambda s: s["n"] == s["m"], ("n", "m")))


def test_a_relation_without_a_boundary_beside_the_example() -> None:
    """`n + m > 3` holds for every n beside m = 5: the smallest sizes are the base then."""
    assert (2, 1) in found_for(lambda s: s["n"] + s["m"] > 3, ("n", "m"))


def test_what_numpy_cannot_compare_is_compared_one_by_one() -> None:
    assert (33, 5) in found_for(lambda s: min(s["n"], 100) > 32)
    assert (33, 5) in found_for(lambda s: s["n"] > 32 and s["n"] < 99)
    assert (33, 5) in found_for(lambda s: 7 // s["n"] == 0 and s["n"] > 32), "a division by 0 is no answer"


def test_what_is_not_tried_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = found_for(lambda s: s["n"] > 50_000, not_tried=True)
    assert len(lines) == 1
    assert "longer than what is tried; it (m.py:1: if)" in str(lines[0])
    monkeypatch.setattr(thresholds, "_MOST_ELEMENTS", 100)
    assert "inputs too large" in str(found_for(lambda s: s["n"] > 32, not_tried=True)[0])
    monkeypatch.undo()
    monkeypatch.setattr(thresholds, "MAX_SIZES", 2)
    assert found_for(lambda s: s["n"] > 32) == [(33, 5), (32, 5)]
    assert found_for(lambda s: s["n"] > 32, not_tried=True) == []
    monkeypatch.setattr(thresholds, "MAX_SIZES", 0)
    assert "more than 0" in str(found_for(lambda s: s["n"] > 32, not_tried=True)[0])


def test_what_cannot_be_evaluated_is_listed_and_breaks_no_case() -> None:
    for unknown in (lambda s: math.unknown(s["n"]) > 3, lambda s: None):  # type: ignore[attr-defined]
        assert "cannot be evaluated: it" in str(found_for(unknown, not_tried=True)[0])
        assert found_for(unknown) == []


def test_a_condition_is_text_of_sizes_and_of_nothing_else() -> None:
    """It may come from a file."""
    for code, holds in (
        ("_0 > 32", True),
        ("_0 % 8 == 0 and _0 + _1 < 60", True),
        ("math.floor(_0 / 3) == 13", True),
        ("max(_0, _1) < 40", False),
    ):
        assert bool(Comparison("it", ("n", "m"), code=code).holds({"n": 40, "m": 2})) is holds, code
    for code in (
        "",
        "_0 >",
        "print(_0)",
        "().__class__.__base__.__subclasses__()",
        "math.__class__",
        "math.floor.__self__",
        "torch.ops",
        "min.__globals__",
        "[_0 for _0 in (1,)]",
        "(lambda: 1)()",
        "__import__('os')",
        "max(_0, key=_1)",
        "'text'",
    ):
        assert Comparison("it", ("n", "m"), code=code).holds({"n": 40, "m": 2}) is None, code


def test_only_branches_that_are_not_about_0_and_1_explain_a_failure() -> None:
    threshold, ones = comparison(["n"], lambda s: s["n"] > 32), comparison(["n"], lambda s: s["n"] == 1)
    nowhere = comparison(["n"], lambda s: s["n"] > 32, place="")
    assert decided_otherwise([threshold, ones, nowhere], {"n": 5}, {"n": 40}) == [threshold]
    assert decided_otherwise([threshold, ones], {"n": 5}, {"n": 1}) == []


# in a case

DOUBLED = """
    class Net(nn.Module):
        def forward(self, x):
            if x.shape[1] > 32:
                x = x * 2
            return x + 1


    def build_model():
        return Net()


    def calls():
        return [((torch.ones(2, 5),), {}), ((torch.ones(4, 9),), {})]
"""


def test_a_branch_behind_a_size_is_found_without_being_told(tmp_path: Path) -> None:
    stage, error, record = verdict(make_run(tmp_path, DOUBLED), "onnx-dynamo")
    assert stage == "resize"
    text = str(error)
    assert "x_dim_1=33" in text
    assert (
        "captured program refuses these sizes, the conversion drops that: AssertionError: Guard failed"
        in text
    )
    assert "and otherwise here: x_dim_1 > 32 (net.py:8: if x.shape[1] > 32:)" in text.replace(
        str(tmp_path) + "/", ""
    )
    assert record["resize"]["failed"] == "x_dim_0=4, x_dim_1=33"
    assert record["captured"] == {"agrees": 2, "refuses": [], "differs": []}


def test_a_guard_of_an_exported_program_on_a_dynamic_axis_is_a_failure(tmp_path: Path) -> None:
    for exporter in ("torch-export", "torch-export-strict"):
        stage, error, _ = verdict(make_run(tmp_path, DOUBLED), exporter)
        assert stage == "resize"
        assert "the ExportedProgram fails on sizes x_dim_0=4, x_dim_1=33, which eager accepts" in str(error)
        # All that was tried and passes: on this side of the threshold.
        offered = "which there are: resize: {x_dim_0: [1, 2, 3, 4, 9], x_dim_1: [1, 2, 3, 5, 9, 19, 32]} ("
        assert f"if nobody gives such sizes, say in net.yaml {offered}" in "\n".join(error.details)
        assert "Guard failed" in str(error)
        assert "x_dim_1 > 32 (" in str(error)


def test_the_sizes_that_a_refusal_offers_to_list_are_right(tmp_path: Path) -> None:
    _, error, _ = verdict(make_run(tmp_path, DOUBLED), "torch-export")
    (line,) = (line for line in error.details if line.startswith("if nobody gives such sizes"))
    listed = line.partition("resize: ")[2].partition("}")[0] + "}"
    assert verdict(make_run(tmp_path, DOUBLED, f"resize: {listed}"), "torch-export")[:2] == ("pass", None)
    # Wrong numbers go unnoticed: nobody is told how not to see them.
    _, error, _ = verdict(make_run(tmp_path, DOUBLED), "onnx-dynamo")
    assert not [line for line in error.details if "nobody gives" in line]


def test_a_branch_whose_other_side_eager_refuses_is_no_failure(tmp_path: Path) -> None:
    """The longest position of an embedding; what eager refuses is listed."""
    source = DOUBLED.replace("x = x * 2", "raise IndexError('too long')")
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, record = verdict(make_run(tmp_path, source), exporter)
        assert stage == "pass", error
        assert "x_dim_0=4, x_dim_1=33: IndexError: too long" in record["resize"]["refused_by_eager"]
        assert "x_dim_0=4, x_dim_1=32" in record["resize"]["passed"]


def test_nan_is_no_refusal(tmp_path: Path) -> None:
    source = DOUBLED.replace("x = x * 2", "x = x * float('nan')")
    stage, error, record = verdict(make_run(tmp_path, source), "onnx-dynamo")
    assert stage == "resize", error
    assert record["resize"]["refused_by_eager"] == []


def test_a_modulo_and_a_sum_are_found(tmp_path: Path) -> None:
    for condition in ("x.shape[1] % 7 == 0", "x.shape[0] + x.shape[1] >= 40", "x.shape[1] // 4 == 6"):
        stage, error, _ = verdict(
            make_run(tmp_path, DOUBLED.replace("x.shape[1] > 32", condition)), "onnx-dynamo"
        )
        assert stage == "resize", condition
        assert condition in str(error)


def test_a_branch_that_changes_nothing_passes(tmp_path: Path) -> None:
    stage, error, record = verdict(
        make_run(tmp_path, DOUBLED.replace("x = x * 2", "x = x + 0")), "onnx-dynamo"
    )
    assert stage == "pass", error
    assert record["resize"]["thresholds"] == [f"x_dim_0=4, x_dim_1={n}" for n in (33, 32, 34)]


def test_sizes_of_the_spec_replace_all_others_of_their_symbols(tmp_path: Path) -> None:
    run = make_run(tmp_path, DOUBLED, "resize: {x_dim_0: [4, 6], x_dim_1: [7, 30]}\n")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert record["resize"]["passed"] == [
        f"x_dim_0={first}, x_dim_1={second}" for first in (4, 6) for second in (7, 30)
    ]
    # Of the other symbol nothing was said: it is tried as ever.
    run = make_run(tmp_path, DOUBLED, "resize: {x_dim_1: [7, 30]}\n")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    passed = record["resize"]["passed"]
    assert passed[:2] == ["x_dim_0=4, x_dim_1=7", "x_dim_0=4, x_dim_1=30"]
    tried = {tuple(int(part.split("=")[1]) for part in text.split(", ")) for text in passed}
    assert {first for first, _ in tried} == {1, 2, 3, 4, 9}
    assert {second for _, second in tried} <= {7, 9, 30}, "9 is the example's"
    stage, error, record = verdict(make_run(tmp_path, DOUBLED, "resize: off\n"), "onnx-dynamo")
    assert stage == "pass", error
    assert "resize" not in record


def test_a_list_for_one_symbol_hides_no_branch_on_another(tmp_path: Path) -> None:
    source = DOUBLED.replace("x.shape[1] > 32", "x.shape[0] > 20")
    stage, error, record = verdict(make_run(tmp_path, source, "resize: {x_dim_1: [7, 30]}\n"), "onnx-dynamo")
    assert stage == "resize"
    assert record["resize"]["failed"].startswith("x_dim_0=21")
    # The lists of the spec stay in what a refusal offers.
    stage, error, _ = verdict(make_run(tmp_path, source, "resize: {x_dim_1: [7, 30]}\n"), "torch-export")
    assert stage == "resize"
    (line,) = (line for line in error.details if line.startswith("if nobody gives such sizes"))
    assert "x_dim_0: [1, 2, 3, 4, 9, 20], x_dim_1: [5, 7, 9, 30]" in line
    # A size that the spec itself names is no mistake of its list.
    _, error, _ = verdict(make_run(tmp_path, DOUBLED, "resize: {x_dim_1: [40]}\n"), "torch-export")
    assert not [line for line in error.details if "nobody gives" in line]


def test_a_failure_of_an_observed_call_has_the_line_that_decided(tmp_path: Path) -> None:
    """The line of code is in what was watched: no diagnosis is needed for it."""
    source = DOUBLED.replace("if x.shape[1] > 32:", "if int(x.shape[1] * 0.5) > 3:")
    for exporter, expected in (("torch-export", "run"), ("onnx-dynamo", "compare")):
        stage, error, _ = verdict(make_run(tmp_path, source), exporter)
        assert stage == expected, error
        (line,) = {line for line in error.details if "and otherwise here" in line and "0.5*" in line}
        assert "net.py:8: if int(x.shape[1] * 0.5) > 3:" in line
        assert "0.50000" not in line


def test_known_passing_sizes_pass_in_every_combination() -> None:
    asked: list[dict[str, int]] = []

    def passes(sizes: Mapping[str, int]) -> bool:
        asked.append(dict(sizes))
        return sizes["past"] + sizes["seq"] < 12 and sizes["seq"] != 5

    candidates = {"past": [0, 4, 9, 30], "seq": [1, 5, 7, 8]}
    found = passing_lists({"past": 3, "seq": 2}, candidates, passes)
    assert found == {"past": [0, 3, 4, 9], "seq": [1, 2]}
    assert len(asked) == len({tuple(each.items()) for each in asked}) <= MOST_RUNS
    assert passing_lists({"past": 30, "seq": 2}, candidates, passes) == {}
    asked.clear()
    many = {name: list(range(1, 40)) for name in "abc"}
    found = passing_lists(dict.fromkeys("abc", 2), many, lambda sizes: asked.append(dict(sizes)) is None)
    assert len(asked) <= MOST_RUNS
    assert all(len(sizes) >= 3 for sizes in found.values())


def test_a_model_that_remembers_sizes_is_made_anew_for_the_next_case(tmp_path: Path) -> None:
    """Eager runs on longer sequences here; a later exporter must not be told that it changed the model."""
    source = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.longest = 9

        def forward(self, x):
            if not torch.compiler.is_compiling():
                self.longest = max(self.longest, int(x.shape[1]))
            return x * self.longest


    def build_model():
        return Net()


    def calls():
        return [((torch.ones(2, 9),), {}), ((torch.ones(4, 5),), {})]
    """
    run = make_run(tmp_path, source)
    for _ in range(2):
        stage, error, _ = verdict(run, "torch-export")
        assert stage == "resize", error
