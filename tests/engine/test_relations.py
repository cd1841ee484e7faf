"""Relations between sizes that two calls show: said, tried where they do not hold, left alone where real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck import make_dynamic_cache
from pytest_exportcheck.observe import choose_example
from pytest_exportcheck.observe.relations import (
    broken_sizes,
    equalities_of_chance,
    refused_by_eager,
    without,
)
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


def warned(record: dict[str, Any]) -> list[str]:
    """Warnings, but for those of inputs that the branch which is taken does not read."""
    return [note for note in record["warnings"] if not note.startswith("no output depends on the values of")]


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
    assert warned(record) == [NOTE]


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
    assert warned(record) == [NOTE]
    assert record["resize"]["relations"] == [
        f"x_dim_0=3, y_dim_0=4, z_dim_0={n} (z_dim_0 is not x_dim_0 + y_dim_0): agrees" for n in (8, 6, 15)
    ]


def test_a_relation_that_eager_wants_is_none_of_chance(tmp_path: Path) -> None:
    stage, error, record = verdict(run_of(tmp_path, "return torch.cat([x, y]) * z"), "onnx-dynamo")
    assert stage == "pass", error
    assert warned(record) == []
    assert record["resize"]["relations"] == []


@pytest.mark.parametrize("extra", ["resize: off\n", "resize: {x_dim_0: [2, 9]}\n"])
def test_sizes_of_the_spec_are_those_and_no_others(tmp_path: Path, extra: str) -> None:
    condition, _ = BRANCHES["equal"]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", extra=extra)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert warned(record) == [NOTE]


def test_three_calls_settle_it(tmp_path: Path) -> None:
    condition, _ = BRANCHES["equal"]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", sizes=THREE)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert warned(record) == []


def test_a_third_call_that_breaks_it_unties_the_axis(tmp_path: Path) -> None:
    condition, _ = BRANCHES["equal"]
    sizes = [*TWO, (2, 3, 9)]
    run = run_of(tmp_path, condition, "    return z + x.sum()", "return z * 2 + y.sum()", sizes=sizes)
    stage, _, record = verdict(run, "onnx-dynamo")
    assert stage == "compare"
    assert warned(record) == []


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
    assert warned(record) == []


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


def pair_of(tmp_path: Path, signature: str, *lines: str, calls: str, extra: str = "") -> SpecRun:
    body = "".join(f"        {line}\n" for line in lines)
    return make_run(
        tmp_path,
        f"""
class Net(nn.Module):
    def forward(self, {signature}):
{body}

def build_model():
    return Net()


def calls():
    torch.manual_seed(1)
    return [({calls}, {{}}) for n in SIZES]


SIZES = (5, 7)
""",
        extra,
    )


PAIR = "(torch.randn(n, 4), torch.randn(n, 4))"

EQUAL = (
    "axis 0 of y is taken for x_dim_0, as axis 0 of x is, because they are equal in the calls (5, 7), and "
    "eager takes them apart: a call in which they differ would settle it, or a third size that they share, "
    "or dims in the spec's calls"
)


def test_axes_that_are_equal_in_two_calls_are_tried_apart(tmp_path: Path) -> None:
    lines = ("if x.shape[0] == y.shape[0]:", "    return x.sum(0) + y.sum(0)", "return x.sum(0) - y.sum(0)")
    run = pair_of(tmp_path, "x, y", *lines, calls=PAIR)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize", record["resize"]
    assert "at sizes x_dim_0=7, y_dim_0=5 (y_dim_0 is not x_dim_0)" in error.message
    assert "decided where it holds, and otherwise here: y_dim_0 == x_dim_0" in str(error) or (
        "decided where it holds, and otherwise here: x_dim_0 == y_dim_0" in str(error)
    )
    assert EQUAL in str(error)
    # A guard that wants what the golden says is no failure, and not without a word.
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert warned(record) == [
        EQUAL,
        "axis 0 of y must be x_dim_0, as axis 0 of x is, in the program and not in eager, which takes "
        "x_dim_0=7, y_dim_0=5 (y_dim_0 is not x_dim_0): the ExportedProgram fails on them: AssertionError: "
        "Guard failed: y.size()[0] == x.size()[0]",
    ]


def test_one_buffer_for_axes_of_one_name_is_said(tmp_path: Path) -> None:
    run = pair_of(
        tmp_path, "x, y", "return (torch.relu(x) * 2).sum(0) + (torch.relu(y) * 3).sum(0)", calls=PAIR
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    note, bound = warned(record)
    assert note == EQUAL
    assert bound.startswith("axis 0 of y must be x_dim_0, as axis 0 of x is, in the program and not in eager")
    assert "attempting to re-use buffer" in bound
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert warned(record) == [EQUAL]


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [(("return x + y",), "(5, 7)"), (("return x * 2, y * 3",), "(5, 7, 6)")],
    ids=["eager wants it", "three sizes"],
)
def test_equalities_that_are_none_of_chance(tmp_path: Path, lines: tuple[str, ...], sizes: str) -> None:
    run = pair_of(tmp_path, "x, y", *lines, calls=PAIR)
    path = tmp_path / "net.py"
    path.write_text(path.read_text().replace("SIZES = (5, 7)", f"SIZES = {sizes}"))
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert warned(record) == []
    assert record["resize"]["relations"] == []


@pytest.mark.parametrize(
    "observe",
    [
        '{batch_dims: true, calls: "net.py:calls"}',
        "{dims: [n], calls: [{forward: ['float32[n, 4]', 'float32[n, 4]'], dims: {n: 5}}, "
        "{forward: ['float32[n, 4]', 'float32[n, 4]'], dims: {n: 7}}]}",
    ],
    ids=["a batch", "dims"],
)
def test_a_spec_may_say_that_axes_are_equal(tmp_path: Path, observe: str) -> None:
    run = pair_of(tmp_path, "x, y", "return x * 2, y * 3", calls=PAIR, extra=f"observe: {observe}\n")
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert warned(record) == []


def test_a_spec_may_say_that_axes_are_not_equal(tmp_path: Path) -> None:
    calls = ", ".join(
        f"{{forward: ['float32[n, 4]', 'float32[m, 4]'], dims: {{n: {size}, m: {size}}}}}" for size in (5, 7)
    )
    extra = f"observe: {{dims: [n, m], calls: [{calls}]}}\n"
    run = pair_of(tmp_path, "x, y", "return x * 2, y * 3", calls=PAIR, extra=extra)
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert warned(record) == []
    assert any("n=1, m=" in text for text in record["resize"]["passed"])


def test_the_sides_of_an_image_are_tried_apart_on_their_grid(tmp_path: Path) -> None:
    run = pair_of(
        tmp_path,
        "pixel_values",
        "if pixel_values.shape[2] % 4 or pixel_values.shape[3] % 4:",
        "    raise ValueError('no multiple of a patch')",
        "return pixel_values.sum(1).cumsum(-1)",
        calls="(torch.randn(2, 3, 4 * n, 4 * n),)",
    )
    stage, error, record = verdict(run, "torch-export")
    assert stage == "pass", error
    assert "axis 3 of pixel_values is taken for height, as axis 2 of pixel_values is" in record["warnings"][0]
    listed = record["resize"]["relations"]
    assert [text.partition(":")[0] for text in listed[:2]] == [
        "height=28, width=20 (width is not height)",
        "height=28, width=32 (width is not height)",
    ]


def equalities(function: Any, *calls: Any, **options: Any) -> list[tuple[str, Any, Any]]:
    """(symbol, axes, the axes that they are like) of each equality that `function` does not want."""
    shapes, recorded = infer(function, *calls, **options)

    def accepts(arguments: dict[str, Any]) -> bool:
        try:
            function(**arguments)
        except Exception:
            return False
        return True

    example = choose_example(recorded, shapes, accepts)
    found = equalities_of_chance(shapes, example, recorded, accepts)
    return [(each.symbol, each.axes, each.like) for each in found]


def two(*shapes: tuple[int | None, ...]) -> list[Any]:
    """Two calls, in which ``None`` is 5 and then 7."""
    return [args(*(torch.ones([n if s is None else s for s in shape]) for shape in shapes)) for n in (5, 7)]


def test_axes_that_belong_together_are_set_apart_together() -> None:
    found = equalities(
        lambda source, source_kept, target, target_kept: (source * source_kept, target * target_kept),
        *two((None, 4), (None, 1), (None, 4), (None, 1)),
    )
    assert found == [
        ("target_dim_0", (("target", 0), ("target_kept", 0)), (("source", 0), ("source_kept", 0)))
    ]


def test_the_first_of_an_encoder_and_a_decoder_keeps_the_name() -> None:
    def model(
        input_ids: Any, attention_mask: Any, decoder_input_ids: Any, decoder_attention_mask: Any
    ) -> Any:
        return (input_ids * attention_mask).sum(1) + (decoder_input_ids * decoder_attention_mask).sum(1)

    found = equalities(model, *two(*[(3, None)] * 4))
    assert found == [
        (
            "target",
            (("decoder_input_ids", 1), ("decoder_attention_mask", 1)),
            (("input_ids", 1), ("attention_mask", 1)),
        )
    ]


def test_each_of_three_axes_that_eager_takes_apart() -> None:
    found = equalities(lambda x, y, z: (x, y, z), *two((None, 4), (3, None), (3, 4, None)))
    assert [(symbol, axes) for symbol, axes, _ in found] == [
        ("y_dim_1", (("y", 1),)),
        ("z_dim_2", (("z", 2),)),
    ]


def test_a_mask_that_is_larger_than_what_it_masks_proves_nothing() -> None:
    """Attention takes the part that it needs."""
    assert equalities(lambda input_ids, attention_mask: input_ids, *two((3, None), (3, None))) == []
    assert equalities(lambda input_ids, attention_mask: input_ids, *two((None, 3), (None, 3))) == []
    (found,) = equalities(
        lambda input_ids, attention_mask, pixel_values: (input_ids, pixel_values),
        *two((None, 3), (None, 3), (None, 3, 8, 8)),
    )
    assert found[1:] == ((("pixel_values", 0),), (("input_ids", 0), ("attention_mask", 0)))
    (found,) = equalities(lambda input_ids, labels: input_ids, *two((3, None), (3, None)))
    assert found[1] == (("labels", 1),)


@pytest.mark.parametrize("kinds", ["token_type_ids", "mm_token_type_ids"])
def test_the_kinds_of_tokens_are_as_many_as_the_tokens(kinds: str) -> None:
    """A decoder that has an image's positions already does not read them."""
    scope: dict[str, Any] = {}
    exec(f"def model(input_ids, {kinds}, other): return input_ids, other", scope)
    (found,) = equalities(scope["model"], *two((3, None), (3, None), (3, None)))
    assert found[1:] == ((("other", 1),), (("input_ids", 1), (kinds, 1)))
    # Not of another rank, and not of another input.
    (found,) = equalities(scope["model"], *two((3, None), (3, None, 4), (3, 4)))
    assert found[1] == ((kinds, 1),)
    found = equalities(scope["model"], *two((3, 4), (3, None), (3, None)))
    assert len(found) == 1


def test_the_layers_of_a_cache_are_one_thing() -> None:
    def call(n: int) -> Any:
        return args(make_dynamic_cache([(torch.zeros(2, 2, n, 4),) * 2] * 3), torch.zeros(2, n))

    (found,) = equalities(lambda cache, x: (cache, x), call(5), call(7))
    symbol, axes, like = found
    assert (symbol, axes) == ("x_dim_1", (("x", 1),))
    assert len(like) == 6


def test_sizes_of_equal_axes_that_are_set_apart() -> None:
    shapes, recorded = infer(lambda x, y: x, *two((None, 4), (None, 4)))
    example = choose_example(recorded, shapes, lambda arguments: True)
    (relation,) = equalities_of_chance(shapes, example, recorded, lambda arguments: True)
    assert broken_sizes(relation, example) == [{"x_dim_0": 7, "y_dim_0": size} for size in (5, 8, 6)]
    free = without(shapes, relation)
    assert rows(free) == {"x": "float32[x_dim_0, 4]", "y": "float32[y_dim_0, 4]"}
    assert rows(shapes) == {"x": "float32[x_dim_0, 4]", "y": "float32[x_dim_0, 4]"}
    limited = replace(relation, limit=6)
    assert [sizes["y_dim_0"] for sizes in broken_sizes(limited, example)] == [5, 6]


MASKED = """
class Net(nn.Module):
    def forward(self, x, attention_mask):
        return x * %s


def build_model():
    return Net()


def calls():
    g = torch.Generator().manual_seed(1)
    return [
        ((torch.randn(b, n, 4, generator=g), torch.tensor([[1] * (n - 1) + [0]] * b)), {})
        for b, n in ((2, 5), (3, 7))
    ]
"""


@pytest.mark.parametrize("exporter", ["onnx-dynamo", "torch-export"])
def test_a_mask_that_the_spec_compares_by_goes_with_its_output(tmp_path: Path, exporter: str) -> None:
    run = make_run(tmp_path, MASKED % "2", "compare: {output: {where: attention_mask}}\n")
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert any("attention_mask does not fit" in line for line in record["resize"]["relations"])


@pytest.mark.parametrize(
    ("name", "past"), [("past_key_values", "past"), ("kv_cache", "past"), ("states", "states_0_0_dim_2")]
)
@pytest.mark.parametrize("flat", [False, True])
def test_a_mask_of_what_a_plain_list_of_keys_and_values_holds(name: str, past: str, flat: bool) -> None:
    """The mask stands before the cache, and is a sum of what comes after it."""
    scope: dict[str, Any] = {}
    exec(f"def model(input_ids, attention_mask, {name}): return input_ids", scope)
    calls = []
    for batch, seq, length in ((2, 3, 4), (3, 5, 6), (2, 1, 9)):
        pair = (torch.ones(batch, 2, length, 8), torch.ones(batch, 2, length, 8))
        cache: Any = [*pair, *pair] if flat else [pair, pair]
        tokens = torch.ones(batch, seq, dtype=torch.int64)
        calls.append(((tokens, torch.ones(batch, seq + length), cache), {}))
    shapes, _ = infer(scope["model"], *calls)
    past = past.replace("_0_0_", "_0_") if flat else past
    first = f"{name}.0" if flat else f"{name}.0.0"
    assert str(shapes.leaves[first]) == f"float32[batch, 2, {past}, 8]"
    both = "past + seq" if past == "past" else f"seq + {past}"
    assert str(shapes.leaves["attention_mask"]) == f"float32[batch, {both}]"
    assert not shapes.thin
