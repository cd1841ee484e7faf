"""Relations between sizes that two calls show: said, tried where they do not hold, left alone where real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck import make_dynamic_cache
from pytest_exportcheck.observe import choose_example
from pytest_exportcheck.observe.relations import broken_sizes, refused_by_eager, without
from pytest_exportcheck.observe.resize import other_sizes, resize_arguments
from pytest_exportcheck.pipeline import SpecRun

from .helpers import infer, make_run, rows, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

TWO = [(2, 3, 5), (3, 4, 7)]
THREE = [*TWO, (2, 6, 8)]


def run_of(tmp_path: Path, *lines: str, sizes: list[tuple[int, int, int]] = TWO, extra: str = "") -> SpecRun:
    body = "".join(f"        {line}\n" for line in lines)
    return make_run(
        tmp_path,
        f"""
class Net(nn.Module):
    def forward(self, x, y, z):
{body}

def build_model():
    return Net()


def calls():
    g = torch.Generator().manual_seed(1)
    return [(tuple(torch.randn(n, 4, generator=g) for n in sizes), {{}}) for sizes in {sizes}]
""",
        extra,
    )


NOTE = (
    "axis 0 of z is taken for x_dim_0 + y_dim_0, which rests on two calls (5 = 2 + 3, 7 = 3 + 4): a third "
    "call with other sizes would settle it, or dims that say `x_dim_0 + y_dim_0` in the spec's calls"
)

BRANCHES = {
    "equal": ("if z.shape[0] == x.shape[0] + y.shape[0]:", "z_dim_0 == (x_dim_0 + y_dim_0)"),
    "larger": ("if z.shape[0] > x.shape[0] + y.shape[0]:", "z_dim_0 > x_dim_0 + y_dim_0"),
    "far": ("if z.shape[0] > x.shape[0] + y.shape[0] + 20:", "z_dim_0"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_relation_of_two_calls(tmp_path: Path, name: str) -> None:
    condition, decided = BRANCHES[name]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()")
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize", record["resize"]
    assert "(z_dim_0 is not x_dim_0 + y_dim_0)" in error.message
    assert f"decided where it holds, and otherwise here: {decided}" in str(error)
    assert NOTE in str(error)
    assert "z_dim_0 is not" in record["resize"]["failed"]
    assert record["warnings"] == [NOTE]


def test_a_program_that_refuses_the_sizes_is_no_failure(tmp_path: Path) -> None:
    """The golden calls the axis a sum: a guard that says so is right."""
    run = run_of(
        tmp_path,
        "if z.shape[0] > x.shape[0] + y.shape[0]:",
        "    return z + x.sum()",
        "return z * 2 + y.sum()",
    )
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    listed = record["resize"]["relations"]
    assert any(
        "the ExportedProgram fails on them: AssertionError: Guard failed: z.size()" in s for s in listed
    )
    assert any(line.endswith("z_dim_0=6 (z_dim_0 is not x_dim_0 + y_dim_0): agrees") for line in listed)


def test_chance_is_said_and_passes_where_nothing_depends_on_it(tmp_path: Path) -> None:
    stage, error, record = verdict(run_of(tmp_path, "return x * 2, y * 3, z * 4"), "onnx-dynamo")
    assert stage == "pass", error
    assert record["warnings"] == [NOTE]
    assert record["resize"]["relations"] == [
        f"x_dim_0=3, y_dim_0=4, z_dim_0={n} (z_dim_0 is not x_dim_0 + y_dim_0): agrees" for n in (8, 6, 15)
    ]


def test_a_relation_that_eager_wants_is_none_of_chance(tmp_path: Path) -> None:
    stage, error, record = verdict(run_of(tmp_path, "return torch.cat([x, y]) * z"), "onnx-dynamo")
    assert stage == "pass", error
    assert record["warnings"] == []
    assert record["resize"]["relations"] == []


@pytest.mark.parametrize("extra", ["resize: off\n", "resize: {x_dim_0: [2, 9]}\n"])
def test_sizes_of_the_spec_are_those_and_no_others(tmp_path: Path, extra: str) -> None:
    condition, _ = BRANCHES["equal"]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", extra=extra)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert record["warnings"] == [NOTE]


def test_three_calls_settle_it(tmp_path: Path) -> None:
    condition, _ = BRANCHES["equal"]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", sizes=THREE)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert record["warnings"] == []


def test_a_third_call_that_breaks_it_unties_the_axis(tmp_path: Path) -> None:
    condition, _ = BRANCHES["equal"]
    sizes = [*TWO, (2, 3, 9)]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", sizes=sizes)
    stage, _, record = verdict(run, "onnx-dynamo")
    assert stage == "compare"
    assert record["warnings"] == []


def test_dims_of_the_spec_settle_it(tmp_path: Path) -> None:
    condition, _ = BRANCHES["equal"]
    run = run_of(
        tmp_path,
        condition,
        "    return z + x.sum()",
        "return z * 2 + y.sum()",
        extra="""
        observe:
          dims: [a, b]
          calls:
            - forward: {x: "float32[a, 4]", y: "float32[b, 4]", z: "float32[a + b, 4]"}
              dims: {a: 2, b: 3}
            - forward: {x: "float32[a, 4]", y: "float32[b, 4]", z: "float32[a + b, 4]"}
              dims: {a: 3, b: 4}
        """,
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert record["warnings"] == []


def args(*args: Any) -> Any:
    return args, {}


def test_the_terms_are_tried_at_one_size_and_the_other_way_round() -> None:
    shapes, calls = infer(lambda x, y, z: z, *(args(*(torch.ones(n, 4) for n in sizes)) for sizes in TWO))
    found = choose_example(calls, shapes, lambda arguments: True)
    assert found.sizes == {"x_dim_0": 3, "y_dim_0": 4}
    tried = other_sizes(shapes, found, calls)
    assert {"x_dim_0": 4, "y_dim_0": 4} in tried
    assert {"x_dim_0": 4, "y_dim_0": 3} in tried


def test_shapes_without_a_relation() -> None:
    calls = [args(torch.ones(a, 4), torch.ones(b, 4), [torch.ones(4, c)] * 2) for a, b, c in TWO]
    shapes, recorded = infer(lambda x, y, z: x, *calls)
    (thin,) = shapes.thin
    assert thin.axes == (("z.0", 1), ("z.1", 1))
    free = without(shapes, thin)
    assert rows(free) == {**rows(shapes), **{f"z.{k}": "float32[4, z_0_dim_1]" for k in (0, 1)}}
    assert free.sizes[1] == {"x_dim_0": 3, "y_dim_0": 4, "z_0_dim_1": 7}
    example = choose_example(recorded, shapes, lambda arguments: True)
    sizes = broken_sizes(thin, example)[0]
    made = resize_arguments(example.arguments, free, sizes, recorded)
    assert [tensor.shape[1] for tensor in made["z"]] == [8, 8]
    assert rows(shapes)["z.0"] == "float32[4, x_dim_0 + y_dim_0]"


def test_eager_that_takes_one_broken_size_does_not_want_the_relation() -> None:
    calls = [args(*(torch.ones(n, 4) for n in sizes)) for sizes in TWO]
    shapes, recorded = infer(lambda x, y, z: z, *calls)
    example = choose_example(recorded, shapes, lambda arguments: True)

    def takes(*accepted: int) -> bool:
        return refused_by_eager(
            shapes.thin[0], shapes, example, recorded, lambda arguments: len(arguments["z"]) in accepted
        )

    assert takes()
    assert takes(7)
    assert not takes(15)


def test_the_mask_of_a_decoder_is_none_of_chance() -> None:
    """Eager takes a longer mask, and a program need not."""

    def step(batch: int, seq: int, past: int) -> Any:
        layer = torch.zeros(batch, 2, past, 4)
        mask = torch.ones(batch, past + seq, dtype=torch.int64)
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        return args(ids, mask, make_dynamic_cache([(layer, layer)]))

    shapes, _ = infer(lambda input_ids, my_mask, cache: input_ids, step(2, 3, 5), step(4, 2, 7))
    assert rows(shapes)["my_mask"] == "int64[batch, past + seq]"
    assert shapes.thin == []
