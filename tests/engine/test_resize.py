"""Inputs of chosen sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pytest_exportcheck.observe import choose_example, other_sizes, resize_arguments, sizes_from_spec
from pytest_exportcheck.pytrees import register_flattening_functions

from .helpers import infer


def args(*values: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return values, kwargs


def take(x: Any, y: Any = None) -> Any:
    return torch.zeros(1)


def decode(input_ids: Any, attention_mask: Any = None, cache: Any = None) -> Any:
    return torch.zeros(1)


def step(batch: int, seq: int, past: int, width: int = 4) -> Any:
    cache = DynamicCache()
    if past:
        cache.update(torch.randn(batch, 1, past, width), torch.randn(batch, 1, past, width), 0)
    mask = torch.ones(batch, past + seq, dtype=torch.int64)
    mask[0, 0] = 0
    return args(torch.arange(batch * seq).reshape(batch, seq), mask, cache)


def test_sizes_are_exact_and_static_axes_and_values_are_kept() -> None:
    shapes, calls = infer(decode, step(2, 3, 5), step(3, 2, 4))
    with register_flattening_functions():
        for sizes in (
            {"batch": 1, "seq": 1, "past": 0},
            {"batch": 7, "seq": 9, "past": 11},
            {"batch": 2, "seq": 3, "past": 1},
        ):
            out = resize_arguments(calls[0].arguments, shapes, sizes, calls)
            assert tuple(out["input_ids"].shape) == (sizes["batch"], sizes["seq"])
            assert tuple(out["attention_mask"].shape) == (sizes["batch"], sizes["past"] + sizes["seq"])
            layer = out["cache"].layers[0]
            assert tuple(layer.keys.shape) == (sizes["batch"], 1, sizes["past"], 4)
            assert set(out["input_ids"].flatten().tolist()) <= set(range(6))
            assert out["attention_mask"].dtype == torch.int64


def test_the_result_shares_no_memory() -> None:
    shapes, calls = infer(take, args(torch.ones(2, 3)), args(torch.ones(4, 3)))
    out = resize_arguments(calls[0].arguments, shapes, {"x_dim_0": 2})
    out["x"].zero_()
    assert bool(calls[0].arguments["x"].all())


def test_a_mask_keeps_its_pattern() -> None:
    def mask(length: int) -> torch.Tensor:
        out = torch.ones(2, length, dtype=torch.int64)
        out[1, : length // 2] = 0
        return out

    shapes, calls = infer(take, args(mask(4)), args(mask(6)))
    (name,) = shapes.symbols
    for length in (2, 3, 5, 8, 12, 13):
        out = resize_arguments(calls[0].arguments, shapes, {name: length})["x"]
        assert bool(out[0].all())
        row = out[1].tolist()
        assert row == sorted(row), "left padding stays on the left"
        assert abs(row.count(0) - length / 2) <= 1
        assert 0 < sum(row) < length


def test_more_rows_are_the_rows_in_turn() -> None:
    shapes, calls = infer(take, args(torch.tensor([[1], [2]])), args(torch.tensor([[1], [2], [3]])))
    out = resize_arguments(calls[0].arguments, shapes, {shapes.symbols[0]: 5})["x"]
    assert out.flatten().tolist() == [1, 2, 1, 2, 1]


def test_an_empty_tensor_takes_its_values_from_another_call() -> None:
    shapes, calls = infer(take, args(torch.zeros(0, 3)), args(torch.full((4, 3), 7.0)))
    (name,) = shapes.symbols
    out = resize_arguments(calls[0].arguments, shapes, {name: 5}, calls)["x"]
    assert out.shape == (5, 3)
    assert bool((out == 7).all())
    assert resize_arguments(calls[0].arguments, shapes, {name: 5})["x"].shape == (5, 3), "no donor: zeros"


def test_empty_on_one_axis_and_grown_on_another() -> None:
    shapes, calls = infer(take, args(torch.zeros(0, 3)), args(torch.ones(4, 5)))
    rows, columns = shapes.symbols
    out = resize_arguments(calls[0].arguments, shapes, {rows: 0, columns: 8}, calls)["x"]
    assert out.shape == (0, 8)
    out = resize_arguments(calls[1].arguments, shapes, {rows: 0, columns: 8}, calls)["x"]
    assert out.shape == (0, 8)
    for size in ((2, 0), (0, 0), (3, 1)):
        out = resize_arguments(calls[0].arguments, shapes, {rows: size[0], columns: size[1]}, calls)["x"]
        assert tuple(out.shape) == size


# the example for exporters


def example(calls: Any, accepts: Any = lambda arguments: True, function: Any = take, **options: Any) -> Any:
    shapes, recorded = infer(function, *calls, **options)
    with register_flattening_functions():
        return choose_example(recorded, shapes, accepts), shapes, recorded


def test_a_call_with_good_sizes_is_taken_as_it_is() -> None:
    found, _, _ = example([args(torch.ones(1, 4)), args(torch.ones(3, 4))])
    assert (found.call, found.resized, found.sizes, found.note) == (1, False, {"x_dim_0": 3}, "")


def test_sizes_0_and_1_and_equal_sizes_are_avoided() -> None:
    found, shapes, _ = example(
        [step(1, 5, 0), step(1, 1, 5), step(1, 1, 6)], function=decode, batch_dims=True
    )
    sizes = list(found.sizes.values())
    assert found.resized
    assert min(sizes) >= 2
    assert len(set(sizes)) == len(sizes)
    assert set(found.sizes) == {"batch", "seq", "past"}
    assert "resized: " in found.note
    for path in ("input_ids", "attention_mask"):
        assert tuple(found.arguments[path].shape) == shapes.dims(path, found.sizes)


def test_a_call_without_a_collision_is_preferred_to_a_larger_one() -> None:
    found, _, _ = example([args(torch.ones(2, 8, 8)), args(torch.ones(3, 6, 4))])
    assert (found.call, found.resized) == (1, False)


def test_a_collision_is_resolved_on_the_grid_of_the_observed_sizes() -> None:
    """Images come in multiples of a patch, and half of a small size may be 1."""
    found, _, _ = example(
        [args(torch.ones(1, 32, 32)), args(torch.ones(1, 64, 64 + 32)), args(torch.ones(1, 96, 96))]
    )
    assert not found.resized
    found, _, _ = example(
        [args(torch.ones(3, 32), torch.ones(3, 32)), args(torch.ones(3, 32), torch.ones(3, 96))],
        batch_dims=True,
    )
    assert found.sizes["batch"] == 3
    found, _, _ = example(
        [args(torch.ones(4, 8), torch.ones(4, 8)), args(torch.ones(2, 4), torch.ones(2, 2))]
    )
    assert len(set(found.sizes.values())) == len(found.sizes)


def test_when_eager_refuses_the_observed_call_is_used_and_the_note_says_so() -> None:
    asked: list[tuple[int, ...]] = []

    def accepts(arguments: dict[str, torch.Tensor]) -> bool:
        asked.append(tuple(arguments["x"].shape))
        return False

    found, _, _ = example([args(torch.ones(1, 4))], accepts, batch_dims=True)
    assert (found.resized, found.sizes) == (False, {"batch": 1})
    assert tuple(found.arguments["x"].shape) == (1, 4)
    assert found.note == "call 0 as observed: eager refuses batch 1 -> 3"
    assert asked == [(3, 4)]


def test_a_sliding_window_limits_the_past() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def call(batch: int, past: int) -> Any:
        cache = DynamicCache()
        layer = DynamicSlidingWindowLayer(sliding_window=4)
        layer.update(torch.ones(batch, 1, past, 2), torch.ones(batch, 1, past, 2))
        cache.layers = [layer]
        return args(torch.zeros(batch, 1, dtype=torch.int64), None, cache)

    found, shapes, calls = example([call(3, 1), call(3, 2)], function=decode, batch_dims=True)
    assert shapes.limits == {"past": 3}
    assert found.sizes["past"] <= 3
    assert len(set(found.sizes.values())) == len(found.sizes)
    assert all(sizes["past"] <= 3 for sizes in other_sizes(shapes, found, calls))


# sizes that nobody showed


def test_other_sizes_are_new_and_include_the_small_ones() -> None:
    found, shapes, calls = example([step(2, 3, 5), step(4, 2, 7)], function=decode)
    with register_flattening_functions():
        sizes = other_sizes(shapes, found, calls)
    assert len(sizes) == len({tuple(sorted(s.items())) for s in sizes})
    assert not [
        s for s in sizes if s in ({"batch": 2, "seq": 3, "past": 5}, {"batch": 4, "seq": 2, "past": 7})
    ]
    for name, tried in {"batch": {1, 2, 3, 6}, "past": {0, 1, 2, 3, 10}, "seq": {1, 2, 3, 7}}.items():
        alone = {s[name] for s in sizes if all(s[n] == found.sizes[n] for n in s if n != name)}
        assert alone >= tried - {found.sizes[name]}
    assert {"batch": 1, "seq": 1, "past": 0} in sizes
    assert {"batch": 6, "seq": 7, "past": 10} in sizes


def test_images_stay_on_the_observed_grid() -> None:
    def look(pixel_values: Any) -> Any:
        return torch.zeros(1)

    found, shapes, calls = example(
        [args(torch.ones(2, 3, 32, 48)), args(torch.ones(3, 3, 48, 64))], function=look
    )
    for sizes in other_sizes(shapes, found, calls):
        assert sizes["height"] % 16 == 0
        assert sizes["width"] % 16 == 0
    heights = {sizes["height"] for sizes in other_sizes(shapes, found, calls)}
    assert {16, 64} <= heights, "the step of the grid, and one more than the largest"


def test_the_largest_of_all_sizes_does_not_grow_out_of_hand() -> None:
    """Attention over 5 images of 768x768 took 17 GiB in ONNX Runtime, where 3 of 256x512 were observed."""

    def look(pixel_values: Any) -> Any:
        return torch.zeros(1)

    found, shapes, calls = example(
        [args(torch.ones(2, 3, 256, 512)), args(torch.ones(3, 3, 512, 256))], function=look
    )
    tried = other_sizes(shapes, found, calls)
    largest = max(3 * sizes["batch"] * sizes["height"] * sizes["width"] for sizes in tried)
    assert largest <= 4 * 3 * 3 * 256 * 512
    assert {"batch": 2, "height": 768, "width": 768} in tried, "the batch gives way, the images are larger"
    assert 5 in {sizes["batch"] for sizes in tried}, "a larger batch, of images that were shown"


def test_few_elements_may_grow() -> None:
    found, shapes, calls = example([args(torch.ones(2, 3)), args(torch.ones(4, 5))])
    assert {"x_dim_0": 9, "x_dim_1": 11} in other_sizes(shapes, found, calls)


def test_no_dynamic_axis_no_other_sizes() -> None:
    found, shapes, calls = example([args(torch.ones(2, 3))])
    assert other_sizes(shapes, found, calls) == []


def test_no_size_is_tried_that_makes_another_one_negative() -> None:
    def call(past: int) -> Any:
        (ids, _, cache), _ = step(2, 3, past)
        return args(ids, torch.ones(2, past - 1, dtype=torch.int64), cache)

    found, shapes, calls = example([call(4), call(6), call(9)], function=decode)
    assert str(shapes.leaves["attention_mask"]) == "int64[2, past - 1]"
    others = other_sizes(shapes, found, calls)
    assert {sizes["past"] for sizes in others} == {1, 2, 3, 12}
    with register_flattening_functions():
        for sizes in others:
            out = resize_arguments(found.arguments, shapes, sizes, calls)
            assert out["attention_mask"].shape[1] == sizes["past"] - 1


def test_sizes_from_the_spec_are_combined() -> None:
    found, _, _ = example([step(2, 3, 5), step(4, 2, 7)], function=decode)
    sizes = sizes_from_spec(found, {"batch": [1, 8], "past": [0, 3]})
    assert sizes == [{**found.sizes, "batch": b, "past": p} for b in (1, 8) for p in (0, 3)]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_is_never_passed(limit: int) -> None:
    from pytest_exportcheck.observe.resize import _safe

    assert _safe({"past": limit, "batch": 2}, {"past": limit}, ["batch", "past"])["past"] <= max(limit, 2)
    assert _safe({"past": 0}, {"past": 1}, ["past"])["past"] <= 1
