"""Positions that count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_exportcheck.checks.padding import expand_mask, where_masks
from pytest_exportcheck.errors import ObserveError

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


def rule(where: str | None = "attention_mask", axis: int | None = None, ties: str | None = None) -> Any:
    return SimpleNamespace(where=where, axis=axis, ties=ties)


def test_a_mask_is_expanded_over_the_other_axes() -> None:
    found = expand_mask(MASK, (2, 4, 3), 1)
    assert found is not None
    assert found.dtype == torch.bool
    assert found.shape == (2, 4, 3)
    assert found[0, 0].tolist() == [False] * 3
    assert int(found.sum()) == 7 * 3


def test_keys_and_values_have_their_positions_on_axis_2() -> None:
    found = expand_mask(MASK, (2, 5, 4, 3), 2)
    assert found is not None
    assert not found[0, :, 0].any()
    assert int(found.sum()) == 7 * 15


def test_a_decoding_step_sees_the_last_positions() -> None:
    found = expand_mask(MASK, (2, 1, 8), 1)
    assert found is not None
    assert found.all()
    found = expand_mask(MASK, (2, 4), 1)
    assert found is not None
    assert found.tolist() == MASK.bool().tolist()


@pytest.mark.parametrize(
    ("mask", "shape", "axis"),
    [
        (MASK, (2, 5, 3), 1),
        (MASK, (3, 4), 1),
        (MASK, (2,), 1),
        (MASK[None], (1, 2, 4), 1),
        (MASK[0], (4,), 0),
    ],
)
def test_what_does_not_fit(mask: torch.Tensor, shape: tuple[int, ...], axis: int) -> None:
    assert expand_mask(mask, shape, axis) is None


def test_rules_by_pattern() -> None:
    outputs = [("logits", torch.zeros(2, 4, 8)), ("cache.layers.0.keys", torch.zeros(2, 1, 4, 3)), ("n", 3)]
    masks = where_masks({"logits": rule(), "cache.*": rule(axis=2)}, {"attention_mask": MASK}, outputs)
    assert {path: tuple(mask.shape) for path, mask in masks.items()} == {
        "logits": (2, 4, 8),
        "cache.layers.0.keys": (2, 1, 4, 3),
    }


def test_a_call_without_the_mask_counts_every_position() -> None:
    assert where_masks({"*": rule()}, {}, [("logits", torch.zeros(2, 4))]) == {}


def test_a_rule_that_does_not_fit_is_an_error_with_its_name() -> None:
    with pytest.raises(
        ObserveError, match=r"compare\.log\*: attention_mask does not fit axis 1 of logits \[2, 9\]"
    ):
        where_masks({"log*": rule()}, {"attention_mask": MASK}, [("logits", torch.zeros(2, 9))])
