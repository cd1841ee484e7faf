"""Inputs of other sizes: values that differ from their neighbours, and structures that are kept."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pytest_exportcheck.checks import sizes as sizes_check
from pytest_exportcheck.observe import choose_example, resize_arguments, variety
from pytest_exportcheck.observe.variety import inputs_at
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import infer, make_run, verdict

Call = tuple[tuple[Any, ...], dict[str, Any]]


def take(x: Any) -> Any:
    return torch.zeros(1)


def decode(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None) -> Any:
    return torch.zeros(1)


def of_one(*tensors: torch.Tensor) -> list[Call]:
    return [((tensor,), {}) for tensor in tensors]


def step(batch: int, seq: int, past: int) -> Call:
    """A call of a decoder whose first row has two padded positions on the left."""
    generator = torch.Generator().manual_seed(1000 * batch + 10 * seq + past)
    cache = DynamicCache()
    if past:
        keys = torch.rand(batch, 1, past, 2, generator=generator)
        cache.update(keys, -keys, 0)
    mask = torch.ones(batch, past + seq, dtype=torch.int64)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)[:, -seq:]
    ids = torch.randint(3, 96, (batch, seq), generator=generator)
    return (ids, mask, positions, cache), {}


def various(calls: list[Call], sizes: dict[str, int], function: Any = take) -> list[dict[str, Any]]:
    """Arguments of `sizes`, the most various first."""
    shapes, recorded = infer(function, *calls)
    with register_flattening_functions():
        example = choose_example(recorded, shapes, lambda arguments: True)
        wanted = {**example.sizes, **sizes}
        return [each.arguments for each in inputs_at(example, shapes, wanted, recorded)]


def grown(*tensors: torch.Tensor, **sizes: int) -> torch.Tensor:
    made = various(of_one(*tensors), sizes)[0]["x"]
    assert isinstance(made, torch.Tensor)
    return made


DECODER = [step(2, 9, 0), step(2, 1, 9), step(2, 1, 10), step(3, 6, 0), step(3, 1, 6)]


def test_tokens_are_recorded_ones_and_differ_from_their_neighbours() -> None:
    drawn, *_, copies = various(DECODER, {"batch": 3, "seq": 400}, decode)
    recorded = {int(value) for (ids, *_), _ in DECODER for value in ids.flatten()}
    ids = drawn["input_ids"]
    assert {*ids.flatten().tolist()} <= recorded
    assert len({*ids.flatten().tolist()}) > 0.9 * len(recorded)
    assert float((ids.diff(dim=1) == 0).float().mean()) < 0.05
    assert not torch.equal(ids[0], ids[1])
    assert float((copies["input_ids"].diff(dim=1) == 0).float().mean()) > 0.95, "as copies do"


def test_a_mask_keeps_its_padding() -> None:
    for sizes in ({"seq": 400}, {"batch": 7, "past": 0}, {"past": 33, "seq": 2}):
        drawn, *_, copies = various(DECODER, sizes, decode)
        mask, copy = drawn["attention_mask"], copies["attention_mask"]
        assert mask.shape == copy.shape
        assert [*map(sorted, mask.tolist())] == mask.tolist(), "padding stays on the left"
        # The copy is one of the example, which was resized once before.
        assert bool(((mask - copy).sum(dim=1).abs() <= 1 + 0.1 * mask.shape[1]).all())
        assert (mask == 0).any(dim=1).tolist() == (copy == 0).any(dim=1).tolist()


def test_positions_go_on_from_the_past_that_there_is() -> None:
    drawn, within, copies = various(DECODER, {"batch": 2, "seq": 13, "past": 10}, decode)
    assert drawn["position_ids"].tolist() == [[*range(8, 21)], [*range(10, 23)]], "two are padded"
    assert int(within["position_ids"].max()) <= 10, "no position that nobody recorded"
    assert copies["position_ids"].unique().numel() <= 4
    first = various(DECODER, {"batch": 2, "seq": 5, "past": 0}, decode)[0]["position_ids"]
    assert first.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_padded_positions_keep_their_share() -> None:
    row = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    made = grown(row, row[:, :5], x_dim_1=12)
    assert made.tolist() == [[1, 1, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7], [*range(12)]]
    assert grown(row, row[:, :5], x_dim_1=3).tolist() == [[1, 0, 1], [0, 1, 2]]


def test_a_range_on_the_first_axis_goes_on() -> None:
    assert grown(torch.arange(3, 8), torch.arange(3, 6), x_dim_0=9).tolist() == [*range(3, 12)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_of_every_dtype_grow(dtype: torch.dtype) -> None:
    row, other = torch.arange(3, 8).to(dtype), torch.tensor([3, 1, 4, 1, 5]).to(dtype)
    assert grown(row, row[:3], x_dim_0=9).tolist() == [*range(3, 12)]
    assert grown(row[None], row[None, :3], x_dim_1=9).tolist() == [[*range(3, 12)]]
    assert grown(other, other[:3], x_dim_0=7).tolist() == [3, 1, 4, 1, 5, 3, 1]
    assert grown(other[None], other[None, :3], x_dim_1=7).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.uint64])
def test_positions_stay_within_their_dtype(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    row = torch.tensor([*range(top - 5, top + 1)], dtype=dtype)
    for made in various(of_one(row, row[:4]), {"x_dim_0": 20}):
        assert {*made["x"].tolist()} <= {*row.tolist()}


def test_a_key_stays_with_its_value() -> None:
    drawn, *_ = various(DECODER, {"past": 100, "batch": 4}, decode)
    layer = drawn["cache"].layers[0]
    assert layer.keys.shape == (4, 1, 100, 2)
    assert torch.equal(layer.keys, -layer.values)
    assert len({tuple(each) for each in layer.keys[0, 0].tolist()}) > 15
    recorded = {tuple(each) for (*_, cache), _ in DECODER if cache.layers for each in _slices(cache)}
    assert {tuple(each) for each in layer.keys.reshape(-1, 2).tolist()} <= recorded


def _slices(cache: Any) -> list[list[float]]:
    found: list[list[float]] = cache.layers[0].keys.reshape(-1, 2).tolist()
    return found


def prompts(*rows: list[int]) -> Call:
    return (torch.tensor(rows),), {}


def embed(input_ids: Any) -> Any:
    return torch.zeros(1)


IMAGE, START, END, PAD = 90, 1, 2, 0


def test_placeholders_ends_and_padding() -> None:
    calls = [
        prompts(
            [START, 5, IMAGE, IMAGE, IMAGE, 7, 8, 9, END],
            [START, 10, 11, IMAGE, IMAGE, IMAGE, 12, 13, END],
        ),
        prompts(
            [START, 5, 21, IMAGE, IMAGE, IMAGE, 22, 23, 24, 25, 26, END],
            [PAD, PAD, PAD, START, IMAGE, IMAGE, IMAGE, 31, 32, 33, 34, END],
            [PAD, PAD, START, 35, IMAGE, IMAGE, IMAGE, 31, 36, 33, 34, END],
        ),
    ]
    for size in (12, 13, 40):
        drawn, *_, copies = various(calls, {"seq": size, "batch": 5}, embed)
        ids, near = drawn["input_ids"], copies["input_ids"]
        assert ids.shape == (5, size)
        for row, copy in zip(ids.tolist(), near.tolist(), strict=True):
            assert row.count(IMAGE) == 3
            first = row.index(IMAGE)
            assert row[first : first + 3] == [IMAGE] * 3
            assert row.count(START) == 1
            assert row[-1] == END
            assert row.count(END) == 1
            assert [value == PAD for value in row] == [value == PAD for value in copy]


def test_one_prompt_alone_keeps_only_its_runs() -> None:
    ids = grown_ids([[4, 5, 6, 6, 6, 7, 8]], 70)
    assert (ids == 6).sum() == 30
    assert {*ids.flatten().tolist()} == {4, 5, 6, 7, 8}
    assert float((ids.diff(dim=1) == 0).float().mean()) < 0.5


def grown_ids(rows: list[list[int]], size: int) -> torch.Tensor:
    made = various([prompts(*rows), prompts(*(row[:1] for row in rows))], {"seq": size}, embed)[0][
        "input_ids"
    ]
    assert isinstance(made, torch.Tensor)
    return made


@pytest.mark.parametrize(
    ("short", "long"),
    [
        pytest.param(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1, 1, 1]]), id="flags"),
        pytest.param(torch.tensor([[False, True, True]]), torch.ones(1, 5, dtype=torch.bool), id="bool"),
        pytest.param(torch.tensor([[0.0, 0.0, -3e38]]), torch.zeros(1, 5), id="additive mask"),
        pytest.param(torch.tensor([[0, 3, 7, 12]]), torch.tensor([[0, 2, 9]]), id="offsets"),
        pytest.param(torch.tensor([[0.1, 0.2, 0.9]]), torch.tensor([[0.0, 0.5]]), id="sorted floats"),
        pytest.param(torch.tensor([[0, 0, 0, 2, 2, 1, 1]]), torch.tensor([[0, 0, 1, 1]]), id="segments"),
        pytest.param(torch.ones(1, 4), torch.ones(1, 6), id="ones"),
    ],
)
def test_a_structure_is_resampled(short: torch.Tensor, long: torch.Tensor) -> None:
    made = various(of_one(short, long), {"x_dim_1": 21})
    assert len(made) == 1, "nothing is drawn: there are the copies only"


def test_offsets_on_the_first_axis_stay_sorted() -> None:
    made = grown(torch.tensor([0, 3, 7, 12]), torch.tensor([0, 2, 9]), x_dim_0=11)
    assert made.tolist() == sorted(made.tolist())
    assert (made[0], made[-1]) == (0, 12)


def test_lengths_stay_in_turn() -> None:
    made = grown(torch.tensor([5, 3, 9]), torch.tensor([4, 6]), x_dim_0=7)
    assert made.tolist() == [5, 3, 9, 5, 3, 9, 5]


def test_slices_are_drawn_whole() -> None:
    """A box (left < right), the two ends of an edge, a one-hot row: parts of two are none."""
    generator = torch.Generator().manual_seed(0)
    boxes = torch.randint(0, 50, (2, 6, 2), generator=generator).cumsum(dim=2)
    pairs = {tuple(pair) for pair in boxes.reshape(-1, 2).tolist()}
    made = grown(boxes, boxes[:, :4], x_dim_1=40)
    assert {tuple(pair) for pair in made.reshape(-1, 2).tolist()} <= pairs
    assert not torch.equal(made[0], made[1])
    edges = torch.tensor([[0, 4, 2, 7, 1, 3], [3, 1, 9, 0, 5, 2]])
    made = grown(edges, edges[:, :4], x_dim_1=40)
    assert {*zip(*made.tolist(), strict=True)} == {*zip(*edges.tolist(), strict=True)}
    hot = torch.eye(5)[torch.tensor([[0, 3, 1, 4], [2, 0, 4, 1]])]
    assert bool((grown(hot, hot[:, :3], x_dim_1=30).sum(dim=-1) == 1).all())


def test_rows_of_images_differ_and_recorded_ones_come_first() -> None:
    generator = torch.Generator().manual_seed(0)
    two, three = torch.rand(2, 3, 4, 4, generator=generator), torch.rand(3, 3, 4, 4, generator=generator)
    made = grown(two, three, x_dim_0=6)
    assert torch.equal(made[:3], three)
    known = [*two, *three]
    which = [next(i for i, each in enumerate(known) if torch.equal(each, row)) for row in made]
    assert all(one != other for one, other in itertools.pairwise(which))
    assert {*which} & {0, 1}, "those of other calls too"


def test_a_background_stays_where_it_is() -> None:
    image = torch.zeros(2, 8, 4)
    image[:, 4:] = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) + 1
    made = grown(image, image[:, 2:], x_dim_1=24)
    assert bool((made[:, :12] == 0).all())
    assert bool((made[:, 12:] > 0).all())
    assert not bool((made[:, 12:].diff(dim=1) == 0).all(dim=-1).any())


def test_what_shrinks_is_left_out_evenly() -> None:
    tensor = torch.rand(2, 9, 3)
    shapes, calls = infer(take, *of_one(tensor, tensor[:, :5]))
    copies = resize_arguments(calls[0].arguments, shapes, {"x_dim_1": 3}, calls)["x"]
    assert torch.equal(grown(tensor, tensor[:, :5], x_dim_1=3), copies)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[5, 2, 9, 4, 7, 1]]).to(dtype)
    made = grown(tensor, tensor[:, :4], x_dim_1=20)
    assert made.dtype == dtype
    assert len({*made.flatten().tolist()}) > 4
    assert {*made.flatten().tolist()} <= {5, 2, 9, 4, 7, 1}


def test_memory_lies_as_that_of_the_recorded_tensor() -> None:
    made = grown(torch.rand(2, 3, 7).movedim(1, 2), torch.rand(2, 3, 5).movedim(1, 2), x_dim_1=12)
    assert made.stride() == torch.rand(2, 3, 12).movedim(1, 2).stride()


def test_the_example_itself_is_what_it_was() -> None:
    shapes, recorded = infer(decode, *DECODER)
    with register_flattening_functions():
        example = choose_example(recorded, shapes, lambda arguments: True)
        *_, copies = inputs_at(example, shapes, example.sizes, recorded)
        assert example.resized
        assert copies.values == "repeated"
        assert torch.equal(copies.arguments["input_ids"], example.arguments["input_ids"])
        assert example.arguments["input_ids"].unique(dim=1).shape[1] == 1, "one token, nine times"


def test_on_a_device_no_position_is_tried_that_nobody_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variety, "_may_be_refused", lambda arguments: False)
    within, _ = various(DECODER, {"batch": 2, "seq": 13, "past": 10}, decode)
    assert int(within["position_ids"].max()) <= 10


def digest() -> str:
    """Of inputs of several sizes."""
    found = hashlib.sha256()
    for sizes in ({"seq": 40, "batch": 5}, {"past": 33}, {"seq": 41}):
        for made in various(DECODER, sizes, decode):
            layer = made["cache"].layers[0]
            for tensor in (made["input_ids"], made["position_ids"], layer.keys, layer.values):
                found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def test_another_process_draws_the_same() -> None:
    torch.manual_seed(5)
    here = digest()
    torch.manual_seed(6)
    assert digest() == here, "nor does the seed of the process matter"
    folder = Path(__file__).parents[1]
    code = "from engine.test_variety import digest; print(digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert there.stdout.strip() == here, there.stderr


def test_the_state_of_random_numbers_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    various(DECODER, {"seq": 40}, decode)
    assert torch.equal(torch.get_rng_state(), before)


# what eager says


NEXT = """
    class Net(nn.Module):
        def forward(self, x):
            n = x.shape[1]
            # From 33 on another one: an export keeps the branch of its example.
            at = n // 2 + 1 if n > 32 else n // 2
            return x[:, at] * 2


    def build_model():
        return Net()
"""

FLOATS = """
    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(b, n, 4, generator=g),), {}) for b, n in ((2, 9), (3, 7))]
"""

POSITIONS = """
    def calls():
        return [((torch.arange(n).expand(b, n),), {}) for b, n in ((2, 9), (3, 7))]
"""


def repeated_only(*arguments: Any) -> Any:
    return [*inputs_at(*arguments)][-1:]


@pytest.mark.parametrize("calls", [FLOATS, POSITIONS], ids=["values", "positions"])
def test_off_by_one_is_seen_where_neighbours_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str
) -> None:
    run = make_run(tmp_path, NEXT + calls)
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize", record
    assert error is not None
    assert error.facts["sizes"]["x_dim_1"] in (33, 34)
    monkeypatch.setattr(sizes_check, "inputs_at", repeated_only)
    stage, _, record = verdict(make_run(tmp_path, NEXT + calls, name="again"), "onnx-dynamo")
    assert stage == "pass", "equal neighbours hide it"
    assert any("x_dim_1=33" in text for text in record["resize"]["passed"])


TABLE = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(12, 4)

        def forward(self, x, positions):
            return x + self.table(positions)


    def build_model():
        torch.manual_seed(0)
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [
            ((torch.randn(b, n, 4, generator=g), torch.arange(n).expand(b, n)), {})
            for b, n in ((2, 9), (3, 7))
        ]
"""


def test_positions_beyond_a_table_stay_within_the_recorded_ones(tmp_path: Path) -> None:
    stage, error, record = verdict(make_run(tmp_path, TABLE), "onnx-dynamo")
    assert (stage, error) == ("pass", None)
    assert record["resize"]["refused_by_eager"] == []
    assert record["resize"]["repeated"] == [], "they are drawn all the same"
    assert any("dim_1=19" in text for text in record["resize"]["passed"])


FUSSY = """
    class Net(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling() and bool((x.diff(dim=1) != 0).sum(dim=1).max() > 8):
                raise ValueError("too many changes\\nof value")
            return x * 2


    def build_model():
        return Net()


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(b, n, generator=g),), {}) for b, n in ((2, 9), (3, 7))]
"""


def test_a_size_that_eager_takes_with_copies_only_is_tried_with_copies(tmp_path: Path) -> None:
    stage, error, record = verdict(make_run(tmp_path, FUSSY), "onnx-dynamo")
    assert (stage, error) == ("pass", None)
    resize = record["resize"]
    assert resize["refused_by_eager"] == []
    assert "x_dim_0=2, x_dim_1=19: ValueError: too many changes" in resize["repeated"], resize
    assert {text.partition(":")[0] for text in resize["repeated"]} <= {*resize["passed"]}
